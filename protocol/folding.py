"""Fewer copies for the same elements: join what continues, stack what repeats.

    1. join: two copies between the same ranks, equal but for one axis, where the second begins where the
       first ends along that axis in BOTH address spaces
    2. stack: copies of equal shape and strides at constant deltas on both sides become one copy with an extra
       outer dimension; repeated, so that stacks of stacks fold too

The thing to watch: folding never changes which element goes where; `coverage.py` proves that of its result.
Only what is between one pair of ranks folds; choosing holders so that it can is `holders.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

# Above this many equal copies the longest progression is not searched for; one forward scan is made instead.
EXHAUSTIVE_STACK = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """One strided copy from a source rank's shard to a target rank's; offsets and strides in elements."""

    source_rank: int
    source_offset: int
    source_strides: tuple[int, ...]
    target_rank: int
    target_offset: int
    target_strides: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements the copy moves."""
        return prod(self.shape)


def fold(segments: Sequence[Segment], *, stack: bool = True) -> list[Segment]:
    """The same copies in fewer segments, ordered by target rank, then target offset."""
    by_pair: defaultdict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        by_pair[segment.target_rank, segment.source_rank].append(segment)
    out: list[Segment] = []
    for group in by_pair.values():
        if len(group) > 1:
            group = join_adjacent(group)
        if stack and len(group) > 1:
            group = stack_repeated(group)
        out += group
    return sorted(out, key=lambda s: (s.target_rank, s.target_offset, s.source_rank))


def join_adjacent(segments: Sequence[Segment]) -> list[Segment]:
    """Join copies of one pair of ranks along every axis until nothing joins any more."""
    current = list(segments)
    axes = max((len(s.shape) for s in current), default=0)
    before = len(current) + 1
    while len(current) < before:
        before = len(current)
        for axis in range(axes):
            current = _join_axis(current, axis)
    return current


def _join_axis(segments: list[Segment], axis: int) -> list[Segment]:
    starts: dict[tuple[object, ...], Segment] = {}
    rest: list[Segment] = []
    for s in segments:
        if axis >= len(s.shape):
            rest.append(s)
            continue
        starts[(*_fixed(s, axis), s.source_offset, s.target_offset)] = s
    out: list[Segment] = []
    # In target order the first copy of a chain comes before those that continue it (strides are positive).
    for key, first in sorted(starts.items(), key=lambda item: item[1].target_offset):
        if key not in starts:
            continue
        del starts[key]
        length = first.shape[axis]
        fixed = key[:-2]
        while True:
            after = (
                *fixed,
                first.source_offset + length * first.source_strides[axis],
                first.target_offset + length * first.target_strides[axis],
            )
            continued = starts.pop(after, None)
            if continued is None:
                break
            length += continued.shape[axis]
        shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
        out.append(first if length == first.shape[axis] else _reshaped(first, shape))
    return out + rest


def _fixed(s: Segment, axis: int) -> tuple[object, ...]:
    return (s.shape[:axis], s.shape[axis + 1 :], s.source_strides, s.target_strides)


def _reshaped(s: Segment, shape: tuple[int, ...]) -> Segment:
    return Segment(
        s.source_rank,
        s.source_offset,
        s.source_strides,
        s.target_rank,
        s.target_offset,
        s.target_strides,
        shape,
    )


def stack_repeated(segments: Sequence[Segment]) -> list[Segment]:
    """Stack copies of one pair of ranks that repeat at a constant, positive delta on both sides."""
    equal: defaultdict[tuple[object, ...], list[Segment]] = defaultdict(list)
    for s in segments:
        equal[s.shape, s.source_strides, s.target_strides].append(s)
    out: list[Segment] = []
    for group in equal.values():
        group.sort(key=lambda s: s.target_offset)
        progressions = _longest_first(group) if len(group) <= EXHAUSTIVE_STACK else _forward(group)
        out += [_stacked(members) for members in progressions]
    return out


def _stacked(members: list[Segment]) -> Segment:
    first = members[0]
    if len(members) == 1:
        return first
    source_step = members[1].source_offset - first.source_offset
    target_step = members[1].target_offset - first.target_offset
    return Segment(
        first.source_rank,
        first.source_offset,
        (source_step, *first.source_strides),
        first.target_rank,
        first.target_offset,
        (target_step, *first.target_strides),
        (len(members), *first.shape),
    )


def _longest_first(group: list[Segment]) -> list[list[Segment]]:
    """Take the longest arithmetic progression, then the longest of what is left, and so on."""
    left = {(s.source_offset, s.target_offset): s for s in group}
    out: list[list[Segment]] = []
    while len(left) > 1:
        best: list[tuple[int, int]] = []
        points = list(left)
        for i, (s0, t0) in enumerate(points):
            for s1, t1 in points[i + 1 :]:
                ds, dt = s1 - s0, t1 - t0
                if ds <= 0 or dt <= 0:
                    continue
                chain = [(s0, t0)]
                while (chain[-1][0] + ds, chain[-1][1] + dt) in left:
                    chain.append((chain[-1][0] + ds, chain[-1][1] + dt))
                if len(chain) > len(best):
                    best = chain
        if not best:
            break
        out.append([left.pop(point) for point in best])
    return out + [[s] for s in left.values()]


def _forward(group: list[Segment]) -> list[list[Segment]]:
    out: list[list[Segment]] = []
    members: list[Segment] = []
    for s in group:
        if members:
            ds, dt = s.source_offset - members[-1].source_offset, s.target_offset - members[-1].target_offset
            fits = ds > 0 and dt > 0
            if fits and len(members) > 1:
                fits = (ds, dt) == (
                    members[1].source_offset - members[0].source_offset,
                    members[1].target_offset - members[0].target_offset,
                )
            if not fits:
                out.append(members)
                members = []
        members.append(s)
    return [*out, members]
