"""Proofs over regions: a layout tiles its shards, a plan writes every target element exactly once.

Nothing here looks at an element. Regions become boxes, volumes are summed, and one sweep shows that no two
boxes touch; together that is exact. The thing to watch: a `CoverageProof` belongs to the very segments it was
made from; `execute.py` refuses a plan without one. Budgets (`PlanBudget`) bound the work before it is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from weightsync.protocol.boxes import Box, Ints, boxes_of, find_overlap, overlapping_pairs, row_major_strides, subtract
from weightsync.protocol.errors import InvalidLayoutError, PlanBudgetError
from weightsync.protocol.folding import Segment
from weightsync.protocol.maps import AffineMap


@dataclass(frozen=True)
class PlanBudget:
    """Limits of one plan; each is checked before the work it bounds. None means no limit."""

    max_pieces: int | None = None
    max_segments: int | None = None
    max_boxes: int | None = 1 << 20

    def check_pieces(self, count: int) -> None:
        """Refuse layouts of more pieces than the budget."""
        self._check("pieces", count, self.max_pieces)

    def check_segments(self, count: int) -> None:
        """Refuse a plan of more segments than the budget."""
        self._check("segments", count, self.max_segments)

    def check_boxes(self, count: int) -> None:
        """Refuse layouts that split into more boxes than the budget."""
        self._check("boxes", count, self.max_boxes)

    def _check(self, what: str, count: int, limit: int | None) -> None:
        if limit is not None and count > limit:
            raise PlanBudgetError(f"the plan needs {count} {what}, the budget is {limit}: raise PlanBudget.max_{what}")


@dataclass(frozen=True)
class CoverageProof:
    """Proof that a plan writes each element of each target shard once, and reads inside the source shards."""

    target_elements: tuple[int, ...]
    segments: int


def check_map(layout: AffineMap, what: str, *, max_boxes: int | None = None, partial: bool = False) -> None:
    """Prove that every rank's pieces tile its shard: no element without a meaning (unless `partial`), none with two.

    `what` names the map in errors. Raises InvalidLayoutError with the hole or the two pieces.
    """
    for rank, shape in enumerate(layout.shard_shapes):
        pieces = layout.pieces_by_rank[rank]
        if (
            len(pieces) == 1
            and pieces[0].dest_offset == 0
            and pieces[0].shape == shape
            and pieces[0].dest_strides == row_major_strides(shape)
        ):
            continue  # the plain shard, proved by looking at it
        boxes = [box for box, _ in layout.shard_boxes(rank, max_boxes=max_boxes)]
        where = f"{what} layout, rank {rank}: its pieces"
        if partial:
            _check_disjoint(boxes, shape, where)
        else:
            _check_tiles(boxes, shape, where)


def prove_segments(
    segments: Sequence[Segment],
    target_shapes: Sequence[tuple[int, ...]],
    source_shapes: Sequence[tuple[int, ...]],
    written: Sequence[Sequence[Box]] | None = None,
) -> CoverageProof:
    """Prove from the segments alone that they write every element of every target shard exactly once.

    `written` limits that to disjoint boxes of each target shard; nothing outside them may be written.

    Independent of how the segments came about, so a plan changed by hand can be proved again. Raises
    InvalidLayoutError naming the rank and the hole or the overlap.
    """
    by_target: defaultdict[int, list[Segment]] = defaultdict(list)
    for segment in segments:
        _check_read(segment, source_shapes)
        if not 0 <= segment.target_rank < len(target_shapes):
            raise InvalidLayoutError(f"{segment} writes rank {segment.target_rank}, which does not exist")
        by_target[segment.target_rank].append(segment)
    for rank, shape in enumerate(target_shapes):
        boxes: list[Box] = []
        for s in by_target[rank]:
            what = f"a segment into target rank {rank}"
            boxes += boxes_of(
                shape,
                s.shape,
                s.target_offset,
                s.target_strides,
                s.source_offset,
                s.source_strides,
                what=what,
            )
        where = f"the plan, target rank {rank}: its segments"
        if written is None:
            _check_tiles(boxes, shape, where)
        else:
            _check_fills(boxes, written[rank], shape, where)
    wanted = [prod(s) for s in target_shapes] if written is None else [sum(b.numel for b in own) for own in written]
    return CoverageProof(tuple(wanted), len(segments))


def _check_read(s: Segment, source_shapes: Sequence[tuple[int, ...]]) -> None:
    if not 0 <= s.source_rank < len(source_shapes):
        raise InvalidLayoutError(f"{s} reads rank {s.source_rank}, which does not exist")
    room = prod(source_shapes[s.source_rank])
    last = s.source_offset + sum((n - 1) * step for n, step in zip(s.shape, s.source_strides, strict=True))
    if s.source_offset < 0 or last >= room:
        raise InvalidLayoutError(
            f"{s} reads elements {s.source_offset}..{last} of source rank {s.source_rank}, which holds {room}"
        )


def _check_fills(boxes: Sequence[Box], wanted: Sequence[Box], shape: tuple[int, ...], what: str) -> None:
    """Disjoint boxes that lie in the wanted ones and have their volume are the wanted ones."""
    _check_disjoint(boxes, shape, what)
    volume, room = sum(box.numel for box in boxes), sum(box.numel for box in wanted)
    inside = 0
    if boxes and wanted and shape:
        (start, end), (low, high) = _corners(boxes), _corners(wanted)
        i, j = overlapping_pairs(start, end, low, high)
        inside = int(np.prod(np.minimum(end[i], high[j]) - np.maximum(start[i], low[j]), axis=1).sum())
    elif boxes and wanted:
        inside = 1
    if not volume == inside == room:
        raise InvalidLayoutError(
            f"{what} write {volume} elements, {inside} of them among the {room} that are to be written in a shard of "
            f"shape {shape}"
        )


def _corners(boxes: Sequence[Box]) -> tuple[Ints, Ints]:
    start = np.array([b.start for b in boxes], dtype=np.int64)
    return start, start + np.array([b.extent for b in boxes], dtype=np.int64)


def _check_tiles(boxes: Sequence[Box], shape: tuple[int, ...], what: str) -> None:
    _check_disjoint(boxes, shape, what)
    volume, room = sum(box.numel for box in boxes), prod(shape)
    if volume < room:
        raise InvalidLayoutError(
            f"{what} leave {room - volume} of {room} elements unwritten; "
            f"the first hole is {describe_hole(boxes, shape)}"
        )
    if volume > room:
        raise InvalidLayoutError(f"{what} write {volume} elements into a shard of shape {shape} ({room})")


def _check_disjoint(boxes: Sequence[Box], shape: tuple[int, ...], what: str) -> None:
    if len(boxes) > 1 and shape:
        hit = find_overlap(*_corners(boxes))
        if hit is not None:
            a, b = boxes[hit[0]], boxes[hit[1]]
            raise InvalidLayoutError(
                f"{what} overlap: {a.start}..{a.end} and {b.start}..{b.end} of the shard of shape {shape}"
            )


def describe_hole(boxes: Sequence[Box], shape: tuple[int, ...]) -> str:
    """The first box of `shape` that `boxes` leave out, as start..end coordinates."""
    left = find_holes(Box((0,) * len(shape), shape), boxes)
    return f"{left[0].start}..{left[0].end}" if left else "empty"


def find_holes(wanted: Box, boxes: Sequence[Box]) -> list[Box]:
    """What of `wanted` no box covers, as disjoint boxes in coordinate order."""
    left = [wanted] if wanted.numel else []
    for box in sorted(boxes, key=lambda b: b.start):
        left = [part for rest in left for part in subtract(rest, box)]
    return sorted(left, key=lambda b: b.start)
