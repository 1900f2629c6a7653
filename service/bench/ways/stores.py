"""Through a store on the same host: Ray's object store, and safetensors files in shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch

from weightsync.service.bench.layout import Layout
from weightsync.service.bench.members import Member
from weightsync.service.bench.stage import Cast, seconds
from weightsync.service.bench.ways.base import Needs, Way, missing_package
from weightsync.service.bench.ways.slicing import take

_FILLED = 0.8
"""Ray spills to disk when its store is full; what is larger than this share of it is not begun."""


class ObjectStore(Way):
    """Each rank puts its shards as arrays; workers map them and copy out what is theirs."""

    def refusal(self, layout: Layout) -> str | None:
        room = int(ray.cluster_resources().get("object_store_memory", 0) * _FILLED)
        if layout.nbytes > room:
            return f"the model's {layout.nbytes / 1e9:.2f} GB do not fit into {room / 1e9:.2f} GB of Ray's object store"
        return None

    def needs(self, layout: Layout) -> Needs:
        return Needs(shared_memory=layout.nbytes)

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {"Ray object store, sliced": seconds(lambda: self._move(cast))}

    @staticmethod
    def _move(cast: Cast) -> None:
        refs = cast.each(cast.trainers, _put)
        cast.each(cast.workers, _get, refs)


class Safetensors(Way):
    """Each rank saves its shards to a file in shared memory; workers map the files and copy out what is theirs."""

    def refusal(self, layout: Layout) -> str | None:
        return missing_package("safetensors.torch", "safetensors")

    def needs(self, layout: Layout) -> Needs:
        return Needs(shared_memory=layout.nbytes)

    def open(self, cast: Cast) -> None:
        self._paths = [cast.stage.folder / f"rank{rank}.safetensors" for rank in range(len(cast.trainers))]

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {"safetensors in /dev/shm": seconds(lambda: self._move(cast))}

    def _move(self, cast: Cast) -> None:
        cast.each(cast.trainers, _save, self._paths)
        cast.each(cast.workers, _load, self._paths)

    def close(self, cast: Cast) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


def _put(member: Member) -> dict[str, Any]:
    return {name: ray.put(tensor.view(torch.int16).numpy()) for name, tensor in member.tensors.items()}


def _get(member: Member, refs: list[dict[str, Any]]) -> None:
    for rank, held in enumerate(refs):
        for name, array in zip(held, ray.get(list(held.values())), strict=True):
            take(member, rank, name, torch.from_numpy(array).view(torch.bfloat16))


def _save(member: Member, paths: list[Path]) -> None:
    from safetensors.torch import save_file

    save_file(member.tensors, paths[member.index])


def _load(member: Member, paths: list[Path]) -> None:
    from safetensors import safe_open

    for rank, path in enumerate(paths):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a file, not a mapping)
                take(member, rank, name, file.get_tensor(name))
