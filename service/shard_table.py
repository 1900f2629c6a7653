"""What a trainer rank says of its shards when it registers, and what makes them fit to be read where they lie.

Shards become one entry a tensor, its boxes in the source's order; boxes that lie C-contiguous carry no strides. The
thing to watch: a shard that falls into single elements could be read one-sidedly only at one descriptor an element,
so it is refused here, by name, before anything is registered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weightsync.actors.interfaces import LocalShard
from weightsync.protocol.boxes import is_row_major, span_of
from weightsync.protocol.dtypes import dtype_name
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.folding import Segment
from weightsync.protocol.lowering import count_runs
from weightsync.protocol.messages import TensorMeta
from weightsync.protocol.segments import falls_apart
from weightsync.protocol.shards import PublishedShard, PublishedTensor, StridedShard


class Placement(NamedTuple):
    """Where one shard lies; strides in elements. Made of every shard at every publish, so it is a plain tuple."""

    name: str
    addr: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} {tuple(self.shape)} with strides {self.strides} at {self.addr:#x}"


def placement(shard: LocalShard) -> Placement:
    """Where a shard lies now."""
    tensor = shard.tensor
    return Placement(shard.name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def shard_table(
    agent_name: str,
    manifest: Sequence[TensorMeta],
    shards: Sequence[LocalShard],
    addresses: Sequence[int],
    *,
    dense: bool,
) -> tuple[PublishedTensor, ...]:
    """One rank's table.

    Args:
        addresses: of the shards' first elements, in their order.
        dense: they are addresses of C-contiguous copies of the shards.
    """
    shape_of = {meta.name: meta.shape for meta in manifest}
    boxes: dict[str, list[PublishedShard]] = {}
    first: dict[str, torch.Tensor] = {}
    for shard, addr in zip(shards, addresses, strict=True):
        first.setdefault(shard.name, shard.tensor)
        boxes.setdefault(shard.name, []).append(_published(agent_name, shard, addr, dense))
    return tuple(
        PublishedTensor(name, dtype_name(tensor.dtype), tensor.element_size(), shape_of[name], tuple(boxes[name]))
        for name, tensor in first.items()
    )


def _published(agent_name: str, shard: LocalShard, addr: int, dense: bool) -> PublishedShard:
    shape, strides = tuple(shard.tensor.shape), shard.tensor.stride()
    device = shard.tensor.device.index or 0
    if dense or is_row_major(shape, strides):
        return PublishedShard(agent_name, device, addr, shard.offset, shape)
    return StridedShard(agent_name, device, addr, shard.offset, shape, strides)


def nbytes_of(shard: LocalShard) -> int:
    """Bytes of the shard's elements."""
    return shard.tensor.numel() * shard.tensor.element_size()


def span_bytes(shard: LocalShard) -> int:
    """Bytes from the shard's first element to the end of its last; between them others may lie."""
    return span_of(shard.tensor.shape, shard.tensor.stride()) * shard.tensor.element_size()


def check_readable(rank: int, shards: Sequence[LocalShard]) -> None:
    """Refuse what cannot be read where it lies.

    Raises:
        UnsupportedLayoutError: a shard repeats elements, or falls into a lot of tiny runs; names it.
    """
    for shard in shards:
        shape, strides, size = tuple(shard.tensor.shape), shard.tensor.stride(), shard.tensor.element_size()
        if is_row_major(shape, strides):
            continue
        where = f"rank {rank}: {shard.name!r}, shape {shape} and strides {strides},"
        if any(n > 1 and s < 1 for n, s in zip(shape, strides, strict=True)):
            raise UnsupportedLayoutError(f"{where} repeats elements; publish a tensor that has each of them once")
        runs = count_runs(Segment(0, 0, strides, 0, 0, strides, shape))
        if falls_apart(runs, nbytes_of(shard)):
            raise UnsupportedLayoutError(
                f"{where} lies in {runs} runs of {size * shard.tensor.numel() // runs} bytes, which costs more to read "
                "than to copy; publish it with mode='staged', or through CastSource, which keeps a dense copy"
            )


def only_device(rank: int, shards: Sequence[LocalShard]) -> str:
    """The device all shards are on.

    Raises:
        InvalidLayoutError: there are two; names a shard of each.
    """
    devices = {str(shard.tensor.device): shard.name for shard in shards}
    if len(devices) > 1:
        (one, name), (other, other_name) = list(devices.items())[:2]
        raise InvalidLayoutError(
            f"rank {rank}: {name!r} is on {one} and {other_name!r} on {other}; a rank publishes from one device"
        )
    return next(iter(devices), "cpu")


def check_manifest(rank: int, manifest: Sequence[TensorMeta]) -> None:
    """Refuse a manifest that contradicts itself.

    Raises:
        InvalidLayoutError: a name twice, or an alias of nothing.
    """
    twice = [name for name, count in Counter(meta.name for meta in manifest).items() if count > 1]
    if twice:
        raise InvalidLayoutError(f"rank {rank}: {sorted(twice)[:3]} are named twice by the source")
    known = {meta.name for meta in manifest if meta.alias_of is None}
    for meta in manifest:
        if meta.alias_of is not None and meta.alias_of not in known:
            raise InvalidLayoutError(f"rank {rank}: {meta.name!r} is an alias of {meta.alias_of!r}, which is unknown")
