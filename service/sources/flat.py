"""Flattened parameters cut evenly over ranks, as ZeRO and FSDP1 keep them.

A rank then holds a range of each parameter's row-major elements: the end of a row, whole rows, the beginning of one.
Those are up to three boxes of a matrix, published where they lie. Two ways of cutting are in use:

    partitioned   ZeRO-3: every parameter by itself, `ceil(numel / ranks)` elements a rank
    concatenated  ZeRO-1, ZeRO-2, FSDP1: all parameters in one buffer, the buffer cut evenly

The thing to watch: both pad at the end, and padding is nobody's element; ranges here never include it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from weightsync.actors.interfaces import LocalShard
from weightsync.protocol.boxes import boxes_of
from weightsync.protocol.dtypes import dtype_name
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.messages import TensorMeta
from weightsync.service.sources.shards import ShardSource, placed

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class FlatRange:
    """Elements `start`, `start + 1`, ... of a row-major flattened parameter, as a 1-D tensor."""

    name: str
    start: int
    tensor: torch.Tensor


class FlatSource(ShardSource):
    """Parameters of which this rank holds ranges of elements.

    Args:
        shapes: name -> shape of the whole parameter, of every parameter, in checkpoint order.
        ranges: what this rank holds; memory is kept by reference. `partitioned_ranges` and `concatenated_ranges` make
            them from what trainers have.
        dtype: of parameters that this rank holds nothing of; None takes that of the ranges.

    Raises:
        InvalidLayoutError: a range of an unknown parameter or outside of it, or a tensor that is not 1-D; names it.

    Example:
        >>> source = FlatSource({"w": (3, 4)}, [FlatRange("w", 2, torch.zeros(7))])
        >>> [(shard.offset, tuple(shard.tensor.shape)) for shard in source.shards()]
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """

    def __init__(self, shapes: Shapes, ranges: Sequence[FlatRange], dtype: torch.dtype | None = None) -> None:
        dtypes = {flat.name: flat.tensor.dtype for flat in ranges}
        other = dtype or next(iter(dtypes.values()), None)
        if other is None and shapes:
            raise InvalidLayoutError("this rank holds no range to tell the dtype from; pass dtype")
        manifest = [
            TensorMeta(name, dtype_name(dtypes.get(name, other or torch.float32)), tuple(shape))
            for name, shape in shapes.items()
        ]
        super().__init__(manifest, [shard for flat in ranges for shard in _boxes(shapes, flat)])


def partitioned_ranges(
    shapes: Shapes, rank: int, world_size: int, partitions: Mapping[str, torch.Tensor]
) -> list[FlatRange]:
    """ZeRO-3: what each parameter's partition on this rank is of it, without the padding.

    Args:
        shapes: name -> shape of the whole parameter.
        partitions: name -> this rank's 1-D partition of `ceil(numel / world_size)` elements (DeepSpeed's `ds_tensor`,
            or the parameter's part of the flat fp32 buffer, see `cut_partitions`).

    Raises:
        InvalidLayoutError: a partition is missing or has another length.
    """
    _check_rank(rank, world_size)
    ranges = []
    for name, shape in shapes.items():
        numel = prod(shape)
        length = -(-numel // world_size)
        if name not in partitions or tuple(partitions[name].shape) != (length,):
            got = tuple(partitions[name].shape) if name in partitions else "missing"
            raise InvalidLayoutError(
                f"{name!r} of shape {tuple(shape)} has {length} elements on each of {world_size} ranks; on rank {rank} "
                f"its partition is {got}"
            )
        start = min(rank * length, numel)
        ranges.append(FlatRange(name, start, partitions[name].detach()[: min(length, numel - start)]))
    return ranges


def cut_partitions(shapes: Shapes, world_size: int, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters' partitions in one flat buffer that holds them one after another, as ZeRO-3's fp32 groups do.

    Raises:
        InvalidLayoutError: the buffer is not 1-D, or too short.
    """
    lengths = {name: -(-prod(shape) // world_size) for name, shape in shapes.items()}
    if buffer.dim() != 1 or buffer.numel() < sum(lengths.values()):
        raise InvalidLayoutError(
            f"a flat buffer of shape {tuple(buffer.shape)} does not hold the {sum(lengths.values())} elements of "
            f"{len(lengths)} partitions over {world_size} ranks"
        )
    out, at = {}, 0
    for name, length in lengths.items():
        out[name] = buffer[at : at + length]
        at += length
    return out


def concatenated_ranges(
    shapes: Shapes, rank: int, world_size: int, partition: torch.Tensor, alignment: int = 1
) -> list[FlatRange]:
    """ZeRO-1, ZeRO-2, FSDP1: this rank's even part of a buffer of all parameters, one after another in this order.

    Args:
        shapes: name -> shape, in the order of the buffer.
        partition: this rank's part, 1-D; the buffer is `world_size` of them, padded at its end.
        alignment: elements at multiples of which parameters begin.

    Raises:
        InvalidLayoutError: the parts together are shorter than the parameters.
    """
    _check_rank(rank, world_size)
    starts, end = {}, 0
    for name, shape in shapes.items():
        starts[name] = -(-end // alignment) * alignment
        end = starts[name] + prod(shape)
    length = partition.numel()
    if partition.dim() != 1 or not end <= length * world_size:
        raise InvalidLayoutError(
            f"{world_size} partitions of shape {tuple(partition.shape)} do not hold the {end} elements of "
            f"{len(shapes)} parameters; give every parameter of the buffer, in its order"
        )
    first, last = rank * length, (rank + 1) * length
    ranges = []
    for name, shape in shapes.items():
        low, high = max(first, starts[name]), min(last, starts[name] + prod(shape))
        if low < high:
            ranges.append(FlatRange(name, low - starts[name], partition.detach()[low - first : high - first]))
    return ranges


def _boxes(shapes: Shapes, flat: FlatRange) -> list[LocalShard]:
    if flat.name not in shapes:
        raise InvalidLayoutError(f"a range of {flat.name!r} is given, whose shape is not")
    shape, numel = tuple(shapes[flat.name]), flat.tensor.numel()
    if flat.tensor.dim() != 1 or flat.start < 0 or flat.start + numel > prod(shape):
        raise InvalidLayoutError(
            f"{flat.name!r} of shape {shape}: {tuple(flat.tensor.shape)} elements from {flat.start} on are no range "
            "of it"
        )
    boxes = boxes_of(shape, (numel,), flat.start, (1,), 0, flat.tensor.stride(), what=flat.name)
    return [placed(flat.name, box, flat.tensor) for box in boxes]


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise InvalidLayoutError(f"rank {rank} is none of {world_size}")
