"""Checkpoint names from a trainer's own: a source whose tensors are pure views of another source's.

The mapping is a function from the trainer's tensors to the published ones, written with ordinary views and run once
over recording tensors. What a rank holds of a trainer tensor, whichever way that is sharded, becomes boxes of the
published ones over the same memory. The thing to watch: a view is of the whole logical tensor, never of the rank's
part of it; the rank's part follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.protocol.boxes import Box
from weightsync.protocol.dtypes import dtype_from_name, dtype_name
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.mapping import Assembly, Geometry, MappedTensor, Part
from weightsync.protocol.messages import TensorMeta
from weightsync.protocol.views import RecordingTensor
from weightsync.service.shard_table import Placement, placement
from weightsync.service.sources.shards import placed

Remapping = Callable[[Mapping[str, RecordingTensor]], Mapping[str, torch.Tensor | Assembly]]
"""Trainer tensors by name -> published tensors by name, each a view of one, or several put together by `cat`."""


class MappedSource(WeightSource):
    """Another source's tensors under other names and shapes.

    Args:
        base: what the trainer holds.
        mapping: takes the trainer's tensors by name (recording tensors: shapes and views, no data) and returns the
            published ones. It sees whole logical tensors. Trainer tensors that it makes no use of keep their names;
            two names of one view are published once, the second as an alias.

    Raises:
        UnsupportedViewError, UnsupportedLayoutError: the mapping does something to a tensor that is no pure view.
        InvalidLayoutError: a published name twice, or views that do not fit together.

    Example:
        >>> from weightsync.service.sources.tensors import StateDictSource
        >>> fused = StateDictSource({"gate_up": torch.zeros(2, 8, 3)})
        >>> source = MappedSource(fused, lambda t: {"gate": t["gate_up"][:, :4], "up": t["gate_up"][:, 4:]})
        >>> [(shard.name, shard.tensor.stride()) for shard in source.shards()]
        [('gate', (24, 3, 1)), ('up', (24, 3, 1))]
    """

    def __init__(self, base: WeightSource, mapping: Remapping) -> None:
        self._base = base
        metas = {meta.name: meta for meta in base.manifest()}
        self._tensors = _mapped_tensors(metas, mapping)
        self._by_source: dict[str, list[MappedTensor]] = {}
        self._canonical: set[str] = set()
        self._manifest = self._described()
        self._seen: list[Placement] = []
        self._shards: list[LocalShard] = []

    def manifest(self) -> tuple[TensorMeta, ...]:
        return self._manifest

    def shards(self) -> Sequence[LocalShard]:
        held = self._base.shards()
        seen = [placement(shard) for shard in held]
        if seen != self._seen:  # else everything lies where it lay, and so do the views of it
            self._shards = [mine for shard in held for mine in self._placed(shard)]
            self._seen = seen
        return self._shards

    def held_names(self) -> tuple[str, ...]:
        held = set(self._base.held_names())
        return tuple(t.name for t in self._tensors if t.name in self._canonical and held.issuperset(t.sources))

    def gather(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        asked = self._canonical.intersection(names)
        wanted = [tensor for tensor in self._tensors if tensor.name in asked]
        needed = dict.fromkeys(source for tensor in wanted for source in tensor.sources)
        whole = dict(self._base.gather(list(needed)))
        return {t.name: t.assemble(whole) for t in wanted if whole.keys() >= set(t.sources)}

    def refresh(self) -> None:
        self._base.refresh()

    @property
    def extra_bytes(self) -> int:
        return self._base.extra_bytes

    def _placed(self, shard: LocalShard) -> list[LocalShard]:
        tensor = shard.tensor
        held = Box(shard.offset, tuple(tensor.shape), 0, tensor.stride())
        mapped = self._by_source.get(shard.name, [])
        if not tensor.numel():
            return [LocalShard(t.name, (0,) * len(t.assembly.shape), _empty(t, tensor)) for t in mapped if _is_empty(t)]
        return [placed(t.name, box, tensor) for t in mapped for box in t.place(shard.name, held)]

    def _described(self) -> tuple[TensorMeta, ...]:
        """The manifest; equal assemblies are one tensor, under the first of its names."""
        first: dict[Assembly, str] = {}
        metas = []
        for tensor in self._tensors:
            canonical = first.setdefault(tensor.assembly, tensor.name)
            if canonical == tensor.name:
                self._canonical.add(tensor.name)
                for source in tensor.sources:
                    self._by_source.setdefault(source, []).append(tensor)
            shape, dtype = tensor.assembly.shape, dtype_name(tensor.assembly.dtype)
            metas.append(TensorMeta(tensor.name, dtype, shape, None if canonical == tensor.name else canonical))
        return tuple(metas)


def _mapped_tensors(metas: Mapping[str, TensorMeta], mapping: Remapping) -> list[MappedTensor]:
    """Published tensors, in the order of the trainer's."""
    recording = {
        meta.name: RecordingTensor(meta.name, meta.shape, dtype_from_name(meta.dtype)) for meta in metas.values()
    }
    published = {name: Assembly.of(view) for name, view in mapping(recording).items()}
    used = {part.source for assembly in published.values() for part in assembly.parts}
    unused = [name for name in metas if name not in used]
    twice = sorted(published.keys() & set(unused))
    if twice:
        raise InvalidLayoutError(
            f"{twice[0]!r} is mapped from another tensor, and is a tensor of the trainer that is not"
        )
    published.update((name, Assembly.of(recording[name])) for name in unused)
    position = {name: index for index, name in enumerate(metas)}
    ordered = sorted(published.items(), key=lambda item: position[item[1].parts[0].source])
    trainer = {meta.name: (meta.shape, dtype_from_name(meta.dtype)) for meta in metas.values()}
    known: dict[Geometry, list[Box]] = {}
    return [MappedTensor(name, _untied(assembly, metas), trainer, known) for name, assembly in ordered]


def _untied(assembly: Assembly, metas: Mapping[str, TensorMeta]) -> Assembly:
    """The same with canonical trainer names, which alone have shards."""
    parts = tuple(
        Part(metas[part.source].alias_of or part.source, part.chain, part.offset, part.shape) for part in assembly.parts
    )
    return Assembly(assembly.shape, assembly.dtype, parts)


def _is_empty(tensor: MappedTensor) -> bool:
    return 0 in tensor.assembly.shape


def _empty(tensor: MappedTensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.assembly.shape, dtype=like.dtype, device=like.device)
