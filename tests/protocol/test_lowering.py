"""Runs are the maximal pieces contiguous on both sides, and carry out exactly their segments."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_oracles import elements

from weightsync.protocol.errors import InvalidLayoutError, PlanBudgetError
from weightsync.protocol.execute import Buffer, execute_runs
from weightsync.protocol.folding import Segment
from weightsync.protocol.lowering import coalesce, count_runs, lower_segments, run_statistics


def copy(shape, source_strides, target_strides, source_offset=0, target_offset=0):
    return Segment(0, source_offset, source_strides, 0, target_offset, target_strides, shape)


def lengths(*segments, itemsize=2):
    return [r.nbytes.tolist() for r in lower_segments(segments, itemsize)]


def test_a_dense_copy_is_one_run():
    assert lengths(copy((4, 8), (8, 1), (8, 1))) == [[64]]


def test_a_column_slice_is_one_run_a_row():
    assert lengths(copy((4, 3), (8, 1), (3, 1))) == [[6] * 4]


def test_dimensions_of_size_one_never_stop_a_run():
    assert lengths(copy((4, 1, 8, 1), (8, 77, 1, 5), (8, 3, 1, 9))) == [[64]]


def test_runs_of_neighbouring_segments_join():
    assert lengths(copy((2, 8), (8, 1), (8, 1)), copy((2, 8), (8, 1), (8, 1), 16, 16)) == [[64]]
    assert lengths(copy((2, 8), (8, 1), (8, 1)), copy((2, 8), (8, 1), (8, 1), 16, 20)) == [[32, 32]]


def test_a_transpose_falls_to_elements_and_is_flagged():
    (runs,) = lower_segments([copy((4, 8), (1, 4), (8, 1))], 2)
    assert runs.nbytes.tolist() == [2] * 32
    assert runs.scattered
    assert runs.scattered_bytes == 64
    assert not lower_segments([copy((4, 3), (8, 1), (3, 1))], 2)[0].scattered


def test_permuted_loops_that_are_dense_on_both_sides_stay_long():
    assert lengths(copy((8, 4), (1, 8), (1, 8))) == [[64]]


def test_thousands_of_rows_are_arrays_not_objects():
    (runs,) = lower_segments([copy((4864, 64), (896, 1), (64, 1))], 2)
    assert len(runs.nbytes) == 4864
    assert runs.source_byte.dtype == np.int64


def test_statistics_count_runs_by_power_of_two():
    stats = run_statistics(lower_segments([copy((4, 3), (8, 1), (3, 1)), copy((64,), (1,), (1,), 100, 100)], 2))
    assert (stats.runs, stats.nbytes, stats.histogram) == (5, 152, {2: 4, 7: 1})
    assert stats.mean_run_bytes == pytest.approx(30.4)
    assert run_statistics([]).mean_run_bytes == 0.0


def test_too_many_runs_are_refused_before_they_are_made():
    with pytest.raises(PlanBudgetError, match=r"1000000 runs.*10"):
        lower_segments([copy((1000, 1000), (1, 1000), (1000, 1))], 2, max_runs=10)


def test_coalesce_keeps_what_only_one_side_continues():
    assert coalesce((2, 3, 4), (12, 4, 1), (100, 4, 1)) == ((2, 12), (12, 1), (100, 1))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_runs_write_what_the_segment_says_and_are_maximal(data):
    dims = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(dims))

    def side():
        order = data.draw(st.permutations(range(dims)))
        gaps = [data.draw(st.integers(0, 2)) for _ in range(dims)]
        strides, step = [0] * dims, 1
        for dim, gap in zip(order, gaps, strict=True):
            strides[dim], step = step, step * shape[dim] + gap
        return tuple(strides)

    segment = copy(shape, side(), side(), 3, 5)
    source = torch.arange(400, dtype=torch.int16)
    target = torch.zeros(400, dtype=torch.int16)
    runs = lower_segments([segment], 2)
    assert execute_runs(runs, {0: Buffer.of(source)}, {0: Buffer.of(target)}) == 2 * segment.numel
    expected = torch.zeros_like(target)
    pairs = sorted(
        zip(
            elements(shape, 5, segment.target_strides),
            elements(shape, 3, segment.source_strides),
            strict=True,
        )
    )
    for t, s in pairs:
        expected[t] = source[s]
    assert torch.equal(target, expected)
    breaks = sum(t1 - t0 != 1 or s1 - s0 != 1 for (t0, s0), (t1, s1) in itertools.pairwise(pairs))
    assert len(runs[0].nbytes) == breaks + 1 <= count_runs(segment)


def test_a_run_outside_its_buffer_is_refused_before_anything_is_written():
    target = torch.zeros(8, dtype=torch.uint8)
    runs = lower_segments([copy((4,), (1,), (1,)), copy((4,), (1,), (1,), 4, 6)], 1)
    with pytest.raises(InvalidLayoutError, match="target rank 0: runs reach byte 10 of a buffer of 8"):
        execute_runs(runs, {0: Buffer.of(torch.ones(8, dtype=torch.uint8))}, {0: Buffer.of(target)})
    with pytest.raises(InvalidLayoutError, match="no buffer"):
        execute_runs(runs, {}, {0: Buffer.of(target)})
    assert not target.any()


def test_a_buffer_must_be_plain_memory():
    with pytest.raises(InvalidLayoutError, match="contiguous CPU memory"):
        Buffer.of(torch.zeros(4, 4).t())
