"""Affine maps hold what their pieces say, and refuse pieces that contradict the tensor or each other."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_oracles import elements, numbered, shards_by_definition

from weightsync.protocol.affine import AffineMap, AffinePiece, contiguous_split_map, replicated_map
from weightsync.protocol.boxes import boxes_of, find_overlap, overlapping_pairs, subtract
from weightsync.protocol.coverage import check_map
from weightsync.protocol.errors import InvalidLayoutError, PlanBudgetError, UnsupportedLayoutError


def one_piece(shape, **changes):
    fields = {
        "shape": shape,
        "source_offset": 0,
        "source_strides": (4, 1),
        "dest_offset": 0,
        "dest_strides": (4, 1),
        "locations": (0,),
    }
    return AffineMap((4, 4), [(4, 4)], [[AffinePiece(**{**fields, **changes})]])


def test_extract_and_rebuild_are_inverse():
    layout = contiguous_split_map((7, 3), [4, 0, 3], 0)
    logical = numbered((7, 3))
    shards = [layout.extract(logical, rank) for rank in range(3)]
    assert [tuple(s.shape) for s in shards] == [(4, 3), (0, 3), (3, 3)]
    assert torch.equal(layout.rebuild(shards), logical)


def test_extract_follows_the_definition_of_a_transposed_piece():
    layout = one_piece((4, 4), dest_strides=(1, 4))
    assert torch.equal(layout.extract(numbered((4, 4)), 0), numbered((4, 4)).t())
    assert torch.equal(shards_by_definition(layout)[0], numbered((4, 4)).t())


def test_a_scalar_is_a_tensor_too():
    layout = replicated_map((), 2)
    assert torch.equal(layout.extract(torch.tensor(5), 1), torch.tensor(5))


def test_ranks_may_be_given_as_a_mapping():
    piece = contiguous_split_map((4,), [2, 2], 0).pieces_by_rank
    assert AffineMap((4,), {0: (2,), 1: (2,)}, {1: piece[1], 0: piece[0]}).pieces_by_rank == piece


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_offset": 1}, r"rank 0, piece 0.*1..16.*logical tensor"),
        ({"dest_offset": -1}, r"shard of shape \(4, 4\)"),
        ({"source_strides": (4,)}, "one stride a dimension"),
        ({"locations": ()}, "held by no rank"),
        ({"locations": (1,)}, "leave out rank 0"),
        ({"locations": (0, 3)}, r"not distinct ranks of 0..0"),
    ],
)
def test_a_bad_piece_is_refused_by_name(changes, words):
    with pytest.raises(InvalidLayoutError, match=words):
        one_piece((4, 4), **changes)


def test_a_shard_that_its_pieces_leave_open_is_refused_with_the_hole():
    with pytest.raises(InvalidLayoutError, match=r"4 of 16 elements.*\(3, 0\)..\(4, 4\)"):
        check_map(one_piece((3, 4)), "source")


def test_pieces_that_share_a_shard_element_are_refused():
    whole = replicated_map((4, 4), 1).pieces_by_rank[0][0]
    half = AffinePiece((2, 4), 0, (4, 1), 8, (4, 1), (0,))
    with pytest.raises(InvalidLayoutError, match="overlap"):
        check_map(AffineMap((4, 4), [(4, 4)], [[whole, half]]), "source")


def test_a_piece_that_repeats_elements_is_unsupported():
    with pytest.raises(UnsupportedLayoutError, match="repeat"):
        one_piece((4, 4), source_strides=(0, 1)).logical_boxes(0)


def test_splitting_stops_at_the_budget():
    with pytest.raises(PlanBudgetError, match="more than 10 boxes"):
        boxes_of((1000,), (400,), 0, (2,), 0, (1,), what="piece", max_boxes=10)


@st.composite
def strided_regions(draw):
    space = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    total = 1
    for n in space:
        total *= n
    loops = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), min_size=0, max_size=3))
    offset = draw(st.integers(0, total - 1))
    kept, last = [], offset
    for n, s in loops:
        if last + (n - 1) * s < total:
            kept.append((n, s))
            last += (n - 1) * s
    shape, strides = tuple(n for n, _ in kept), tuple(s for _, s in kept)
    return space, shape, offset, strides


@settings(max_examples=400, deadline=None)
@given(strided_regions())
def test_boxes_hold_exactly_the_elements_of_a_strided_region(region):
    space, shape, offset, strides = region
    here = elements(shape, offset, strides)
    dense = tuple(torch.empty(shape).stride())
    there = elements(shape, 5, dense)
    try:
        boxes = boxes_of(space, shape, offset, strides, 5, dense, what="region")
    except InvalidLayoutError:
        assert len(set(here)) < len(here)
        return
    unit = torch.empty(space).stride()
    got = {}
    for box in boxes:
        for index in product(*(range(n) for n in box.extent)):
            at = sum((a + i) * u for a, i, u in zip(box.start, index, unit, strict=True))
            assert all(a + i < n for a, i, n in zip(box.start, index, space, strict=True))
            got.setdefault(at, []).append(box.offset + sum(i * s for i, s in zip(index, box.strides, strict=True)))
    wanted = {}
    for a, b in zip(here, there, strict=True):
        wanted.setdefault(a, []).append(b)
    assert {k: sorted(v) for k, v in got.items()} == {k: sorted(v) for k, v in wanted.items()}


boxes_2d = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 4), st.integers(1, 4)),
    min_size=1,
    max_size=12,
)


def as_arrays(boxes):
    import numpy as np

    rows = np.array(boxes, dtype=np.int64)
    return rows[:, :2], rows[:, :2] + rows[:, 2:]


def cells(box):
    return set(product(range(box[0], box[0] + box[2]), range(box[1], box[1] + box[3])))


@settings(max_examples=300, deadline=None)
@given(boxes_2d)
def test_an_overlap_is_found_exactly_when_two_boxes_share_an_element(boxes):
    hit = find_overlap(*as_arrays(boxes))
    shared = any(cells(a) & cells(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert (hit is not None) == shared
    if hit:
        assert hit[0] != hit[1]
        assert cells(boxes[hit[0]]) & cells(boxes[hit[1]])


@settings(max_examples=300, deadline=None)
@given(boxes_2d, boxes_2d)
def test_the_sweep_finds_the_pairs_that_all_pairs_would(a, b):
    i, j = overlapping_pairs(*as_arrays(a), *as_arrays(b))
    expected = [(x, y) for x in range(len(a)) for y in range(len(b)) if cells(a[x]) & cells(b[y])]
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == expected


@settings(max_examples=200, deadline=None)
@given(boxes_2d)
def test_subtraction_leaves_exactly_the_rest(boxes):
    from weightsync.protocol.boxes import Box

    as_box = [Box((a, b), (h, w)) for a, b, h, w in boxes]
    left = [as_box[0]]
    for cut in as_box[1:]:
        left = [part for box in left for part in subtract(box, cut)]
    got = [c for box in left for c in cells((*box.start, *box.extent))]
    assert len(got) == len(set(got))
    assert set(got) == cells(boxes[0]) - set().union(*map(cells, boxes[1:]))
