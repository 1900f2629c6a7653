"""Strided segments to runs: maximal pieces contiguous on both sides, one transfer descriptor each.

Trailing dimensions that are dense on both sides coalesce, dimensions of size 1 never stop that, and whatever
strides remain are enumerated in numpy. The thing to watch: from here on everything is BYTES. A segment that
falls to runs of single elements (a transpose) is flagged `scattered`, so that the data path packs it instead
of posting one descriptor an element. What a run costs is left to the cost model that reads `RunStatistics`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.protocol.boxes import Ints
from weightsync.protocol.errors import InvalidLayoutError, PlanBudgetError
from weightsync.protocol.folding import Segment


@dataclass(frozen=True)
class SegmentRuns:
    """The runs of one pair of ranks: equal-length byte arrays, offsets from the first byte of each shard.

    `scattered` counts the bytes that come from segments whose runs are single elements.
    """

    source_rank: int
    target_rank: int
    source_byte: Ints
    target_byte: Ints
    nbytes: Ints
    scattered_bytes: int

    @property
    def scattered(self) -> bool:
        """Whether some of it moves element by element and is better packed."""
        return self.scattered_bytes > 0


@dataclass(frozen=True)
class RunStatistics:
    """What a cost model reads: `histogram[k]` runs are of 2**k up to (not including) 2**(k+1) bytes."""

    runs: int
    nbytes: int
    scattered_bytes: int
    histogram: Mapping[int, int]

    @property
    def mean_run_bytes(self) -> float:
        """Average length of a run; 0.0 without runs."""
        return self.nbytes / self.runs if self.runs else 0.0


def coalesce(
    shape: Sequence[int], source_strides: Sequence[int], target_strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same copy with as few dimensions as possible: neighbours that continue on both sides are merged.

    >>> coalesce((4, 1, 8), (8, 99, 1), (8, 7, 1))
    ((32,), (1,), (1,))
    """
    sizes: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for n, s, t in zip(shape, source_strides, target_strides, strict=True):
        if n == 1:
            continue
        if sizes and sources[-1] == n * s and targets[-1] == n * t:
            sizes[-1] *= n
            sources[-1], targets[-1] = s, t
        else:
            sizes.append(n)
            sources.append(s)
            targets.append(t)
    return tuple(sizes), tuple(sources), tuple(targets)


def count_runs(segment: Segment) -> int:
    """How many runs a segment lowers to before neighbours join, without enumerating them."""
    shape, sources, targets = _run_last(segment)
    dense = bool(shape) and sources[-1] == targets[-1] == 1
    return int(np.prod(shape[:-1] if dense else shape, dtype=np.int64))


def lower_segment(segment: Segment, itemsize: int) -> tuple[Ints, Ints, int]:
    """(source bytes, target bytes, bytes of each run): every run of one segment is equally long."""
    if itemsize < 1:
        raise InvalidLayoutError(f"itemsize {itemsize} must be at least 1 byte")
    shape, sources, targets = _run_last(segment)
    length = 1
    if shape and sources[-1] == targets[-1] == 1:
        length, shape, sources, targets = shape[-1], shape[:-1], sources[:-1], targets[:-1]
    source = np.full(1 if segment.numel else 0, segment.source_offset, dtype=np.int64)
    target = np.full(len(source), segment.target_offset, dtype=np.int64)
    for n, s, t in zip(shape, sources, targets, strict=True):
        steps = np.arange(n, dtype=np.int64)
        source = (source[:, None] + steps * s).ravel()
        target = (target[:, None] + steps * t).ravel()
    return source * itemsize, target * itemsize, length * itemsize


def lower_segments(segments: Iterable[Segment], itemsize: int, *, max_runs: int | None = None) -> list[SegmentRuns]:
    """All runs, one entry for each pair of ranks, in target order; runs adjacent on both sides are joined.

    Raises PlanBudgetError when the segments would need more than `max_runs` runs, before they are made.
    """
    segments = list(segments)
    if max_runs is not None:
        needed = sum(count_runs(s) for s in segments)
        if needed > max_runs:
            raise PlanBudgetError(f"the plan needs {needed} runs, the budget is {max_runs}: raise max_runs")
    by_pair: defaultdict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        by_pair[segment.target_rank, segment.source_rank].append(segment)
    out: list[SegmentRuns] = []
    for (target_rank, source_rank), own in sorted(by_pair.items(), key=lambda item: item[0]):
        parts = [lower_segment(s, itemsize) for s in own]
        scattered = sum(
            s.numel * itemsize for s, (_, _, n) in zip(own, parts, strict=True) if n == itemsize and s.numel > 1
        )
        source = np.concatenate([p[0] for p in parts])
        target = np.concatenate([p[1] for p in parts])
        nbytes = np.concatenate([np.full(len(p[0]), p[2], dtype=np.int64) for p in parts])
        source, target, nbytes = join_runs(source, target, nbytes)
        out.append(SegmentRuns(source_rank, target_rank, source, target, nbytes, scattered))
    return out


def join_runs(source: Ints, target: Ints, nbytes: Ints) -> tuple[Ints, Ints, Ints]:
    """Runs in target order, neighbours that continue on both sides made one."""
    order = np.argsort(target, kind="stable")
    source, target, nbytes = source[order], target[order], nbytes[order]
    if len(source) < 2:
        return source, target, nbytes
    continues = (source[1:] == source[:-1] + nbytes[:-1]) & (target[1:] == target[:-1] + nbytes[:-1])
    first = np.concatenate([[0], np.flatnonzero(~continues) + 1])
    return source[first], target[first], np.add.reduceat(nbytes, first)


def clip_runs(
    source: Ints, target: Ints, nbytes: Ints, wanted_target: Ints, wanted_nbytes: Ints
) -> tuple[Ints, Ints, Ints]:
    """The parts of runs whose target bytes are wanted, in target order.

    Args:
        source, target, nbytes: runs that do not overlap in the target.
        wanted_target, wanted_nbytes: stretches of the target that do not overlap each other.

    >>> clip_runs(np.array([100]), np.array([0]), np.array([10]), np.array([6, 2]), np.array([9, 1]))
    (array([102, 106]), array([2, 6]), array([1, 4]))
    """
    order = np.argsort(wanted_target, kind="stable")
    begins, ends = wanted_target[order], (wanted_target + wanted_nbytes)[order]
    order = np.argsort(target, kind="stable")
    source, target, nbytes = source[order], target[order], nbytes[order]
    first = np.searchsorted(ends, target, side="right")
    last = np.searchsorted(begins, target + nbytes, side="left")
    hits = np.maximum(last - first, 0)
    run = np.repeat(np.arange(len(target)), hits)
    wanted = np.arange(len(run)) - np.repeat(np.cumsum(hits) - hits, hits) + np.repeat(first, hits)
    start = np.maximum(target[run], begins[wanted])
    end = np.minimum((target + nbytes)[run], ends[wanted])
    return source[run] + (start - target[run]), start, end - start


def run_statistics(runs: Iterable[SegmentRuns]) -> RunStatistics:
    """Counts over all pairs of ranks."""
    runs = list(runs)
    lengths = np.concatenate([r.nbytes for r in runs]) if runs else np.empty(0, dtype=np.int64)
    powers, counts = np.unique(np.floor(np.log2(lengths)).astype(np.int64), return_counts=True)
    return RunStatistics(
        len(lengths),
        int(lengths.sum()),
        sum(r.scattered_bytes for r in runs),
        {int(p): int(c) for p, c in zip(powers, counts, strict=True)},
    )


def _run_last(segment: Segment) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Coalesced with the loop of step 1 innermost: the order of loops is free, the runs are not."""
    loops = sorted(
        zip(segment.shape, segment.source_strides, segment.target_strides, strict=True),
        key=lambda loop: (-loop[2], -loop[1]),
    )
    return coalesce([n for n, _, _ in loops], [s for _, s, _ in loops], [t for _, _, t in loops])
