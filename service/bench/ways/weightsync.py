"""weightsync itself, as a user has it: Publisher and Subscriber of a real service.

In shadow mode `publish` ends when every worker holds the version beside its live weights; what a request sees
changes with the flip in `sync`. There are two rows: with the flip, and without it. In in_place mode `publish` and
`sync` end together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist

from weightsync.actors.interfaces import LocalShard, WeightSource, WeightTarget
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import SyncError
from weightsync.protocol.messages import TensorMeta
from weightsync.service.bench.layout import Layout
from weightsync.service.bench.members import Member
from weightsync.service.bench.stage import CALL_TIMEOUT_S, Cast, seconds
from weightsync.service.bench.ways.base import Needs, Way
from weightsync.service.bench.ways.groups import join_group, leave_group
from weightsync.service.ports import free_port
from weightsync.service.publisher import Publisher
from weightsync.service.subscriber import Subscriber
from weightsync.service.targets import region_copy


class Weightsync(Way):
    """One combination of what a user can choose.

    Args:
        label: the row's.
        mode: the Publisher's.
        install: the Subscribers'.
        settings: the service's, where they are not the defaults.
    """

    def __init__(
        self, key: str, label: str, about: str, *, mode: str = "live", install: str = "shadow", **settings: Any
    ) -> None:
        super().__init__(key, about)
        self._label, self._mode, self._install, self._settings = label, mode, install, settings

    def needs(self, layout: Layout) -> Needs:
        shadow = layout.wanted_nbytes if self._install == "shadow" else 0
        group = max(sum(spec.nbytes for spec in group) for group in layout.groups)
        if self._mode == "live":
            return Needs(memory=shadow + 2 * group * layout.consumers)
        slots = 4 * group * layout.consumers
        return Needs(memory=shadow + slots + group * layout.producers, shared_memory=2 * group * layout.producers)

    def open(self, cast: Cast) -> None:
        service = cast.stage.service(**self._settings).name
        if self._mode == "staged" and len(cast.trainers) > 1:
            join_group(cast, cast.trainers, free_port())
        cast.each(cast.trainers, _publish_from, service, self._mode)
        cast.each(cast.workers, _subscribe_to, service, self._install)

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        if self._install == "in_place":
            return {self._label: seconds(lambda: self._sync(cast, version))}
        pulled = seconds(lambda: self._check(cast, cast.each(cast.trainers, _publish, version)))
        flipped = seconds(lambda: cast.each(cast.workers, _sync, version))
        return {self._label: pulled + flipped, f"{self._label} (pull)": pulled}

    def _sync(self, cast: Cast, version: int) -> None:
        publishing = [trainer.do.remote(_publish, version) for trainer in cast.trainers]
        syncing = [worker.do.remote(_sync, version) for worker in cast.workers]
        ray.get(publishing + syncing, timeout=CALL_TIMEOUT_S)
        self._check(cast, ray.get(publishing))

    @staticmethod
    def _check(cast: Cast, installed: list[int]) -> None:
        if set(installed) != {len(cast.workers)}:
            raise SyncError(f"{installed} of {len(cast.workers)} workers took part")

    def close(self, cast: Cast) -> None:
        cast.each(cast.workers, _unsubscribe)
        cast.each(cast.trainers, _unpublish)
        if self._mode == "staged" and len(cast.trainers) > 1:
            leave_group(cast, cast.trainers)


class _Shards(WeightSource):
    """A rank's row shards, as FSDP leaves them."""

    def __init__(self, member: Member) -> None:
        self._layout, self._boxes, self._tensors = member.layout, member.boxes, member.tensors
        self._scratch: dict[tuple[int, ...], torch.Tensor] = {}

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(name, "bfloat16", spec.shape) for name, spec in self._layout.tensors.items())

    def shards(self) -> Sequence[LocalShard]:
        specs = self._layout.tensors
        return [
            LocalShard(name, (box.row, 0)[: len(specs[name].shape)], self._tensors[name])
            for name, box in self._boxes.items()
        ]

    def gather(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Whole tensors, from the other ranks over gloo, as FSDP's own all-gather would."""
        if self._layout.producers == 1:
            return {name: self._tensors[name] for name in names}
        return {name: self._gather(name, index) for index, name in enumerate(names)}

    def _gather(self, name: str, index: int) -> torch.Tensor:
        spec, held = self._layout.tensors[name], dist.get_rank()
        key = (index, *spec.shape)
        whole = self._scratch.setdefault(key, torch.empty(0, dtype=torch.bfloat16))
        if not whole.numel():
            whole = self._scratch[key] = torch.empty(spec.shape, dtype=torch.bfloat16)
        for rank in range(self._layout.producers):
            box = self._layout.held(rank).get(name)
            if box is not None:
                part = whole[box.row : box.row + box.rows]
                if rank == held:
                    part.copy_(self._tensors[name])
                dist.broadcast(part, src=rank)
        return whole

    def held_names(self) -> tuple[str, ...]:
        return tuple(self._layout.tensors)


class _Slices(WeightTarget):
    """A tensor-parallel worker's slices."""

    def __init__(self, member: Member) -> None:
        self._boxes, self._tensors = member.boxes, member.tensors

    def record(self, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> Sequence[RecordedCopy]:
        shapes = {name: shape for name, (_, shape) in manifest.items()}
        return [
            region_copy(name, shapes[name], (box.row, box.column)[: len(shapes[name])], self._tensors[name])
            for name, box in self._boxes.items()
        ]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors


def _publish_from(member: Member, service: str, mode: str) -> None:
    world = member.layout.producers
    member.kept["publisher"] = Publisher(service, member.index, world, _Shards(member), mode=mode)


def _publish(member: Member, version: int) -> int:
    """How many workers hold the version."""
    return len(member.kept["publisher"].publish(version, timeout=CALL_TIMEOUT_S).installed)


def _unpublish(member: Member) -> None:
    member.kept.pop("publisher").close()


def _subscribe_to(member: Member, service: str, install: str) -> None:
    member.kept["subscriber"] = Subscriber(service, f"w{member.index}", _Slices(member), install=install)


def _sync(member: Member, version: int) -> None:
    member.kept["subscriber"].sync(version, timeout=CALL_TIMEOUT_S)


def _unsubscribe(member: Member) -> None:
    member.kept.pop("subscriber").close()
