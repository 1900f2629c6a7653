"""The model of a bench: who holds what, which runs that gives, and which bytes are right."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from weightsync.service.bench.layout import Box, Layout, TensorSpec, gapped_layout, model_layout, runs_between
from weightsync.service.bench.values import allocate, differing, fill

LAYOUTS = {
    "one to one": model_layout(300_000, 1, 1, 1),
    "3 ranks, tensor parallel 2": model_layout(300_000, 3, 2, 2),
    "2 ranks, 2 replicas of 2": model_layout(300_000, 2, 4, 2),
    "more ranks than rows": Layout(((TensorSpec("w", 3, 4, cut=1), TensorSpec("v", 2, 1)),), 5, 2, 2),
    "gapped": gapped_layout(40_000, 512),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_slice_holds_what_plain_torch_cuts_out_of_the_whole(layout: Layout) -> None:
    whole = {name: Box(0, spec.rows, 0, spec.columns) for name, spec in layout.tensors.items()}
    full = allocate(layout, whole)
    fill(layout, whole, full, version=7)
    for worker in range(layout.consumers):
        boxes = layout.wanted(worker)
        mine = allocate(layout, boxes)
        fill(layout, boxes, mine, version=7)
        for name, box in boxes.items():
            cut = full[name][box.row : box.row + box.rows]
            cut = cut if cut.dim() == 1 else cut[:, box.column : box.column + box.columns]
            assert torch.equal(mine[name].view(torch.int16), cut.view(torch.int16).contiguous())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_runs_bring_every_worker_exactly_its_bytes(layout: Layout) -> None:
    held = [layout.held(rank) for rank in range(layout.producers)]
    trainers = [allocate(layout, boxes) for boxes in held]
    for boxes, tensors in zip(held, trainers, strict=True):
        fill(layout, boxes, tensors, version=2)
    runs = 0
    for worker in range(layout.consumers):
        boxes = layout.wanted(worker)
        mine = allocate(layout, boxes)
        written = 0
        for rank, theirs in enumerate(trainers):
            source, destination = ({n: t.data_ptr() for n, t in tensors.items()} for tensors in (theirs, mine))
            plan = runs_between(layout, rank, worker, source, destination)
            for src, dst, nbytes in zip(*(part.tolist() for part in plan), strict=True):
                ctypes.memmove(dst, src, nbytes)
                written += nbytes
                runs += 1
        assert differing(layout, boxes, mine, version=2) == []
        assert written == sum(box.nbytes for box in boxes.values()), "no byte is read twice"
        assert sorted(differing(layout, boxes, mine, version=3)) == sorted(boxes), "another version is noticed"
    assert runs == layout.runs


def test_one_wrong_bit_and_two_swapped_rows_are_noticed() -> None:
    layout = model_layout(300_000, 1, 1, 1)
    boxes = layout.wanted(0)
    tensors = allocate(layout, boxes)
    fill(layout, boxes, tensors, version=1)
    name = next(iter(boxes))
    bits = tensors[name].view(torch.int16)
    bits[-1, -1] ^= 1
    assert differing(layout, boxes, tensors, version=1) == [name]
    bits[-1, -1] ^= 1
    bits[[0, 1]] = bits[[1, 0]]
    assert differing(layout, boxes, tensors, version=1) == [name]


def test_every_element_differs_from_that_of_every_other_version() -> None:
    layout = model_layout(300_000, 1, 1, 1)
    boxes = layout.held(0)
    first, second = allocate(layout, boxes), allocate(layout, boxes)
    fill(layout, boxes, first, version=1)
    fill(layout, boxes, second, version=300)
    assert all(bool((first[n].view(torch.int16) != second[n].view(torch.int16)).all()) for n in boxes)


@pytest.mark.parametrize("nbytes", [16_000_000, 64_000_000, 1_000_000_000, 4_000_000_000])
def test_a_model_is_as_large_as_was_asked_for(nbytes: int) -> None:
    layout = model_layout(nbytes, 8, 8, 8)
    assert 0.99 * nbytes < layout.nbytes <= nbytes
    assert not layout.contiguous
    assert model_layout(nbytes, 2, 1, 1).contiguous
    assert {spec.cut for spec in layout.tensors.values()} == {0, 1, None}


@pytest.mark.parametrize(("gap", "step"), [(1.0, 8192), (0.125, 4608), (7.0, 32768)])
def test_runs_of_a_gapped_layout_are_separate_and_of_one_size(gap: float, step: int) -> None:
    layout = gapped_layout(1 << 20, 4096, gap)
    source, destination = (dict.fromkeys(layout.tensors, 1 << 40) for _ in range(2))
    src, _, nbytes = runs_between(layout, 0, 0, source, destination)
    assert set(nbytes.tolist()) == {4096}
    assert int(nbytes.sum()) == 1 << 20
    within = np.diff(src.reshape(len(layout.tensors), -1).astype(np.int64), axis=1)
    assert set(within.ravel().tolist()) == {step}


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 consumers cannot form replicas of tensor parallel 2"):
        model_layout(16_000_000, 1, 3, 2)
    with pytest.raises(ValueError, match="too small"):
        model_layout(1000, 1, 1, 1)
    with pytest.raises(ValueError, match="do not split"):
        gapped_layout(1000, 513)
    with pytest.raises(ValueError, match="do not split"):
        gapped_layout(1 << 20, 4, gap=0.125)
