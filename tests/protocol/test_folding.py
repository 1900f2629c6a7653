"""Folding moves the same elements in fewer copies: what continues is joined, what repeats is stacked."""

from hypothesis import given, settings
from hypothesis import strategies as st
from planning_oracles import elements

from weightsync.protocol.folding import Segment, fold, join_adjacent, stack_repeated


def copy(source_offset, target_offset, shape=(2, 3), source_strides=(10, 1), target_strides=(10, 1), ranks=(0, 0)):
    return Segment(ranks[0], source_offset, source_strides, ranks[1], target_offset, target_strides, shape)


def moves(segments):
    return sorted(
        (s.source_rank, a, s.target_rank, b)
        for s in segments
        for a, b in zip(
            elements(s.shape, s.source_offset, s.source_strides),
            elements(s.shape, s.target_offset, s.target_strides),
            strict=True,
        )
    )


def test_copies_join_along_either_axis():
    assert fold([copy(0, 0), copy(20, 20)]) == [copy(0, 0, (4, 3))]
    assert fold([copy(0, 0), copy(3, 3)]) == [copy(0, 0, (2, 6))]


def test_a_grid_of_copies_joins_to_one_whatever_the_order():
    grid = [copy(20 * i + 3 * j, 20 * i + 3 * j) for i in range(3) for j in range(3)]
    assert fold(grid[::-1]) == [copy(0, 0, (6, 9))]


def test_what_continues_on_one_side_only_stays_apart():
    assert len(join_adjacent([copy(0, 0), copy(20, 30)])) == 2
    assert len(fold([copy(0, 0), copy(20, 30)], stack=False)) == 2


def test_ranks_never_mix():
    assert len(fold([copy(0, 0, ranks=(0, 0)), copy(20, 20, ranks=(1, 0)), copy(20, 20, ranks=(0, 1))])) == 3


def test_constant_deltas_stack_into_an_outer_dimension():
    assert fold([copy(100 * i, 50 * i) for i in range(4)]) == [
        copy(0, 0, (4, 2, 3), (100, 10, 1), (50, 10, 1)),
    ]


def test_a_delta_that_changes_starts_another_stack():
    offsets = [(0, 0), (100, 50), (200, 100), (300, 400), (500, 600), (700, 800)]
    assert [s.shape for s in fold([copy(a, b) for a, b in offsets])] == [(3, 2, 3), (3, 2, 3)]


def test_many_equal_copies_are_stacked_in_one_scan():
    (stacked,) = stack_repeated([copy(100 * i, 50 * i) for i in range(3000)])
    assert stacked.shape == (3000, 2, 3)


def test_descending_sources_are_left_alone():
    assert len(stack_repeated([copy(100 - 40 * i, 50 * i) for i in range(2)])) == 2


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 3), st.integers(1, 3)), max_size=14))
def test_folding_keeps_every_move(parts):
    taken, segments = set(), []
    for a, b, h, w in parts:
        s = copy(a, b, (h, w), (7, 1), (7, 1))
        cells = set(elements(s.shape, b, s.target_strides))
        if not cells & taken:
            taken |= cells
            segments.append(s)
    folded = fold(segments)
    assert moves(folded) == moves(segments)
    assert len(folded) <= len(segments)
