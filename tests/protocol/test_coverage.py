"""A proof holds exactly when every target element is written once and every read stays inside its shard."""

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_oracles import elements

from weightsync.protocol.affine import AffineMap, AffinePiece, contiguous_split_map
from weightsync.protocol.boxes import Box
from weightsync.protocol.coverage import PlanBudget, find_holes, prove_segments
from weightsync.protocol.errors import InvalidLayoutError, PlanBudgetError
from weightsync.protocol.execute import execute_plan
from weightsync.protocol.folding import Segment
from weightsync.protocol.transfer import plan_transfer


def rows(start, count, source_rank=0, target_rank=0):
    return Segment(source_rank, 4 * start, (4, 1), target_rank, 4 * start, (4, 1), (count, 4))


def prove(segments):
    return prove_segments(segments, [(6, 4)], [(6, 4)])


def test_a_tiling_is_proved():
    assert prove([rows(0, 2), rows(2, 4)]).target_elements == (24,)


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([rows(0, 2), rows(3, 3)], r"target rank 0: .* 4 of 24 elements.*\(2, 0\)..\(3, 4\)"),
        ([], r"24 of 24"),
        ([rows(0, 3), rows(2, 4)], r"overlap: \(0, 0\)..\(3, 4\) and \(2, 0\)..\(6, 4\)"),
        ([rows(0, 3), rows(0, 3)], "overlap"),
        ([rows(0, 7)], "reads elements 0..27 of source rank 0, which holds 24"),
        ([rows(0, 6, source_rank=2)], "reads rank 2"),
        ([rows(0, 6, target_rank=2)], "writes rank 2"),
        ([dataclasses.replace(rows(0, 6), source_offset=-1)], "reads elements -1"),
    ],
)
def test_what_does_not_tile_is_refused_by_name(segments, words):
    with pytest.raises(InvalidLayoutError, match=words):
        prove(segments)


def test_any_address_of_a_plan_off_by_one_breaks_the_proof():
    plan = plan_transfer(contiguous_split_map((8, 8), [2] * 4, 1), contiguous_split_map((8, 8), [4] * 2, 0))
    for i, s in enumerate(plan.segments):
        broken = [*plan.segments]
        broken[i] = dataclasses.replace(s, target_offset=s.target_offset + 1)
        with pytest.raises(InvalidLayoutError):
            prove_segments(broken, plan.target_shapes, plan.source_shapes)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=2),
        ),
        max_size=4,
    )
)
def test_the_proof_agrees_with_counting_elements(parts):
    segments = []
    for offset, loops in parts:
        shape, strides = tuple(n for n, _ in loops), tuple(s for _, s in loops)
        if offset + sum((n - 1) * s for n, s in loops) < 12:
            segments.append(Segment(0, offset, strides, 0, offset, strides, shape))
    written = Counter(e for s in segments for e in elements(s.shape, s.target_offset, s.target_strides))
    exact = written == Counter(range(12))
    try:
        prove_segments(segments, [(4, 3)], [(12,)])
        proved = True
    except InvalidLayoutError:
        proved = False
    assert proved == exact


def test_holes_are_disjoint_boxes():
    holes = find_holes(Box((0, 0), (4, 4)), [Box((1, 1), (2, 2))])
    assert sum(h.numel for h in holes) == 12
    assert find_holes(Box((0,), (4,)), [Box((0,), (2,)), Box((2,), (2,))]) == []


def test_a_budget_names_its_limit():
    PlanBudget().check_segments(10**9)
    with pytest.raises(PlanBudgetError, match=r"11 segments, the budget is 10: raise PlanBudget.max_segments"):
        PlanBudget(max_segments=10).check_segments(11)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=2),
        ),
        max_size=3,
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 4), st.integers(1, 3)),
)
def test_a_partial_proof_agrees_with_counting_elements(parts, wanted):
    row, column, height, width = wanted
    box = Box((row, column), (min(height, 4 - row), min(width, 3 - column)))
    segments = []
    for offset, loops in parts:
        shape, strides = tuple(n for n, _ in loops), tuple(s for _, s in loops)
        if offset + sum((n - 1) * s for n, s in loops) < 12:
            segments.append(Segment(0, offset, strides, 0, offset, strides, shape))
    written = Counter(e for s in segments for e in elements(s.shape, s.target_offset, s.target_strides))
    exact = written == Counter(3 * r + c for r in range(row, box.end[0]) for c in range(column, box.end[1]))
    try:
        prove_segments(segments, [(4, 3)], [(12,)], [[box]])
        proved = True
    except InvalidLayoutError:
        proved = False
    assert proved == exact


def test_a_partial_plan_writes_its_pieces_and_nothing_else():
    piece = AffinePiece((2, 4), 0, (4, 1), 8, (4, 1), (0,))
    target = AffineMap((4, 4), [(6, 4)], [[piece]])
    source = contiguous_split_map((4, 4), [1, 1, 2], 0)
    with pytest.raises(InvalidLayoutError, match=r"leave 16 of 24 elements unwritten"):
        plan_transfer(target, source)
    plan = plan_transfer(target, source, partial=True)
    assert plan.proof.target_elements == (8,)
    shard = torch.full((6, 4), -1)
    execute_plan(plan, [torch.arange(4).view(1, 4), torch.arange(4, 8).view(1, 4), torch.zeros(2, 4).long()], [shard])
    assert shard.flatten().tolist() == [-1] * 8 + list(range(8)) + [-1] * 8
    twice = AffineMap((4, 4), [(6, 4)], [[piece, dataclasses.replace(piece, dest_offset=12)]])
    with pytest.raises(InvalidLayoutError, match="overlap"):
        plan_transfer(twice, source, partial=True)
