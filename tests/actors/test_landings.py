"""What a lost rank was to give is found elsewhere: exactly its bytes, from ranks that still hold them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.actors.destinations import Destinations
from weightsync.actors.landings import Landings, RankRuns
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.lowering import clip_runs
from weightsync.protocol.messages import InstallMode, LayoutSnapshot, ProducerRegistration, PublishMode, TensorMeta
from weightsync.protocol.shards import PublishedShard, PublishedTensor, StridedShard

Held = tuple[tuple[int, int], torch.Tensor]
"""Rows from..to of a 2-D tensor, and their memory."""


def registration(rank: int, name: str, shape: tuple[int, int], held: Sequence[Held]) -> ProducerRegistration:
    shards = tuple(PublishedShard(f"r{rank}", 0, t.data_ptr(), (start, 0), tuple(t.shape)) for (start, _), t in held)
    table = (PublishedTensor(name, "float32", 4, shape, shards),)
    meta = (TensorMeta(name, "float32", shape),)
    return ProducerRegistration(rank, 99, PublishMode.LIVE, meta, table, (name,), f"r{rank}", b"", "nixl", "n", 1)


def layout(full: torch.Tensor, rows_by_rank: Sequence[tuple[int, int]]) -> tuple[LayoutSnapshot, list[torch.Tensor]]:
    """A model of one tensor, of which rank r holds the rows `rows_by_rank[r]`; and all that memory."""
    parts = [full[start:end].clone() for start, end in rows_by_rank]
    producers = tuple(
        registration(rank, "w", tuple(full.shape), [((start, end), part)])
        for rank, ((start, end), part) in enumerate(zip(rows_by_rank, parts, strict=True))
    )
    meta = producers[0].manifest
    return LayoutSnapshot(1, PublishMode.LIVE, "nixl", ("w",), (1,), meta, producers, (), 1), parts


def landings(snapshot: LayoutSnapshot, target: torch.Tensor, columns: tuple[int, int], consumer: int) -> Landings:
    start, end = columns
    chain = (("narrow", (1, start, end - start), ()),)
    copy = RecordedCopy("w", chain, "p", 0, tuple(target.shape), tuple(target.stride()), torch.float32)
    return Landings(snapshot, [copy], Destinations({"p": target}, [copy], InstallMode.IN_PLACE), consumer)


def carry_out(runs: RankRuns) -> None:
    for src, dst, nbytes in zip(runs.src_addr.tolist(), runs.dst_addr.tolist(), runs.nbytes.tolist(), strict=True):
        ctypes.memmove(dst, src, nbytes)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_lost_ranks_bytes_come_from_others_and_no_other_byte_is_read_again(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    full = torch.arange(float(rows * width)).reshape(rows, width) + 1
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    shards = list(itertools.pairwise(cuts))
    held = data.draw(st.permutations([*shards, *shards, (0, rows)]))  # two replicas, and one that is cut otherwise
    snapshot, _memory = layout(full, held)
    start = data.draw(st.integers(0, width - 1))
    columns = (start, data.draw(st.integers(start + 1, width)))
    target = torch.zeros(rows, columns[1] - columns[0])
    plan = landings(snapshot, target, columns, data.draw(st.integers(0, 3)))
    lost = data.draw(st.sampled_from(sorted({rank for _, rank in plan.runs})))

    for (_, rank), runs in plan.runs.items():
        if rank != lost:
            carry_out(runs)
    before = target.clone()
    found = plan.elsewhere(0, {lost}, plan.runs[0, lost])
    assert lost not in found
    for runs in found.values():
        carry_out(runs)
    assert torch.equal(target, full[:, columns[0] : columns[1]])
    moved = sum(int(runs.nbytes.sum()) for runs in found.values())
    assert moved == 4 * int((before == 0).sum()), "only what was missing moved"
    assert all(sum(n for _, n in runs.names) == len(runs.nbytes) for runs in found.values())


def test_a_lost_transposed_shard_is_replaced_by_a_plain_one_and_the_other_way_round() -> None:
    full = torch.randn(80, 48)
    memory = [full.t().contiguous(), full.clone()]
    shards = (
        StridedShard("r0", 0, memory[0].data_ptr(), (0, 0), (80, 48), (1, 80)),
        PublishedShard("r1", 0, memory[1].data_ptr(), (0, 0), (80, 48)),
    )
    for order in ((0, 1), (1, 0)):
        producers = tuple(
            replace(
                registration(rank, "w", (80, 48), []),
                agent_name=shards[index].agent_name,
                table=(PublishedTensor("w", "float32", 4, (80, 48), (shards[index],)),),
            )
            for rank, index in enumerate(order)
        )
        meta = producers[0].manifest
        snapshot = LayoutSnapshot(1, PublishMode.LIVE, "nixl", ("w",), (1,), meta, producers, (), 1)
        target = torch.zeros(80, 48)
        plan = landings(snapshot, target, (0, 48), 0)
        assert [rank for _, rank in plan.runs] == [0]
        for runs in plan.elsewhere(0, {0}, plan.runs[0, 0]).values():
            assert int(runs.nbytes.sum()) == full.nbytes
            carry_out(runs)
        for scatter in plan.scatters.get(0, ()):
            target.copy_(scatter.result())
        assert torch.equal(target, full)


def test_what_nobody_else_holds_is_named() -> None:
    full = torch.ones(4, 2)
    snapshot, _memory = layout(full, [(0, 2), (2, 4), (0, 2)])
    plan = landings(snapshot, torch.zeros(4, 2), (0, 2), 0)
    assert sum(r.nbytes.sum() for r in plan.elsewhere(0, {0}, plan.runs[0, 0]).values()) == 16
    with pytest.raises(InvalidLayoutError, match="w"):
        plan.elsewhere(0, {1}, plan.runs[0, 1])


@given(st.data())
def test_clipped_runs_are_those_bytes_and_no_others(data: st.DataObject) -> None:
    def stretches(limit: int) -> list[tuple[int, int]]:
        cuts = data.draw(st.lists(st.integers(0, limit), max_size=8, unique=True).map(sorted))
        return data.draw(st.permutations([(a, b) for a, b in itertools.pairwise(cuts)][::2]))

    runs, wanted = stretches(30), stretches(30)
    sources = [1000 * (i + 1) for i in range(len(runs))]
    as_array = lambda values: np.array(values, dtype=np.int64)  # noqa: E731
    src, dst, nbytes = clip_runs(
        as_array(sources),
        as_array([a for a, _ in runs]),
        as_array([b - a for a, b in runs]),
        as_array([a for a, _ in wanted]),
        as_array([b - a for a, b in wanted]),
    )
    got = [
        (d + i, s + i) for s, d, n in zip(src.tolist(), dst.tolist(), nbytes.tolist(), strict=True) for i in range(n)
    ]
    asked = {byte for a, b in wanted for byte in range(a, b)}
    expected = {d: s + d - a for s, (a, b) in zip(sources, runs, strict=True) for d in range(a, b) if d in asked}
    assert got == sorted(expected.items())
    assert all(n > 0 for n in nbytes.tolist())
