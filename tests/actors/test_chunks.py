"""However a pull is cut and carried, every byte lands where its run says, out of published memory only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.actors.chunks import SMALLEST_SLOT_BYTES, ChunkDraft, Cutting, cut, slot_bytes, split
from weightsync.actors.landings import RankRuns
from weightsync.protocol.cost_model import LinkCosts, Strategy
from weightsync.protocol.errors import PlanBudgetError

EXTENT = 1 << 17
"""Bytes between the first addresses of two published tensors; each is half of that."""
Run = tuple[int, int, int]


def make_runs(per_tensor: list[list[tuple[int, int]]]) -> tuple[RankRuns, int]:
    """Runs (gap, bytes) one after the other within each tensor; destinations are dense. And the bytes needed."""
    src, dst, nbytes, names = [], [], [], []
    to = 0
    for tensor, parts in enumerate(per_tensor):
        at, end = tensor * EXTENT, tensor * EXTENT + EXTENT // 2
        count = 0
        for gap, length in parts:
            if at + gap + length > end:
                break
            at += gap
            src.append(at)
            dst.append(to)
            nbytes.append(length)
            at, to, count = at + length, to + length, count + 1
        names.append((f"t{tensor}", count))
    arrays = (np.array(column, dtype=np.int64) for column in (src, dst, nbytes))
    return RankRuns(*arrays, tuple(names)), to


def carry(chunk: ChunkDraft, source: np.ndarray, target: np.ndarray) -> None:
    """As the data path does, byte by byte: into a bounce slot and out of it, or straight."""
    runs = chunk.runs
    if chunk.strategy is Strategy.DIRECT:
        for src, dst, n in zip(runs.src_addr, runs.dst_addr, runs.nbytes, strict=True):
            target[dst : dst + n] = source[src : src + n]
        return
    slot = np.full(chunk.bounce_bytes, 255, dtype=np.uint8)
    if chunk.strategy is Strategy.SPAN:
        for src, offset, n in zip(chunk.read_addr, chunk.read_offset, chunk.read_nbytes, strict=True):
            tensor = src // EXTENT
            assert tensor * EXTENT <= src
            assert src + n <= tensor * EXTENT + EXTENT // 2, "a span leaves what was published"
            assert offset + n <= chunk.bounce_bytes
            slot[offset : offset + n] = source[src : src + n]
    else:
        packed = np.concatenate([source[s : s + n] for s, n in zip(runs.src_addr, runs.nbytes, strict=True)])
        slot[: len(packed)] = packed
    for offset, dst, n in zip(chunk.run_offset, runs.dst_addr, runs.nbytes, strict=True):
        target[dst : dst + n] = slot[offset : offset + n]


tensors = st.lists(
    st.lists(st.tuples(st.sampled_from([0, 1, 8, 700, 9000]), st.sampled_from([1, 8, 64, 3000, 40000])), max_size=30),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(
    tensors,
    st.sampled_from(["auto", "direct", "packed", "span"]),
    st.sampled_from([SMALLEST_SLOT_BYTES, 1 << 17, 1 << 24]),
    st.sampled_from([0, 5000, 1 << 20]),
    st.sampled_from([LinkCosts(), LinkCosts(descriptor_s=1e-3), LinkCosts(descriptor_s=1e-7, control_s=1e-9)]),
)
def test_every_byte_lands_once_whatever_the_strategy(
    per_tensor: list[list[tuple[int, int]]], strategy: str, chunk_bytes: int, direct_bytes: int, costs: LinkCosts
) -> None:
    runs, needed = make_runs(per_tensor)
    if not needed:
        return
    source = np.random.default_rng(0).integers(0, 255, len(per_tensor) * EXTENT, dtype=np.uint8)
    extents = {0: np.arange(len(per_tensor), dtype=np.int64) * EXTENT}
    cutting = Cutting(strategy, chunk_bytes, direct_bytes, 2, 3)
    chunks = cut({(0, 0): runs}, {0: costs}, extents, cutting)
    wanted = np.concatenate([source[s : s + n] for s, n in zip(runs.src_addr, runs.nbytes, strict=True)])
    target = np.full(needed, 255, dtype=np.uint8)
    for chunk in chunks:
        carry(chunk, source, target)
        assert sum(count for _, count in chunk.runs.names) == len(chunk.runs.nbytes)
        assert not direct_bytes or chunk.strategy is not Strategy.DIRECT or chunk.runs.nbytes.max() <= direct_bytes
    assert np.array_equal(target, wanted)
    assert sum(int(chunk.runs.nbytes.sum()) for chunk in chunks) == needed  # and none twice
    if strategy != "auto":
        assert {chunk.strategy for chunk in chunks} == {Strategy(strategy)}
    if costs.descriptor_s <= LinkCosts().descriptor_s:  # gaps are far smaller than a slot
        assert all(nbytes <= chunk_bytes for nbytes in slot_bytes(chunks).values())


def test_one_outlier_does_not_size_the_slots() -> None:
    huge = RankRuns(np.array([0]), np.array([0]), np.array([100 << 20]), (("lm_head", 1),))
    cutting = Cutting("packed", 1 << 20, 0)
    chunks = cut({(0, 0): huge}, {0: LinkCosts()}, {0: np.array([0])}, cutting)
    assert slot_bytes(chunks)[0] <= 1 << 20
    assert sum(int(chunk.runs.nbytes.sum()) for chunk in chunks) == 100 << 20


@pytest.mark.parametrize(
    ("run_bytes", "step", "descriptor_s", "expected"),
    [
        (1 << 20, 2 << 20, 6e-6, Strategy.DIRECT),
        (256, 8192, 6e-6, Strategy.PACKED),
        (4096, 4224, 6e-6, Strategy.SPAN),
        (4096, 8192, 1e-8, Strategy.DIRECT),
    ],
)
def test_auto_takes_what_the_costs_say(run_bytes: int, step: int, descriptor_s: float, expected: Strategy) -> None:
    count = (64 << 20) // step
    at = np.arange(count, dtype=np.int64)
    runs = RankRuns(at * step, at * run_bytes, np.full(count, run_bytes), (("w", count),))
    chunks = cut({(0, 0): runs}, {0: LinkCosts(descriptor_s=descriptor_s)}, {0: np.array([0])}, Cutting())
    assert {chunk.strategy for chunk in chunks} == {expected}


def test_packing_must_earn_its_question() -> None:
    at = np.arange(20, dtype=np.int64)
    runs = RankRuns(at * 8192, at * 256, np.full(20, 256), (("w", 20),))
    chunks = cut({(0, 0): runs}, {0: LinkCosts()}, {0: np.array([0])}, Cutting())
    assert Strategy.PACKED not in {chunk.strategy for chunk in chunks}


def test_a_budget_without_room_for_slots_is_told_with_the_number_needed() -> None:
    runs, _ = make_runs([[(8, 64)] * 20])
    tight = Cutting("span", budget_bytes=SMALLEST_SLOT_BYTES)
    with pytest.raises(PlanBudgetError, match=str(2 * SMALLEST_SLOT_BYTES)):
        cut({(0, 0): runs}, {0: LinkCosts()}, {0: np.array([0])}, tight)
    (chunk,) = cut({(0, 0): runs}, {0: LinkCosts()}, {0: np.array([0])}, Cutting(budget_bytes=0))
    assert chunk.strategy is Strategy.DIRECT


def test_a_budget_makes_slots_smaller() -> None:
    runs, _ = make_runs([[(8, 3000)] * 20, [(8, 3000)] * 20, [(8, 3000)] * 20])
    extents = {0: np.arange(3, dtype=np.int64) * EXTENT}
    budget = 2 * SMALLEST_SLOT_BYTES
    chunks = cut({(0, 0): runs}, {0: LinkCosts()}, extents, Cutting("packed", budget_bytes=budget))
    assert 2 * slot_bytes(chunks)[0] <= budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 60))
def test_pieces_are_bounded_and_in_order(lengths: list[int], limit: int) -> None:
    nbytes = np.array(lengths, dtype=np.int64)
    at = np.cumsum(nbytes) - nbytes
    pieces = split(RankRuns(at * 2, at, nbytes, (("w", len(lengths)),)), limit)
    assert all(int(piece.nbytes.sum()) < 2 * limit + 1 for piece in pieces)
    assert all(int(piece.nbytes.max()) <= limit for piece in pieces)
    landed = [b for p in pieces for d, n in zip(p.dst_addr, p.nbytes, strict=True) for b in range(d, d + n)]
    assert landed == list(range(int(nbytes.sum())))
