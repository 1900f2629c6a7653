"""Affine maps: where every rank's shard keeps which elements of one logical tensor.

A map is pieces; a piece is one strided loop nest that is read at once in two address spaces. The one thing
to watch is which side an offset addresses: `source_*` is the flat row-major LOGICAL tensor, `dest_*` is the
flat row-major SHARD of the rank. Everything is in elements, never bytes.

Builders for the usual layouts live in `layouts.py` (`affine.py` gathers both under one name); composing two
maps is `transfer.py`; proving a map is `coverage.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from weightsync.protocol.boxes import DEFAULT_MAX_BOXES, Box, boxes_of, row_major_strides
from weightsync.protocol.errors import InvalidLayoutError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AffinePiece:
    """One strided region, seen in the logical tensor (`source_*`) and in a shard (`dest_*`), in elements.

    `locations` are the ranks that hold this same region, the owner of the piece included.
    """

    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    dest_offset: int
    dest_strides: tuple[int, ...]
    locations: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in ("shape", "source_strides", "dest_strides", "locations"):
            value = getattr(self, field)
            if not isinstance(value, tuple):
                object.__setattr__(self, field, tuple(value))
        if not len(self.shape) == len(self.source_strides) == len(self.dest_strides):
            raise InvalidLayoutError(
                f"piece of shape {self.shape} has source strides {self.source_strides} and "
                f"shard strides {self.dest_strides}: give one stride a dimension on both sides"
            )
        if not self.locations:
            raise InvalidLayoutError(f"piece of shape {self.shape} is held by no rank: locations is empty")

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return prod(self.shape)


@dataclass(frozen=True)
class AffineMap:
    """The layout of one logical tensor over ranks 0..n-1.

    `shard_shapes[rank]` is the shape of the rank's C-contiguous shard and `pieces_by_rank[rank]` its pieces
    (a sequence, or a mapping with every rank as a key). Construction raises InvalidLayoutError for pieces
    out of bounds or held by ranks that do not exist; that pieces tile the shards is proved by
    `coverage.check_map`, which `transfer.plan_transfer` calls.
    """

    logical_shape: tuple[int, ...]
    shard_shapes: tuple[tuple[int, ...], ...]
    pieces_by_rank: tuple[tuple[AffinePiece, ...], ...]

    def __post_init__(self) -> None:
        ranks = len(self.shard_shapes)
        object.__setattr__(self, "logical_shape", tuple(int(n) for n in self.logical_shape))
        object.__setattr__(self, "shard_shapes", _by_rank(self.shard_shapes, "shard_shapes", ranks))
        object.__setattr__(self, "pieces_by_rank", _by_rank(self.pieces_by_rank, "pieces_by_rank", ranks))
        if any(n < 0 for n in self.logical_shape) or any(n < 0 for s in self.shard_shapes for n in s):
            raise InvalidLayoutError(f"negative size in {self.logical_shape} or shards {self.shard_shapes}")
        for rank, pieces in enumerate(self.pieces_by_rank):
            for index, piece in enumerate(pieces):
                self._check_piece(rank, index, piece)

    @property
    def num_ranks(self) -> int:
        """Ranks of the layout."""
        return len(self.shard_shapes)

    def logical_boxes(self, rank: int, *, max_boxes: int | None = None) -> list[tuple[Box, AffinePiece]]:
        """Every piece of `rank` as boxes of the logical tensor, each carrying its shard addresses."""
        return self._boxes(rank, max_boxes, logical=True)

    def shard_boxes(self, rank: int, *, max_boxes: int | None = None) -> list[tuple[Box, AffinePiece]]:
        """Every piece of `rank` as boxes of its shard, each carrying its logical addresses."""
        return self._boxes(rank, max_boxes, logical=False)

    def extract(self, logical: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of `rank`, new memory of shape `shard_shapes[rank]`, cut from a whole logical tensor."""
        import torch

        if tuple(logical.shape) != self.logical_shape:
            raise InvalidLayoutError(f"tensor of shape {tuple(logical.shape)}, map of {self.logical_shape}")
        shard = torch.zeros(self.shard_shapes[rank], dtype=logical.dtype, device=logical.device)
        source = logical.contiguous()
        for p in self.pieces_by_rank[rank]:
            if p.numel:
                shard.as_strided(p.shape, p.dest_strides, p.dest_offset).copy_(
                    source.as_strided(p.shape, p.source_strides, p.source_offset)
                )
        return shard

    def rebuild(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole logical tensor from every rank's shard. Allocates all of it: for tests, small cases."""
        import torch

        if [tuple(s.shape) for s in shards] != list(self.shard_shapes):
            raise InvalidLayoutError(f"shards of shapes {[tuple(s.shape) for s in shards]}, map of {self.shard_shapes}")
        if not shards:
            raise InvalidLayoutError(f"no shard to rebuild {self.logical_shape} from")
        logical = torch.zeros(self.logical_shape, dtype=shards[0].dtype, device=shards[0].device)
        for shard, pieces in zip(shards, self.pieces_by_rank, strict=True):
            dense = shard.contiguous()
            for p in pieces:
                if p.numel:
                    logical.as_strided(p.shape, p.source_strides, p.source_offset).copy_(
                        dense.as_strided(p.shape, p.dest_strides, p.dest_offset)
                    )
        return logical

    def _check_piece(self, rank: int, index: int, piece: AffinePiece) -> None:
        where = f"rank {rank}, piece {index}"
        if rank not in piece.locations:
            raise InvalidLayoutError(f"{where}: locations {piece.locations} leave out rank {rank} itself")
        bad = [r for r in piece.locations if not 0 <= r < self.num_ranks]
        if bad or len(set(piece.locations)) != len(piece.locations):
            raise InvalidLayoutError(
                f"{where}: locations {piece.locations} are not distinct ranks of 0..{self.num_ranks - 1}"
            )
        if any(n < 0 for n in piece.shape):
            raise InvalidLayoutError(f"{where}: negative size in shape {piece.shape}")
        if 0 in piece.shape:
            return
        sides = (
            ("logical tensor", piece.source_offset, piece.source_strides, self.logical_shape),
            ("shard", piece.dest_offset, piece.dest_strides, self.shard_shapes[rank]),
        )
        for side, offset, strides, space in sides:
            steps = [(n - 1) * s for n, s in zip(piece.shape, strides, strict=True)]
            first, last = offset + sum(min(s, 0) for s in steps), offset + sum(max(s, 0) for s in steps)
            if first < 0 or last >= prod(space):
                raise InvalidLayoutError(
                    f"{where}: elements {first}..{last} fall outside the {side} of shape {space} "
                    f"({prod(space)} elements)"
                )

    def _boxes(self, rank: int, max_boxes: int | None, *, logical: bool) -> list[tuple[Box, AffinePiece]]:
        space = self.logical_shape if logical else self.shard_shapes[rank]
        unit = row_major_strides(space)
        out: list[tuple[Box, AffinePiece]] = []
        limit = DEFAULT_MAX_BOXES if max_boxes is None else max_boxes
        for index, p in enumerate(self.pieces_by_rank[rank]):
            here = (p.source_offset, p.source_strides) if logical else (p.dest_offset, p.dest_strides)
            there = (p.dest_offset, p.dest_strides) if logical else (p.source_offset, p.source_strides)
            fast = _plain_box(space, unit, p.shape, *here, *there)
            if fast is not None:
                out.append((fast, p))
                continue
            what = f"rank {rank}, piece {index}"
            out += [(b, p) for b in boxes_of(space, p.shape, *here, *there, what=what, max_boxes=limit)]
        return out


def _by_rank(values: object, field: str, ranks: int) -> tuple[tuple[object, ...], ...]:
    if isinstance(values, Mapping):
        if sorted(values) != list(range(ranks)):
            raise InvalidLayoutError(f"{field} has ranks {sorted(values)}, expected 0..{ranks - 1}")
        values = [values[rank] for rank in range(ranks)]
    if not isinstance(values, Sequence) or len(values) != ranks:
        raise InvalidLayoutError(f"{field} must give one entry for each of {ranks} ranks")
    return tuple(tuple(v) for v in values)


def _plain_box(
    space: tuple[int, ...],
    unit: tuple[int, ...],
    shape: tuple[int, ...],
    offset: int,
    strides: tuple[int, ...],
    other_offset: int,
    other_strides: tuple[int, ...],
) -> Box | None:
    """The common case, one loop a coordinate in order and inside it; None sends the piece to `boxes_of`."""
    if strides != unit or 0 in shape:
        return None
    start = []
    for n, room, step in zip(shape, space, unit, strict=True):
        at, offset = divmod(offset, step)
        if at + n > room:
            return None
        start.append(at)
    return Box(tuple(start), shape, other_offset, other_strides)
