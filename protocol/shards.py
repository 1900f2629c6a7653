"""Shard tables: which rank holds which box of which tensor, merged into one picture of the model.

Every shard is a box of the logical tensor, lying at `addr` in its owner's address space, C-contiguous unless it
says its strides; what a rank keeps in several places is several boxes. Merging collapses exact replicas, keeps
genuine fan-in, and refuses ranks that contradict each other. The thing to watch: `addr` is bytes, everything else
is elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weightsync.protocol.boxes import Box
from weightsync.protocol.coverage import find_holes
from weightsync.protocol.errors import InvalidLayoutError


@dataclass(frozen=True)
class PublishedShard:
    """One rank's box of one tensor, C-contiguous at `addr`.

    `shard_offset` and `shape` have one entry per dimension of the logical tensor.
    """

    agent_name: str
    device_id: int
    addr: int
    shard_offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return _product(self.shape)

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Elements from one index to the next per dimension; None for C-contiguous."""
        return None


@dataclass(frozen=True)
class StridedShard(PublishedShard):
    """A box that does not lie C-contiguous: part of a fused, stacked, interleaved or transposed tensor.

    A class of its own, so that the many plain boxes carry no strides over the wire. `steps` are its strides in
    elements; the element at index (0, ..., 0) of the box is at `addr`.
    """

    steps: tuple[int, ...]

    @property
    def strides(self) -> tuple[int, ...]:
        return self.steps


@dataclass(frozen=True)
class PublishedTensor:
    """One logical tensor and the shards somebody publishes of it; `dtype` is a name, `elsize` bytes."""

    name: str
    dtype: str
    elsize: int
    full_shape: tuple[int, ...]
    shards: tuple[PublishedShard, ...]

    @property
    def held_bytes(self) -> int:
        """Bytes of all shards together."""
        return self.elsize * sum(shard.numel for shard in self.shards)


@dataclass(frozen=True)
class SourceShard:
    """A shard as a reader sees it: `session` indexes the agents and devices of `build_sources`."""

    session: int
    addr: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """In elements; None for C-contiguous."""


@dataclass(frozen=True)
class Source:
    """One logical tensor to read from."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    elsize: int
    shards: tuple[SourceShard, ...]


def merge_shard_tables(
    tables: Sequence[Iterable[PublishedTensor]], replica_offset: int = 0
) -> dict[str, PublishedTensor]:
    """Join all ranks' tables.

    Args:
        tables: one per rank.
        replica_offset: of n exact replicas the one at `replica_offset % n` is kept, in order of publication.

    Returns:
        Name -> tensor, in order of first appearance; shards in order of publication, replicas collapsed, empty
        shards dropped.

    Raises:
        InvalidLayoutError: ranks disagree about a tensor, or a shard does not fit into its tensor.
    """
    merged: dict[str, PublishedTensor] = {}
    replicas: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[PublishedShard]]] = {}
    for tensor in (tensor for table in tables for tensor in table):
        known = merged.setdefault(tensor.name, tensor)
        _check_agreement(known, tensor)
        boxes = replicas.setdefault(tensor.name, {})
        for shard in tensor.shards:
            _check_shard(tensor, shard)
            if shard.numel or not _product(tensor.full_shape):
                boxes.setdefault((shard.shard_offset, shard.shape), []).append(shard)
    return {name: _collapsed(tensor, replicas[name], replica_offset) for name, tensor in merged.items()}


def _collapsed(
    tensor: PublishedTensor,
    replicas: Mapping[tuple[tuple[int, ...], tuple[int, ...]], Sequence[PublishedShard]],
    replica_offset: int,
) -> PublishedTensor:
    shards = tuple(same[replica_offset % len(same)] for same in replicas.values())
    return tensor if shards == tensor.shards else replace(tensor, shards=shards)


def build_sources(
    merged: Mapping[str, PublishedTensor],
) -> tuple[dict[str, Source], list[str], list[int]]:
    """What a reader plans against.

    Returns:
        (name -> Source, agent name per session, device id per session).
    """
    sessions: dict[tuple[str, int], int] = {}
    sources = {}
    for name, tensor in merged.items():
        shards = tuple(
            SourceShard(
                sessions.setdefault((shard.agent_name, shard.device_id), len(sessions)),
                shard.addr,
                shard.shard_offset,
                shard.shape,
                shard.strides,
            )
            for shard in tensor.shards
        )
        sources[name] = Source(name, tensor.full_shape, tensor.dtype, tensor.elsize, shards)
    return sources, [agent for agent, _ in sessions], [device for _, device in sessions]


def check_complete(merged: Mapping[str, PublishedTensor]) -> None:
    """Refuse a model of which nobody holds some part.

    Raises:
        InvalidLayoutError: names the tensor and the hole in coordinates.
    """
    for name, tensor in merged.items():
        if any(shard.shape == tensor.full_shape for shard in tensor.shards):
            continue  # whole on one rank, as most experts are
        whole = Box((0,) * len(tensor.full_shape), tensor.full_shape)
        holes = find_holes(whole, [Box(s.shard_offset, s.shape) for s in tensor.shards])
        if holes:
            start, end = holes[0].start, holes[0].end
            held = ", ".join(f"{s.agent_name}: {s.shape} at {s.shard_offset}" for s in tensor.shards[:4]) or "nothing"
            raise InvalidLayoutError(
                f"{name!r} of shape {tensor.full_shape} has a hole from {start} to {end} (exclusive): no rank "
                f"publishes it (published: {held}{', ...' if len(tensor.shards) > 4 else ''})"
            )


def _check_agreement(known: PublishedTensor, new: PublishedTensor) -> None:
    for what in ("full_shape", "dtype", "elsize"):
        if getattr(known, what) != getattr(new, what):
            raise InvalidLayoutError(
                f"{new.name!r}: {_agents(known)} publishes {what} {getattr(known, what)}, {_agents(new)} publishes "
                f"{getattr(new, what)}"
            )


def _check_shard(tensor: PublishedTensor, shard: PublishedShard) -> None:
    fits = len(shard.shard_offset) == len(shard.shape) == len(tensor.full_shape) and all(
        o >= 0 and s >= 0 and o + s <= full
        for o, s, full in zip(shard.shard_offset, shard.shape, tensor.full_shape, strict=True)
    )
    if not fits:
        raise InvalidLayoutError(
            f"{tensor.name!r}: {shard.agent_name} publishes {shard.shape} at {shard.shard_offset}, which does not fit "
            f"into {tensor.full_shape}"
        )
    steps = shard.strides
    if steps is not None and (
        len(steps) != len(shard.shape) or any(n > 1 and s < 1 for n, s in zip(shard.shape, steps, strict=True))
    ):
        raise InvalidLayoutError(
            f"{tensor.name!r}: {shard.agent_name} publishes {shard.shape} at strides {steps}; give one positive stride "
            "per dimension"
        )


def _agents(tensor: PublishedTensor) -> str:
    return ", ".join(dict.fromkeys(shard.agent_name for shard in tensor.shards)) or "a rank without shards"


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
