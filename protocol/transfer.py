"""Compose two layouts into strided copies from shard to shard, without rebuilding the parameter.

    1. both maps become boxes of the logical tensor; source boxes that are the same region are one region with
       several holders
    2. a sweep finds which regions meet which target boxes; where regions overlap each other, every element is
       taken from one of them
    3. a holder policy chooses who serves each part
    4. parts fold into segments, and the segments are proved to write every target element once

The thing to watch: steps 1 and 2 are in logical coordinates, segments in shard addresses; both in elements.
Bytes and runs are `lowering.py`; choices are `holders.py`; the proof is `coverage.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightsync.protocol.boxes import Box, Ints, find_overlap, overlapping_pairs
from weightsync.protocol.coverage import CoverageProof, PlanBudget, check_map, find_holes, prove_segments
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.folding import Segment, fold
from weightsync.protocol.holders import (
    HolderCallable,
    HolderPolicy,
    HolderRequest,
    choose_holders,
    resolve_policy,
)
from weightsync.protocol.maps import AffineMap

__all__ = ["Segment", "TransferPlan", "TransferStatistics", "plan_transfer"]


@dataclass(frozen=True)
class TransferStatistics:
    """What a plan costs: copies before and after folding, and elements and copies by source and target."""

    raw_copies: int
    copies: int
    moved_elements: int
    elements_by_source: Mapping[int, int]
    copies_by_source: Mapping[int, int]
    elements_by_target: Mapping[int, int]


@dataclass(frozen=True)
class TransferPlan:
    """Segments in target order, with the proof that lets them be executed."""

    segments: tuple[Segment, ...]
    raw_copies: int
    source_shapes: tuple[tuple[int, ...], ...]
    target_shapes: tuple[tuple[int, ...], ...]
    proof: CoverageProof

    @property
    def moved_elements(self) -> int:
        """Elements read and written, every target element once."""
        return self.statistics.moved_elements

    @cached_property
    def statistics(self) -> TransferStatistics:
        """Counts over the segments."""
        sources: Counter[int] = Counter()
        targets: Counter[int] = Counter()
        copies: Counter[int] = Counter()
        for s in self.segments:
            sources[s.source_rank] += s.numel
            targets[s.target_rank] += s.numel
            copies[s.source_rank] += 1
        return TransferStatistics(self.raw_copies, len(self.segments), sum(targets.values()), sources, copies, targets)


def plan_transfer(
    target: AffineMap,
    source: AffineMap,
    *,
    holder_policy: str | HolderPolicy | HolderCallable = "lowest",
    budget: PlanBudget | None = None,
    partial: bool = False,
) -> TransferPlan:
    """Plan the copies that fill every shard of `target` from the shards of `source`.

    With `partial` pieces may leave out elements of their shards, which then are neither written nor read: a
    recorded copy fills one part of a fused parameter and other copies the others, and a shard that lies strided
    has other tensors' elements between its own.

    Both maps describe the same logical tensor. Raises InvalidLayoutError when they contradict themselves or
    each other or when the source leaves out a region the target needs (naming it in coordinates),
    InvalidHolderPolicyError for a choice outside the holders, PlanBudgetError before the work it bounds.

    >>> from weightsync.protocol.affine import contiguous_split_map
    >>> rows, columns = contiguous_split_map((8, 8), [4] * 2, 0), contiguous_split_map((8, 8), [2] * 4, 1)
    >>> plan = plan_transfer(columns, rows)
    >>> len(plan.segments), plan.segments[0].shape, plan.moved_elements
    (8, (4, 2), 64)
    """
    budget = budget or PlanBudget()
    policy = resolve_policy(holder_policy)
    if target.logical_shape != source.logical_shape:
        raise InvalidLayoutError(
            f"the target maps a tensor of shape {target.logical_shape}, the source {source.logical_shape}"
        )
    budget.check_pieces(sum(len(p) for m in (target, source) for p in m.pieces_by_rank))
    check_map(source, "source", max_boxes=budget.max_boxes, partial=partial)
    check_map(target, "target", max_boxes=budget.max_boxes, partial=partial)
    wanted, held = _Boxes.of(target, budget), _Boxes.of(source, budget)
    regions = _Regions.of(held)
    _check_holders(source, held, regions)
    requests = _requests(wanted, held, regions, budget)
    choices = choose_holders(policy, requests)
    raw = []
    for request, rank in zip(requests, choices, strict=True):
        offset, strides = request.offers[rank]
        raw.append(
            Segment(
                rank,
                offset,
                strides,
                request.target_rank,
                request.target_offset,
                request.target_strides,
                request.shape,
            )
        )
    segments = fold(raw)
    written = [target.shard_boxes(rank) for rank in range(target.num_ranks)] if partial else None
    proof = prove_segments(
        segments,
        target.shard_shapes,
        source.shard_shapes,
        None if written is None else [[box for box, _ in own] for own in written],
    )
    return TransferPlan(tuple(segments), len(raw), source.shard_shapes, target.shard_shapes, proof)


@dataclass(frozen=True)
class _Boxes:
    """All boxes of one map in logical coordinates: [n, dims] arrays, and who holds each, where."""

    start: Ints
    end: Ints
    offset: Ints
    strides: Ints
    rank: list[int]
    locations: list[tuple[int, ...]]

    @classmethod
    def of(cls, layout: AffineMap, budget: PlanBudget) -> _Boxes:
        """A scalar counts as one dimension of size 1, so that the arrays always have a column."""
        dims = len(layout.logical_shape)
        boxes: list[Box] = []
        ranks: list[int] = []
        locations: list[tuple[int, ...]] = []
        for rank in range(layout.num_ranks):
            for box, piece in layout.logical_boxes(rank, max_boxes=budget.max_boxes):
                boxes.append(box)
                ranks.append(rank)
                locations.append(piece.locations)
            budget.check_boxes(len(boxes))
        columns = max(dims, 1)

        def column(values: Sequence[tuple[int, ...]], fill: int) -> Ints:
            padded = values if dims else [(fill,)] * len(values)
            return np.array(padded, dtype=np.int64).reshape(len(boxes), columns)

        start = column([b.start for b in boxes], 0)
        return cls(
            start,
            start + column([b.extent for b in boxes], 1),
            np.array([b.offset for b in boxes], dtype=np.int64),
            column([b.strides for b in boxes], 1),
            ranks,
            locations,
        )


@dataclass(frozen=True)
class _Regions:
    """Distinct source regions; `members[i]` are the boxes (rows of the source `_Boxes`) that are region i.

    `placements[i]` groups them: (one such row, the ranks that keep the region at the same shard address).
    """

    start: Ints
    end: Ints
    members: list[list[int]]
    placements: list[list[tuple[int, tuple[int, ...]]]]

    @classmethod
    def of(cls, held: _Boxes) -> _Regions:
        index: dict[tuple[int, ...], int] = {}
        members: list[list[int]] = []
        keys = np.concatenate([held.start, held.end], axis=1).tolist()
        for row, key in enumerate(map(tuple, keys)):
            at = index.setdefault(key, len(members))
            if at == len(members):
                members.append([])
            members[at].append(row)
        offsets, strides = held.offset.tolist(), held.strides.tolist()
        placements: list[list[tuple[int, tuple[int, ...]]]] = []
        for rows in members:
            same: dict[tuple[int, ...], list[int]] = {}
            for row in rows:
                same.setdefault((offsets[row], *strides[row]), []).append(row)
            placements.append([(own[0], tuple(held.rank[r] for r in own)) for own in same.values()])
        first = [rows[0] for rows in members]
        return cls(held.start[first], held.end[first], members, placements)


def _check_holders(source: AffineMap, held: _Boxes, regions: _Regions) -> None:
    """A piece's locations are the ranks with the same region, or ranks whose other pieces contain it."""
    doubtful: defaultdict[int, list[int]] = defaultdict(list)
    for rows in regions.members:
        ranks = {held.rank[row] for row in rows}
        for row in rows:
            missing = ranks.difference(held.locations[row])
            if missing:
                raise InvalidLayoutError(
                    f"source rank {held.rank[row]} says region {_text(held.start[row], held.end[row])} "
                    f"is on ranks {held.locations[row]}, but rank {min(missing)} holds the same region"
                )
        row = rows[0]
        for claimed in set().union(*(held.locations[r] for r in rows)) - ranks:
            doubtful[claimed].append(row)
    for claimed, rows in doubtful.items():
        own = [i for i, rank in enumerate(held.rank) if rank == claimed]
        i, j = overlapping_pairs(held.start[rows], held.end[rows], held.start[own], held.end[own])
        shared = np.zeros(len(rows), dtype=np.int64)
        low = np.maximum(held.start[rows][i], held.start[own][j])
        np.add.at(shared, i, np.prod(np.minimum(held.end[rows][i], held.end[own][j]) - low, axis=1))
        short = np.flatnonzero(shared < np.prod(held.end[rows] - held.start[rows], axis=1))
        if len(short):
            row = rows[int(short[0])]
            raise InvalidLayoutError(
                f"source rank {held.rank[row]} says region {_text(held.start[row], held.end[row])} is also "
                f"on rank {claimed}, whose pieces do not hold it"
            )


def _requests(wanted: _Boxes, held: _Boxes, regions: _Regions, budget: PlanBudget) -> list[HolderRequest]:
    """What every target box takes, each element once, with every rank that could serve it."""
    need, have = overlapping_pairs(wanted.start, wanted.end, regions.start, regions.end)
    low = np.maximum(wanted.start[need], regions.start[have])
    high = np.minimum(wanted.end[need], regions.end[have])
    volume = np.zeros(len(wanted.start), dtype=np.int64)
    np.add.at(volume, need, np.prod(high - low, axis=1))
    short = np.flatnonzero(volume < np.prod(wanted.end - wanted.start, axis=1))
    if len(short):
        row = int(short[0])
        parts = [_box(low[k], high[k]) for k in np.flatnonzero(need == row)]
        _refuse_holes(wanted, row, find_holes(_box(wanted.start[row], wanted.end[row]), parts))
    if not len(need) or find_overlap(regions.start, regions.end) is None:
        budget.check_segments(len(need))
        cells = [[j] for j in have.tolist()]
    else:
        need, cells, low, high = _cells(wanted, need, have, low, high, budget)
    extents = (high - low).tolist()
    target_strides = wanted.strides[need].tolist()
    target_offset = wanted.offset[need] + np.sum((low - wanted.start[need]) * wanted.strides[need], axis=1)
    first = np.array([regions.members[own[0]][0] for own in cells], dtype=np.int64)
    first_offset = held.offset[first] + np.sum((low - held.start[first]) * held.strides[first], axis=1)
    first_strides = held.strides[first].tolist()
    out = []
    for k, own in enumerate(cells):
        offers = {held.rank[regions.members[own[0]][0]]: (int(first_offset[k]), tuple(first_strides[k]))}
        for region in own:
            for row, ranks in regions.placements[region]:
                if len(ranks) == 1 and ranks[0] in offers:
                    continue
                moved = int(held.offset[row] + np.dot(low[k] - held.start[row], held.strides[row]))
                place = (moved, tuple(held.strides[row].tolist()))
                offers = {**dict.fromkeys(ranks, place), **offers}
        out.append(
            HolderRequest(
                wanted.rank[int(need[k])],
                tuple(extents[k]),
                int(target_offset[k]),
                tuple(target_strides[k]),
                tuple(sorted(offers)),
                offers,
            )
        )
    return out


def _cells(
    wanted: _Boxes, need: Ints, have: Ints, low: Ints, high: Ints, budget: PlanBudget
) -> tuple[Ints, list[list[int]], Ints, Ints]:
    """Where regions overlap each other: cut every target box into cells, each inside or outside every region.

    A cell is needed once, and every region around it may serve it; cells that get the same holder fold again.
    """
    cells: list[tuple[int, Box, list[int]]] = []
    cuts = np.flatnonzero(np.diff(need)) + 1
    for group in np.split(np.arange(len(need)), cuts):
        row = int(need[group[0]])
        parts = [(tuple(low[k].tolist()), tuple(high[k].tolist()), int(have[k])) for k in group]
        start, end = tuple(wanted.start[row].tolist()), tuple(wanted.end[row].tolist())
        own = list(_slabs(start, end, parts, 0))
        _refuse_holes(wanted, row, [box for box, regions in own if not regions])
        cells += [(row, box, regions) for box, regions in own]
        budget.check_segments(len(cells))
    return (
        np.array([row for row, _, _ in cells], dtype=np.int64),
        [regions for _, _, regions in cells],
        np.array([box.start for _, box, _ in cells], dtype=np.int64),
        np.array([box.end for _, box, _ in cells], dtype=np.int64),
    )


Part = tuple[tuple[int, ...], tuple[int, ...], int]  # (start, end, region)


def _slabs(
    start: tuple[int, ...], end: tuple[int, ...], parts: Sequence[Part], dim: int
) -> Iterator[tuple[Box, list[int]]]:
    """Cut start..end at every edge of `parts`, one dimension after another, with who touches the slab."""
    if dim == len(start) or not parts:
        extent = tuple(b - a for a, b in zip(start, end, strict=True))
        yield Box(start, extent), [region for _, _, region in parts]
        return
    edges = sorted({start[dim], end[dim], *(e for low, high, _ in parts for e in (low[dim], high[dim]))})
    touching: list[list[Part]] = [[] for _ in edges[1:]]
    for part in parts:
        for slab in range(bisect_left(edges, part[0][dim]), bisect_left(edges, part[1][dim])):
            touching[slab].append(part)
    for a, b, own in zip(edges, edges[1:], touching, strict=False):
        below, above = (*start[:dim], a, *start[dim + 1 :]), (*end[:dim], b, *end[dim + 1 :])
        yield from _slabs(below, above, own, dim + 1)


def _refuse_holes(wanted: _Boxes, row: int, holes: Sequence[Box]) -> None:
    if holes:
        hole = min(holes, key=lambda b: b.start)
        raise InvalidLayoutError(
            f"target rank {wanted.rank[row]} needs region {hole.start}..{hole.end} of the logical tensor, "
            "which no source rank holds; publish it or correct the source layout"
        )


def _box(start: Ints, end: Ints) -> Box:
    return Box(tuple(start.tolist()), tuple((end - start).tolist()))


def _text(start: Ints, end: Ints) -> str:
    return f"{tuple(start.tolist())}..{tuple(end.tolist())}"
