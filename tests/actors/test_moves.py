"""Strided copies move exactly the bytes of their blocks, and touch nothing outside the memory they were given."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.actors.moves import Memory, Moves, measure_moves
from weightsync.protocol.errors import SyncError

SIZE = 4096


def moves(runs: list[tuple[int, int, int]], source: Memory, target: Memory) -> Moves:
    columns = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    return Moves(columns[0], columns[1], columns[2], source, target)


dims = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40), st.integers(0, 10)), max_size=3)


@settings(max_examples=300, deadline=None)
@given(dims, st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24]), st.sampled_from([1, 2, 4, 8]), st.integers(0, 9))
def test_a_block_is_the_copies_of_its_runs(
    loops: list[tuple[int, int, int]], nbytes: int, unit: int, offset: int
) -> None:
    source = torch.randint(0, 255, (SIZE,), dtype=torch.uint8)
    target, expected = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    counts = tuple(count for count, _, _ in loops)
    src_steps = tuple(step * unit for _, step, _ in loops)
    dst_steps, inner = [], nbytes
    for count, _, gap in reversed(loops):  # runs must not overlap where they land
        inner += gap * unit
        dst_steps.insert(0, inner)
        inner *= count
    if inner + offset * unit > SIZE:
        return
    runs = []
    for index in itertools.product(*map(range, counts)):
        src = offset * unit + sum(i * step for i, step in zip(index, src_steps, strict=True))
        dst = offset * unit + sum(i * step for i, step in zip(index, dst_steps, strict=True))
        ctypes.memmove(expected.data_ptr() + dst, source.data_ptr() + src, nbytes)
        runs.append((source.data_ptr() + src, target.data_ptr() + dst, nbytes))
    moves(runs, Memory([source]), Memory([target])).run()
    assert torch.equal(target, expected)


def test_memory_is_found_by_address_whatever_view_was_given() -> None:
    one, two = torch.arange(10, dtype=torch.int16), torch.arange(20.0)
    memory = Memory([one[3:5], two.view(4, 5).t()])
    flat, base = memory.containing(two.data_ptr() + 4, two.data_ptr() + 80)
    assert (base, flat.numel()) == (two.data_ptr(), 80)
    with pytest.raises(SyncError, match="no memory"):
        memory.containing(two.data_ptr() + 4, two.data_ptr() + 81)
    with pytest.raises(SyncError, match="no memory"):
        memory.containing(1, 2)


def test_a_move_out_of_memory_is_refused_before_it_moves() -> None:
    one, two = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    runs = [(one.data_ptr(), two.data_ptr() + 8 * i, 8) for i in range(9)]
    with pytest.raises(SyncError, match="no memory"):
        moves(runs, Memory([one]), Memory([two]))


def test_runs_that_repeat_at_one_step_across_storages_are_not_one_copy() -> None:
    """Equal tensors often lie equally far apart; what is between them belongs to others."""
    sources = [torch.full((16,), i + 1, dtype=torch.uint8) for i in range(40)]
    targets = [torch.zeros(16, dtype=torch.uint8) for _ in range(40)]
    sources.sort(key=lambda t: t.data_ptr())
    targets.sort(key=lambda t: t.data_ptr())
    runs = [(s.data_ptr(), t.data_ptr(), 16) for s, t in zip(sources, targets, strict=True)]
    moves(runs, Memory(sources), Memory(targets)).run()
    assert all(torch.equal(s, t) for s, t in zip(sources, targets, strict=True))


def test_measured_costs_are_those_of_memory() -> None:
    costs = measure_moves(torch.device("cpu"))
    assert 1e7 < costs.bytes_per_s < 1e12
    assert 0 < costs.run_s < 1e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_device_memory_moves_as_host_memory_does() -> None:
    source = torch.arange(10_000, dtype=torch.int32, device="cuda")
    target = torch.zeros(100, 7, dtype=torch.int32, device="cuda")
    runs = [(source.data_ptr() + 8 + 400 * i, target.data_ptr() + 28 * i, 28) for i in range(100)]
    moves(runs, Memory([source]), Memory([target])).run()
    assert torch.equal(target, source.view(100, 100)[:, 2:9])
