"""torch.distributed over gloo: among trainers that gather, and for broadcasts to workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist

from weightsync.service.bench.layout import Layout
from weightsync.service.bench.members import Member
from weightsync.service.bench.stage import CALL_TIMEOUT_S, Cast, seconds
from weightsync.service.bench.ways.base import Needs, Way
from weightsync.service.bench.ways.slicing import take
from weightsync.service.ports import free_port


class GlooBroadcast(Way):
    """Each rank broadcasts its shards, tensor by tensor, to all workers, which cut out what is theirs.

    Shards go out as they are, so nobody has to gather whole tensors first.
    """

    def needs(self, layout: Layout) -> Needs:
        return Needs(memory=layout.consumers * layout.largest_nbytes)

    def open(self, cast: Cast) -> None:
        join_group(cast, cast.members, free_port())
        cast.each(cast.members, _make_groups)

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {"gloo broadcast, sliced": seconds(lambda: cast.each(cast.members, _broadcast))}

    def close(self, cast: Cast) -> None:
        leave_group(cast, cast.members)


def join_group(cast: Cast, members: Sequence[Any], port: int) -> None:
    """One process group of these members, ranked in this order."""
    calls = [member.do.remote(_join, rank, len(members), port) for rank, member in enumerate(members)]
    ray.get(calls, timeout=CALL_TIMEOUT_S)


def leave_group(cast: Cast, members: Sequence[Any]) -> None:
    cast.each(members, _leave)


def _join(member: Member, rank: int, world: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)


def _leave(member: Member) -> None:
    dist.destroy_process_group()
    member.kept.clear()


def _make_groups(member: Member) -> None:
    """One group per trainer rank: that rank and all workers."""
    layout = member.layout
    workers = list(range(layout.producers, layout.producers + layout.consumers))
    member.kept["groups"] = [dist.new_group([rank, *workers]) for rank in range(layout.producers)]
    if member.role == "worker":
        member.kept["scratch"] = torch.full((layout.largest_nbytes // 2,), 0, dtype=torch.bfloat16)


def _broadcast(member: Member) -> None:
    if member.role == "trainer":
        for tensor in member.tensors.values():
            dist.broadcast(tensor, src=member.index, group=member.kept["groups"][member.index])
        return
    for rank, group in enumerate(member.kept["groups"]):
        for name, box in member.layout.held(rank).items():
            shard = member.kept["scratch"][: box.numel].view(member.layout.tensors[name].shape_of(box))
            dist.broadcast(shard, src=rank, group=group)
            take(member, rank, name, shard)
