"""Folding runs into strided blocks moves every byte the runs move, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.protocol.strided import StridedBlock, fold_runs

Run = tuple[int, int, int]
"""Source, target, bytes."""


def runs_of(block: StridedBlock) -> list[Run]:
    """Every run of a block, one by one."""
    out = []
    for index in itertools.product(*(range(count) for count in block.counts)):
        src = block.src + sum(i * step for i, step in zip(index, block.src_steps, strict=True))
        dst = block.dst + sum(i * step for i, step in zip(index, block.dst_steps, strict=True))
        out.append((src, dst, block.nbytes))
    return out


def fold(runs: list[Run]) -> list[StridedBlock]:
    columns = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    return fold_runs(columns[0], columns[1], columns[2])


small = st.integers(0, 6)
irregular = st.lists(st.tuples(small, small, st.integers(1, 3)), max_size=12)
grids = st.builds(
    lambda at, counts, steps: [
        (at + sum(i * s for i, (s, _) in zip(index, steps, strict=True)),
         sum(i * t for i, (_, t) in zip(index, steps, strict=True)), 2)
        for index in itertools.product(*map(range, counts))
    ],
    small,
    st.tuples(*[st.integers(1, 4)] * 3),
    st.tuples(*[st.tuples(st.integers(-9, 9), st.integers(1, 50))] * 3),
)  # fmt: skip


@given(st.lists(st.one_of(irregular, grids), max_size=3).map(lambda parts: [run for part in parts for run in part]))
def test_blocks_move_exactly_the_runs_in_their_order(runs: list[Run]) -> None:
    assert [run for block in fold(runs) for run in runs_of(block)] == runs


@pytest.mark.parametrize("counts", [(1,), (2,), (7,), (3, 4), (4, 3), (5, 3, 4)])
def test_a_regular_grid_is_one_block(counts: tuple[int, ...]) -> None:
    src_steps, dst_steps = (1000, 100, 10)[-len(counts) :], (400, 40, 4)[-len(counts) :]
    grid = StridedBlock(5, 7, 3, counts, src_steps, dst_steps)
    blocks = fold(runs_of(grid))
    assert len(blocks) == 1
    assert runs_of(blocks[0]) == runs_of(grid)


def test_many_runs_fold_without_looking_at_each_in_python() -> None:
    rows = np.arange(1_000_000, dtype=np.int64)
    (block,) = fold_runs(rows * 100, rows * 8, np.full(len(rows), 8))
    assert block.counts == (1_000_000,)
