"""A process of the bench: one trainer rank or one worker, with its part of the model.

What a way does inside a member is a function of the way's own module that takes the member first; `do` runs it. So
a way is one file, and members know none of them. The thing to watch: a way keeps what it needs from `open` to
`close` in `kept`, and must leave it empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch

from weightsync.service.bench.layout import Box, Layout
from weightsync.service.bench.values import allocate, differing, fill


class Member:
    """A trainer rank or a worker."""

    def __init__(self, role: str, index: int) -> None:
        torch.set_num_threads(1)
        self.role, self.index = role, index
        self.layout = Layout((), producers=1, consumers=1, tensor_parallel=1)
        self.boxes: dict[str, Box] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.kept: dict[str, Any] = {}

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(member, *arguments)"""
        return function(self, *arguments)


def take_part(member: Member, layout: Layout) -> None:
    """Own this layout's tensors from now on, and no earlier one's."""
    member.tensors = {}
    member.layout = layout
    member.boxes = layout.held(member.index) if member.role == "trainer" else layout.wanted(member.index)
    member.tensors = allocate(layout, member.boxes)


def leave(member: Member) -> None:
    member.tensors, member.boxes = {}, {}
    member.kept.clear()


def set_version(member: Member, version: int) -> None:
    """The trainer's step: every element of its shards is new."""
    fill(member.layout, member.boxes, member.tensors, version)


def wrong_tensors(member: Member, version: int) -> list[str]:
    return differing(member.layout, member.boxes, member.tensors, version)


def addresses(member: Member) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in member.tensors.items()}


def spawn(role: str, indices: Sequence[int], *, tensor_transport: bool = False) -> list[Any]:
    """Members as Ray actors that take no CPU slot, ready for calls.

    Args:
        tensor_transport: they can use Ray Direct Transport.
    """
    remote: Any = ray.remote
    actor_class = remote(num_cpus=0, enable_tensor_transport=tensor_transport)(Member)
    actors = [actor_class.remote(role, index) for index in indices]
    ray.get([actor.do.remote(_pid) for actor in actors])
    return actors


def _pid(member: Member) -> int:
    return os.getpid()
