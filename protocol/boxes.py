"""Boxes of a row-major tensor, held as integer arrays, and the sweeps that compare them.

An affine piece is strided in one flat address space; here it becomes boxes (start, extent) in the
coordinates of that space, so that intersection, disjointness and holes are decided over whole regions and
never element by element. Everything is sorted and searched along one dimension: no all-pairs comparison.

The thing to watch: `offset` and `strides` of a box address the OTHER side (the memory the box maps to), at
the box's first element, one stride per coordinate. Which memory that is, and what a hole or an overlap
means, is left to the callers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from weightsync.protocol.errors import InvalidLayoutError, PlanBudgetError, UnsupportedLayoutError

Ints = npt.NDArray[np.int64]

# Unrolling a strided piece into boxes may not exceed this many boxes when the caller gives no budget.
DEFAULT_MAX_BOXES = 1 << 20


@dataclass(frozen=True)
class Box:
    """One box: `start` and `extent` per coordinate, and where its elements lie on the other side."""

    start: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.extent)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last coordinate, per dimension."""
        return tuple(s + e for s, e in zip(self.start, self.extent, strict=True))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a C-contiguous tensor of `shape`."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a region lies C-contiguous; the stride of a dimension of size 1 does not matter."""
    unit = row_major_strides(shape)
    return 0 in shape or all(n == 1 or s == u for n, s, u in zip(shape, strides, unit, strict=True))


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first of a strided region to the end of its last one; 0 if it has none."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def dense_space(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """A row-major tensor shape in which the strided region is a box at the origin, or else a flat one."""
    loops = sorted(((stride, n) for n, stride in zip(shape, strides, strict=True) if n != 1), reverse=True)
    if any(n == 0 for _, n in loops):
        return (0,)
    divisible = all(stride > 0 for stride, _ in loops) and all(
        outer % inner == 0 and outer // inner >= n for (outer, _), (inner, n) in pairwise(loops)
    )
    if not loops or not divisible:
        return (span_of(shape, strides),)
    widths = [outer // inner for (outer, _), (inner, _) in pairwise(loops)]
    step = loops[-1][0]  # a region without an innermost step of 1 is one column of a dimension as wide as that step
    return (loops[0][1], *widths) if step == 1 else (loops[0][1], *widths, step)


def boxes_of(
    space: Sequence[int],
    shape: Sequence[int],
    offset: int,
    strides: Sequence[int],
    other_offset: int,
    other_strides: Sequence[int],
    *,
    what: str,
    max_boxes: int = DEFAULT_MAX_BOXES,
) -> list[Box]:
    """The strided region (`shape`, `offset`, `strides`) of a row-major tensor of shape `space`, as boxes.

    `other_offset` and `other_strides` address the same elements elsewhere and are carried along. `what`
    names the piece in errors. Raises InvalidLayoutError for a region outside `space` or negative sizes,
    UnsupportedLayoutError for one that repeats elements (stride 0 or negative), PlanBudgetError beyond
    `max_boxes`.
    """
    if not len(shape) == len(strides) == len(other_strides):
        raise InvalidLayoutError(
            f"{what}: shape {tuple(shape)}, strides {tuple(strides)} and {tuple(other_strides)} differ"
        )
    if any(n < 0 for n in shape) or offset < 0 or other_offset < 0:
        raise InvalidLayoutError(f"{what}: negative size or offset (shape {tuple(shape)}, {offset}, {other_offset})")
    if 0 in shape:
        return []
    loops = [
        (n, s, t) for n, s, t in zip(shape, strides, other_strides, strict=True) if n > 1
    ]  # a dimension of size 1 moves nothing, whatever its stride says
    if any(s <= 0 for _, s, _ in loops):
        raise UnsupportedLayoutError(
            f"{what}: strides {tuple(strides)} repeat or reverse elements of shape {tuple(shape)}; "
            "only positive strides can be planned"
        )
    last = offset + sum((n - 1) * s for n, s, _ in loops)
    if last >= prod(space):
        raise InvalidLayoutError(
            f"{what}: reaches element {last} of a tensor of shape {tuple(space)} ({prod(space)} elements)"
        )
    out: list[Box] = []
    for box in _split(tuple(space), row_major_strides(space), offset, other_offset, loops):
        out.append(box)
        if len(out) > max_boxes:
            raise PlanBudgetError(f"{what}: splits into more than {max_boxes} boxes; raise the piece budget")
    return out


Loop = tuple[int, int, int]  # (count, stride here, stride on the other side)


def _split(space: tuple[int, ...], unit: tuple[int, ...], offset: int, other: int, loops: list[Loop]) -> Iterator[Box]:
    """Split until every coordinate has at most one loop, of step 1, that stays inside it."""
    coords = []
    rest = offset
    for stride in unit:
        q, rest = divmod(rest, stride)
        coords.append(q)
    by_dim: dict[int, Loop] = {}
    for i, (n, s, t) in enumerate(sorted(loops, key=lambda loop: loop[1])):
        others = sorted(loops, key=lambda loop: loop[1])
        del others[i]
        dim = next((d for d in range(len(space)) if space[d] > 1 and unit[d] <= s), len(space) - 1)
        if s == unit[dim] and dim not in by_dim and coords[dim] + n <= space[dim]:
            by_dim[dim] = (n, s, t)
            continue
        if s == unit[dim] and dim in by_dim:
            raise InvalidLayoutError(f"a piece of strides {[x[1] for x in loops]} covers elements twice")
        if s != unit[dim] and dim in by_dim and s == by_dim[dim][0] * unit[dim]:
            inner = by_dim[dim]
            if t == inner[0] * inner[2]:  # continues on both sides: one longer loop
                joined = [x for x in others if x != inner] + [(n * inner[0], inner[1], inner[2])]
                yield from _split(space, unit, offset, other, joined)
                return
        if s == unit[dim]:  # runs over the end of its coordinate: head, whole rows, tail
            yield from _wrap(space, unit, offset, other, others, (n, s, t), space[dim] - coords[dim], space[dim])
            return
        for step in range(n):  # a step other than 1: one box each; folding stacks them again later
            yield from _split(space, unit, offset + step * s, other + step * t, others)
        return
    yield Box(
        tuple(coords),
        tuple(by_dim[d][0] if d in by_dim else 1 for d in range(len(space))),
        other,
        tuple(by_dim[d][2] if d in by_dim else 0 for d in range(len(space))),
    )


def _wrap(
    space: tuple[int, ...],
    unit: tuple[int, ...],
    offset: int,
    other: int,
    others: list[Loop],
    loop: Loop,
    head: int,
    width: int,
) -> Iterator[Box]:
    n, s, t = loop
    if head < width:
        yield from _split(space, unit, offset, other, [*others, (head, s, t)] if head > 1 else others)
        offset, other, n = offset + head * s, other + head * t, n - head
    rows, tail = divmod(n, width)
    if rows:
        inner = [(width, s, t)] if width > 1 else []
        outer = [(rows, width * s, width * t)] if rows > 1 else []
        yield from _split(space, unit, offset, other, [*others, *inner, *outer])
    if tail:
        offset, other = offset + rows * width * s, other + rows * width * t
        yield from _split(space, unit, offset, other, [*others, (tail, s, t)] if tail > 1 else others)


# -- many boxes at once --------------------------------------------------------------------------------


def find_overlap(start: Ints, end: Ints) -> tuple[int, int] | None:
    """Two boxes of [n, dims] arrays that share an element, or None: sweep, then split what still touches."""
    pending = [(np.arange(len(start)), 0)]
    dims = start.shape[1]
    while pending:
        rows, tried = pending.pop()
        if len(rows) < 2:
            continue
        if tried == dims:
            hit = _pair_overlap(start[rows], end[rows])
            if hit is not None:
                return int(rows[hit[0]]), int(rows[hit[1]])
            continue
        distinct = [len(np.unique(start[rows, d])) for d in range(dims)]
        dim = sorted(range(dims), key=lambda d: -distinct[d])[tried]
        order = rows[np.argsort(start[rows, dim], kind="stable")]
        reach = np.maximum.accumulate(end[order, dim])
        cuts = np.flatnonzero(start[order, dim][1:] >= reach[:-1]) + 1
        parts = np.split(order, cuts)
        # A cut restarts the search over every dimension; no cut moves on to the next dimension.
        pending += [(part, 0 if len(cuts) and dims > 1 else tried + 1) for part in parts if len(part) > 1]
    return None


def _pair_overlap(start: Ints, end: Ints) -> tuple[int, int] | None:
    left, right = overlapping_pairs(start, end, start, end)
    keep = np.flatnonzero(left < right)
    return (int(left[keep[0]]), int(right[keep[0]])) if len(keep) else None


def overlapping_pairs(a_start: Ints, a_end: Ints, b_start: Ints, b_end: Ints) -> tuple[Ints, Ints]:
    """Indices (i, j) of every box of `a` that shares elements with a box of `b`, ordered by i then j."""
    empty = np.empty(0, dtype=np.int64)
    if not len(a_start) or not len(b_start):
        return empty, empty
    dims = a_start.shape[1]
    if dims == 0:
        i, j = np.divmod(np.arange(len(a_start) * len(b_start)), len(b_start))
        return i, j
    dim = int(np.argmax([len(np.unique(b_start[:, d])) + len(np.unique(a_start[:, d])) for d in range(dims)]))
    left: list[Ints] = []
    right: list[Ints] = []
    # Boxes of similar extent together: one long box must not widen the search for all the short ones.
    classes = np.floor(np.log2(np.maximum(b_end[:, dim] - b_start[:, dim], 1))).astype(np.int64)
    for size in np.unique(classes):
        rows = np.flatnonzero(classes == size)
        rows = rows[np.argsort(b_start[rows, dim], kind="stable")]
        starts = b_start[rows, dim]
        widest = int((b_end[rows, dim] - starts).max())
        low = np.searchsorted(starts, a_start[:, dim] - widest, side="right")
        high = np.searchsorted(starts, a_end[:, dim], side="left")
        counts = np.maximum(high - low, 0)
        i = np.repeat(np.arange(len(a_start)), counts)
        within = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts)
        j = rows[np.repeat(low, counts) + within]
        touch = np.all((a_start[i] < b_end[j]) & (b_start[j] < a_end[i]), axis=1)
        left.append(i[touch])
        right.append(j[touch])
    i, j = np.concatenate(left), np.concatenate(right)
    order = np.lexsort((j, i))
    return i[order], j[order]


def intersect(box: Box, other: Box) -> Box | None:
    """What both boxes cover, or None. Addresses are not carried."""
    low = tuple(map(max, box.start, other.start))
    extent = tuple(min(a, b) - c for a, b, c in zip(box.end, other.end, low, strict=True))
    return Box(low, extent) if all(n > 0 for n in extent) else None


def subtract(box: Box, cut: Box) -> list[Box]:
    """What is left of `box` without `cut`: at most two boxes a dimension. Addresses are not carried."""
    shared = intersect(box, cut)
    if shared is None:
        return [box]
    low, high = shared.start, shared.end
    out = []
    start, end = list(box.start), list(box.end)
    for dim in range(len(start)):
        for a, b in ((start[dim], low[dim]), (high[dim], end[dim])):
            if a < b:
                s, e = [*start[:dim], a, *start[dim + 1 :]], [*end[:dim], b, *end[dim + 1 :]]
                out.append(Box(tuple(s), tuple(y - x for x, y in zip(s, e, strict=True))))
        start[dim], end[dim] = low[dim], high[dim]
    return out
