"""Runs to strided blocks: many equal runs at constant distances are one copy for a copy engine.

A descriptor list wants runs; packing and scattering want as few strided copies as possible. The runs of a column
slice are one block, those of a slice with three free dimensions one block of two steps. The thing to watch: folding
is greedy and never complete, but the blocks always move exactly the runs' bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weightsync.protocol.boxes import Ints


@dataclass(frozen=True, slots=True)
class StridedBlock:
    """`prod(counts)` runs of `nbytes`: run (i, j, ...) is at `src + i * src_steps[0] + j * src_steps[1] + ...`.

    All in bytes, outermost step first.
    """

    src: int
    dst: int
    nbytes: int
    counts: tuple[int, ...] = ()
    src_steps: tuple[int, ...] = ()
    dst_steps: tuple[int, ...] = ()


def fold_runs(src: Ints, dst: Ints, nbytes: Ints) -> list[StridedBlock]:
    """Blocks that move what these runs move, in their order.

    >>> fold_runs(np.array([0, 100, 200]), np.array([0, 8, 16]), np.array([8, 8, 8]))
    [StridedBlock(src=0, dst=0, nbytes=8, counts=(3,), src_steps=(100,), dst_steps=(8,))]
    """
    blocks = _stack_runs(src, dst, nbytes)
    before = len(src) + 1
    while 1 < len(blocks) < before:
        before = len(blocks)
        blocks = _stack_blocks(blocks)
    return blocks


def _stack_runs(src: Ints, dst: Ints, nbytes: Ints) -> list[StridedBlock]:
    same = nbytes[1:] == nbytes[:-1]
    return [
        StridedBlock(
            int(src[first]),
            int(dst[first]),
            int(nbytes[first]),
            *(((count,), (step,), (other,)) if count > 1 else ((), (), ())),
        )
        for first, count, step, other in _progressions(src, dst, same)
    ]


def _stack_blocks(blocks: list[StridedBlock]) -> list[StridedBlock]:
    src = np.array([block.src for block in blocks], dtype=np.int64)
    dst = np.array([block.dst for block in blocks], dtype=np.int64)
    shapes = [(block.nbytes, block.counts, block.src_steps, block.dst_steps) for block in blocks]
    same = np.array([one == other for one, other in pairwise(shapes)], dtype=bool)
    out = []
    for first, count, step, other in _progressions(src, dst, same):
        inner = blocks[first]
        if count > 1:
            inner = StridedBlock(
                inner.src,
                inner.dst,
                inner.nbytes,
                (count, *inner.counts),
                (step, *inner.src_steps),
                (other, *inner.dst_steps),
            )
        out.append(inner)
    return out


def _progressions(src: Ints, dst: Ints, same: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(first, count, source step, target step): items in order, cut where they stop repeating at a constant step.

    `same[i]` says that item i + 1 is of the kind of item i.
    """
    steps, others = np.diff(src), np.diff(dst)
    goes_on = same[:-1] & same[1:] & (steps[1:] == steps[:-1]) & (others[1:] == others[:-1])
    stops = np.append(np.flatnonzero(~goes_on) + 1, len(steps))  # steps i.. are equal up to the next stop
    step_list, other_list, same_list = steps.tolist(), others.tolist(), same.tolist()
    out: list[tuple[int, int, int, int]] = []
    at, total = 0, len(src)
    while at < total:
        if at + 1 == total or not same_list[at]:
            out.append((at, 1, 0, 0))
            at += 1
            continue
        count = int(stops[np.searchsorted(stops, at, side="right")]) - at + 1
        out.append((at, count, step_list[at], other_list[at]))
        at += count
    return out
