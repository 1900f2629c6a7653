"""Where a DTensor's local shard lies in the logical tensor, from mesh and placements alone.

The thing to watch is the order in which mesh dimensions cut one tensor dimension. Ordinary shards cut from left
to right, each what the ones before it left. FSDP2 over tensor parallelism cuts the other way round: torch
writes the FSDP dimension as a strided shard, which cuts after the mesh dimensions on its right
(`torch.distributed.tensor.placement_types._StridedShard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError


@dataclass(frozen=True, slots=True)
class _Cut:
    """What one mesh dimension does: cut tensor dimension `dim` (None: replicate), maybe after those on its right."""

    mesh_dim: int
    dim: int | None
    split_factor: int = 1
    """Above 1: ranks on the right that cut the same dimension first."""


def dtensor_box(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, extent) of the local shard at a mesh coordinate, in elements per tensor dimension.

    Splitting follows `torch.chunk`: pieces of ceil(size / ranks), the last ones shorter or empty, no padding.

    Args:
        placements: one per mesh dimension: torch's `Shard(dim)`, `Replicate()` or strided shard, or the words
            `"R"` and `("S", dim)` / `"S(dim)"`.

    Raises:
        UnsupportedLayoutError: partial placements, and strided ones that do not come from nested sharding.
        InvalidLayoutError: mesh, placements and shape do not fit together.
    """
    mesh = tuple(int(n) for n in mesh_shape)
    if len(mesh) != len(placements) or not mesh or any(n < 1 for n in mesh):
        raise InvalidLayoutError(f"mesh {mesh} needs one placement a dimension, got {list(placements)}")
    start, extent = [0] * len(shape), [int(n) for n in shape]
    for cut in _in_order([_cut(i, placement, shape) for i, placement in enumerate(placements)], mesh):
        if cut.dim is None:
            continue
        chunk = -(-extent[cut.dim] // mesh[cut.mesh_dim])
        low = min(coordinate[cut.mesh_dim] * chunk, extent[cut.dim])
        start[cut.dim] += low
        extent[cut.dim] = min(chunk, extent[cut.dim] - low)
    return tuple(start), tuple(extent)


def _in_order(cuts: list[_Cut], mesh: tuple[int, ...]) -> list[_Cut]:
    """Ordinary cuts from left to right, then the strided ones from right to left."""
    for cut in cuts:
        after = prod(mesh[other.mesh_dim] for other in cuts[cut.mesh_dim + 1 :] if other.dim == cut.dim)
        if cut.split_factor not in (1, after):
            raise UnsupportedLayoutError(
                f"strided shard on mesh dimension {cut.mesh_dim} has split factor {cut.split_factor}, but {after} "
                f"ranks to its right cut tensor dimension {cut.dim}"
            )
    ordinary = [cut for cut in cuts if cut.split_factor == 1]
    return ordinary + [cut for cut in reversed(cuts) if cut.split_factor != 1]


def _cut(mesh_dim: int, placement: Any, shape: Sequence[int]) -> _Cut:
    kind = type(placement).__name__
    if isinstance(placement, str):
        word = placement.replace(" ", "").upper()
        if word in ("R", "REPLICATE", "REPLICATE()"):
            return _Cut(mesh_dim, None)
        number = word.removeprefix("SHARD").removeprefix("S").strip("()").removeprefix("DIM=")
        if word.startswith("S") and number.lstrip("-").isdigit():
            return _Cut(mesh_dim, _dim(shape, int(number)))
    elif isinstance(placement, tuple) and len(placement) == 2 and placement[0] in ("S", "shard", "Shard"):
        return _Cut(mesh_dim, _dim(shape, int(placement[1])))
    elif kind == "Replicate":
        return _Cut(mesh_dim, None)
    elif kind == "Shard":
        return _Cut(mesh_dim, _dim(shape, int(placement.dim)))
    elif kind == "_StridedShard":
        return _Cut(mesh_dim, _dim(shape, int(placement.dim)), int(placement.split_factor))
    raise UnsupportedLayoutError(f"placement {placement!r} cannot be planned: only Shard(dim) and Replicate()")


def _dim(shape: Sequence[int], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise InvalidLayoutError(f"dim {dim} does not exist in shape {tuple(shape)}")
    return dim % len(shape)
