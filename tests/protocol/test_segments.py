"""Shard tables and pulls from them, against a brute force that knows only addresses of single bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.segments import PullSegment, bounce_copy, lower_copy, plan_pull
from weightsync.protocol.shards import (
    PublishedShard,
    PublishedTensor,
    Source,
    StridedShard,
    build_sources,
    check_complete,
    merge_shard_tables,
)
from weightsync.protocol.views import replay

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


class Memory:
    """Shards of one tensor laid out in a fake address space, byte by byte; with `strides`, not C-contiguous."""

    def __init__(self, full: torch.Tensor, boxes: Boxes, strides: Sequence[tuple[int, ...] | None] = ()) -> None:
        self.full, self.bytes, self.read = full, {}, {}
        shards: list[PublishedShard] = []
        addr, size = 1000, full.element_size()
        for index, (offset, shape) in enumerate(boxes):
            part = full[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))].contiguous()
            steps = strides[index] if strides else None
            elements = part.reshape(-1, 1).view(torch.uint8).tolist()
            reach = 0
            for at, (coordinates, values) in enumerate(zip(np.ndindex(*shape), elements, strict=True)):
                where = at if steps is None else sum(c * s for c, s in zip(coordinates, steps, strict=True))
                self.bytes.update({addr + where * size + byte: value for byte, value in enumerate(values)})
                reach = max(reach, where)
            box = (f"rank{index}", 0, addr, tuple(offset), tuple(shape))
            shards.append(PublishedShard(*box) if steps is None else StridedShard(*box, steps))
            addr += (reach + 1) * size + 64
        self.tables = [
            [PublishedTensor("w", str(full.dtype)[6:], full.element_size(), tuple(full.shape), (shard,))]
            for shard in shards
        ]

    def source(self) -> Source:
        return build_sources(merge_shard_tables(self.tables))[0]["w"]

    def execute(self, segments: list[PullSegment], nbytes: int) -> torch.Tensor:
        """Copy every segment byte by byte; a byte written twice fails, one never written stays 0xEE."""
        out, written = [0xEE] * nbytes, set()
        for segment in segments:
            for position in range(segment.nbytes):
                at = segment.dst_byte + position
                assert at not in written, f"byte {at} is written twice"
                written.add(at)
                out[at] = self.bytes[segment.src_addr + position]
        return torch.tensor(out, dtype=torch.uint8)


def whole(full: torch.Tensor, chain: Any = (), dtype: torch.dtype | None = None) -> RecordedCopy:
    result = replay(full, chain)
    return RecordedCopy(
        "w", chain, "p", 0, tuple(result.shape), tuple(result.contiguous().stride()), dtype or result.dtype
    )


def pull(memory: Memory, copy: RecordedCopy) -> torch.Tensor:
    source = memory.source()
    segments = plan_pull(
        copy, global_shape=source.global_shape, src_dtype=source.dtype, elsize=source.elsize, shards=source.shards
    )
    result = replay(memory.full, copy.op_chain)
    out = memory.execute(segments, result.numel() * result.element_size())
    return out.view(result.dtype).view(result.shape)


@st.composite
def tiled(draw: st.DrawFn) -> tuple[torch.Tensor, Boxes]:
    """A tensor and boxes that cover it: a random grid, plus random overlapping extra boxes, in random order."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes: Boxes = [
        (
            tuple(c[i] for c, i in zip(cuts, cell, strict=True)),
            tuple(c[i + 1] - c[i] for c, i in zip(cuts, cell, strict=True)),
        )
        for cell in itertools.product(*(range(len(c) - 1) for c in cuts))
    ]
    for _ in range(draw(st.integers(0, 3))):
        start = tuple(draw(st.integers(0, size - 1)) for size in shape)
        boxes.append((start, tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, start, strict=True))))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    full = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    return full, draw(st.permutations(boxes))


@st.composite
def strides_for(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """None, or strides of that box: dimensions in any order, with gaps between them, and no element twice."""
    if draw(st.booleans()):
        return None
    strides, step = [0] * len(shape), draw(st.integers(1, 3))
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step = (shape[dim] - 1) * step + step * draw(st.integers(1, 2)) + draw(st.sampled_from([0, 0, 1]))
    return tuple(strides)


@st.composite
def chain_for(draw: st.DrawFn, full: torch.Tensor) -> Any:
    chain: list[Any] = []
    for _ in range(draw(st.integers(0, 4))):
        current = replay(full, tuple(chain))
        if current.dim() == 0:
            break
        dim = draw(st.integers(0, current.dim() - 1))
        size = current.shape[dim]
        kind = draw(st.sampled_from(["narrow", "transpose", "index", "flatten", "step"]))
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            chain.append(("narrow", (dim, start, draw(st.integers(1, size - start))), ()))
        elif kind == "transpose":
            chain.append(("transpose", (dim, draw(st.integers(0, current.dim() - 1))), ()))
        elif kind == "index" and current.dim() > 1:
            chain.append(("__getitem__", (draw(st.integers(0, current.shape[0] - 1)),), ()))
        elif kind == "flatten" and current.is_contiguous():
            chain.append(("flatten", (), ()))
        elif kind == "step":
            chain.append(("__getitem__", (slice(None, None, 2),), ()))
    return tuple(chain)


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_any_view_of_any_tiling_arrives_byte_for_byte_and_once(data: st.DataObject) -> None:
    full, boxes = data.draw(tiled())
    chain = data.draw(chain_for(full))
    assert torch.equal(pull(Memory(full, boxes), whole(full, chain)), replay(full, chain))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_strided_destination_is_filled_where_it_should_be(data: st.DataObject) -> None:
    full, boxes = data.draw(tiled())
    gap = data.draw(st.integers(0, 3))
    parameter = torch.zeros(3 + torch.Size(full.shape).numel() * (1 + gap), dtype=full.dtype)
    strides = tuple(stride * (1 + gap) for stride in torch.empty(full.shape).stride())
    copy = RecordedCopy("w", (), "p", 3, tuple(full.shape), strides, full.dtype)
    source = Memory(full, boxes)
    segments = plan_pull(
        copy,
        global_shape=tuple(full.shape),
        src_dtype=full.dtype,
        elsize=full.element_size(),
        shards=source.source().shards,
    )
    out = source.execute(segments, parameter.numel() * full.element_size()).view(full.dtype)
    assert torch.equal(copy.destination_view(out), full)
    untouched = torch.ones(parameter.numel(), dtype=torch.bool)
    copy.destination_view(untouched.view(-1).to(full.dtype))  # the shape fits
    mask = torch.ones(parameter.numel(), dtype=torch.bool)
    mask.as_strided(full.shape, strides, 3).fill_(False)
    assert bool((out.view(-1, 1).view(torch.uint8).view(parameter.numel(), -1)[mask] == 0xEE).all())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_shards_that_lie_strided_are_pulled_like_any_other(data: st.DataObject) -> None:
    full, boxes = data.draw(tiled())
    memory = Memory(full, boxes, [data.draw(strides_for(shape)) for _, shape in boxes])
    copy = whole(full, data.draw(chain_for(full)))
    assert torch.equal(pull(memory, copy), replay(full, copy.op_chain))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_bounce_out_of_strided_shards_views_the_right_elements(data: st.DataObject) -> None:
    full, boxes = data.draw(tiled())
    memory = Memory(full, boxes, [data.draw(strides_for(shape)) for _, shape in boxes])
    copy = whole(full, data.draw(chain_for(full)), torch.float64)
    bounce = bounce_copy(copy, memory.source())
    runs = lower_copy(bounce.copy, memory.source(), refuse_small_runs=False)
    segments = [
        PullSegment(r.session, int(s), "p", int(d), int(n))
        for r in runs
        for s, d, n in zip(r.src_addr, r.dst_byte, r.nbytes, strict=True)
    ]
    scratch = memory.execute(segments, bounce.scratch_elements * full.element_size()).view(full.dtype)
    assert torch.equal(bounce.view(scratch), replay(full, copy.op_chain))


def test_a_transposed_shard_is_bounced_in_the_order_it_lies_in() -> None:
    full = torch.arange(64.0 * 128).view(64, 128)
    memory = Memory(full, [((0, 0), (64, 128))], [(1, 64)])
    with pytest.raises(UnsupportedLayoutError, match="8192 runs of 4 bytes"):
        lower_copy(whole(full), memory.source())
    bounce = bounce_copy(whole(full), memory.source())
    assert [runs.nbytes.tolist() for runs in lower_copy(bounce.copy, memory.source())] == [[full.nbytes]]


def test_a_chain_that_looks_at_bits_reads_a_strided_shard_too() -> None:
    full = torch.arange(24, dtype=torch.int32).view(4, 6)
    memory = Memory(full, [((0, 0), (4, 6))], [(9, 1)])
    chain = (("view", (torch.uint8,), ()), ("narrow", (1, 3, 9), ()))
    assert torch.equal(pull(memory, whole(full, chain)), replay(full, chain))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_bounce_reads_exactly_the_needed_elements_and_views_them_right(data: st.DataObject) -> None:
    full, boxes = data.draw(tiled())
    chain = data.draw(chain_for(full))
    memory, copy = Memory(full, boxes), whole(full, chain, torch.float64)
    bounce = bounce_copy(copy, memory.source())
    runs = lower_copy(bounce.copy, memory.source(), refuse_small_runs=False)
    segments = [
        PullSegment(r.session, int(s), "p", int(d), int(n))
        for r in runs
        for s, d, n in zip(r.src_addr, r.dst_byte, r.nbytes, strict=True)
    ]
    scratch = memory.execute(segments, bounce.scratch_elements * full.element_size()).view(full.dtype)
    assert bounce.scratch_elements == replay(full, chain).numel()
    assert torch.equal(bounce.view(scratch), replay(full, chain))


def test_a_reshape_after_a_transpose_goes_through_a_bounce() -> None:
    full = torch.arange(24.0).view(4, 6)
    chain = (("t", (), ()), ("contiguous", (), ()), ("view", (8, 3), ()), ("narrow", (0, 2, 3), ()))
    copy = whole(full, chain)
    with pytest.raises(UnsupportedLayoutError, match="no strided view"):
        lower_copy(copy, Memory(full, [((0, 0), (4, 6))]).source())
    memory = Memory(full, [((0, 0), (2, 6)), ((2, 0), (2, 6))])
    bounce = bounce_copy(copy, memory.source())
    assert torch.equal(bounce.view(pull(memory, bounce.copy).reshape(-1)), replay(full, chain))


def test_moving_one_address_by_one_element_is_noticed() -> None:
    full = torch.arange(32.0).view(8, 4)
    memory = Memory(full, [((0, 0), (4, 4)), ((4, 0), (4, 4))])
    source = memory.source()
    segments = plan_pull(whole(full), global_shape=(8, 4), src_dtype="float32", elsize=4, shards=source.shards)
    moved = [
        PullSegment(s.session, s.src_addr + 4 * (i == 0), "p", s.dst_byte, s.nbytes - 4 * (i == 0))
        for i, s in enumerate(segments)
    ]
    assert torch.equal(memory.execute(segments, 128).view(torch.float32), full.flatten())
    assert not torch.equal(memory.execute(moved, 128).view(torch.float32), full.flatten())


def test_contiguous_pieces_are_one_run_and_columns_one_run_per_row() -> None:
    full = torch.arange(64.0).view(8, 8)
    rows = Memory(full, [((0, 0), (4, 8)), ((4, 0), (4, 8))]).source()
    assert [len(runs.nbytes) for runs in lower_copy(whole(full), rows)] == [1, 1]
    columns = whole(full, (("narrow", (1, 2, 4), ()),))
    assert sum(len(runs.nbytes) for runs in lower_copy(columns, rows)) == 8


def test_a_replica_beside_row_shards_is_read_once() -> None:
    full = torch.arange(32.0).view(8, 4)
    memory = Memory(full, [((0, 0), (4, 4)), ((0, 0), (8, 4)), ((4, 0), (4, 4))])
    runs = lower_copy(whole(full), memory.source())
    assert sum(int(r.nbytes.sum()) for r in runs) == full.nbytes
    assert torch.equal(pull(memory, whole(full)), full)


def test_exact_replicas_collapse_and_the_offset_rotates_among_them() -> None:
    full = torch.arange(8.0)
    tables = Memory(full, [((0,), (8,))] * 3).tables
    for offset in range(4):
        merged = merge_shard_tables(tables, replica_offset=offset)
        assert [shard.agent_name for shard in merged["w"].shards] == [f"rank{offset % 3}"]


def test_a_missing_region_is_refused_in_coordinates() -> None:
    full = torch.arange(32.0).view(8, 4)
    merged = merge_shard_tables(Memory(full, [((0, 0), (4, 4)), ((4, 0), (4, 2))]).tables)
    with pytest.raises(InvalidLayoutError, match=r"'w'.*from \(4, 2\) to \(8, 4\)"):
        check_complete(merged)
    source = build_sources(merged)[0]["w"]
    with pytest.raises(InvalidLayoutError, match=r"w into p: .*\(4, 2\)\.\.\(8, 4\)"):
        lower_copy(whole(full), source)
    top = whole(full, (("narrow", (0, 0, 4), ()),))
    assert sum(int(r.nbytes.sum()) for r in lower_copy(top, source)) == 64, "what is held can be pulled"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_holes_are_found_exactly_when_an_element_is_held_by_nobody(data: st.DataObject) -> None:
    full, boxes = data.draw(tiled())
    kept = data.draw(st.lists(st.sampled_from(boxes), unique=True))
    held = np.zeros(full.shape, dtype=bool)
    for offset, shape in kept:
        held[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))] = True
    merged = merge_shard_tables(
        Memory(full, kept).tables or [[PublishedTensor("w", "uint8", 1, tuple(full.shape), ())]]
    )
    if held.all():
        check_complete(merged)
    else:
        with pytest.raises(InvalidLayoutError, match="hole"):
            check_complete(merged)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"full_shape": (8, 5)}, ["full_shape", "(8, 4)", "(8, 5)"]),
        ({"dtype": "int32"}, ["dtype", "float32", "int32"]),
        ({"elsize": 2}, ["elsize", "4", "2"]),
    ],
)
def test_tables_that_disagree_are_refused_with_both_values(change: dict[str, Any], words: list[str]) -> None:
    good = Memory(torch.zeros(8, 4), [((0, 0), (4, 4)), ((4, 0), (4, 4))]).tables
    bad = [good[0], [PublishedTensor(**{**good[1][0].__dict__, **change})]]
    with pytest.raises(InvalidLayoutError) as refused:
        merge_shard_tables(bad)
    assert all(word in str(refused.value) for word in ["'w'", "rank0", "rank1", *words])


@pytest.mark.parametrize(("offset", "shape"), [((5, 0), (4, 4)), ((-1, 0), (2, 4)), ((0,), (8,)), ((0, 0), (-1, 4))])
def test_a_shard_that_does_not_fit_is_refused(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    table = [PublishedTensor("w", "float32", 4, (8, 4), (PublishedShard("rank0", 0, 0, offset, shape),))]
    with pytest.raises(InvalidLayoutError, match="does not fit"):
        merge_shard_tables([table])


def test_a_rank_without_rows_is_fine() -> None:
    full = torch.arange(8.0)
    memory = Memory(full, [((0,), (8,)), ((8,), (0,))])
    assert torch.equal(pull(memory, whole(full)), full)
    empty = torch.zeros(0, 4)
    assert pull(Memory(empty, [((0, 0), (0, 4))]), whole(empty)).numel() == 0


def test_a_conversion_cannot_land_in_place() -> None:
    full = torch.arange(8.0)
    with pytest.raises(UnsupportedLayoutError, match=r"float32.*bfloat16"):
        lower_copy(whole(full, dtype=torch.bfloat16), Memory(full, [((0,), (8,))]).source())


def test_many_tiny_runs_are_left_to_a_bounce() -> None:
    full = torch.arange(64 * 64).view(64, 64)
    with pytest.raises(UnsupportedLayoutError, match="4096 runs of 8 bytes"):
        lower_copy(whole(full, (("t", (), ()),)), Memory(full, [((0, 0), (64, 64))]).source())


@pytest.mark.parametrize("steps", [(4,), (0, 1), (-4, 1)])
def test_strides_that_are_none_are_refused(steps: tuple[int, ...]) -> None:
    shard = StridedShard("rank0", 0, 0, (0, 0), (2, 4), steps)
    with pytest.raises(InvalidLayoutError, match=r"'w': rank0 publishes .* strides"):
        merge_shard_tables([[PublishedTensor("w", "float32", 4, (8, 4), (shard,))]])


def test_a_plain_shard_carries_no_strides_over_the_wire() -> None:
    plain = ("rank0", 0, 1 << 40, (0, 0), (2, 4))
    assert vars(PublishedShard(*plain)).keys() == {"agent_name", "device_id", "addr", "shard_offset", "shape"}
    assert vars(StridedShard(*plain, (8, 1))).keys() >= {"steps"}
