"""Gathered groups in shared slots: bit for bit, never aliasing, and free again only when freed everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.actors.export_ring import ExportRing, ShardMirror
from weightsync.actors.interfaces import LocalShard
from weightsync.actors.producer_actor import _unpack
from weightsync.actors.shared_memory import SharedSegment
from weightsync.protocol.dtypes import dtype_name
from weightsync.protocol.errors import SyncError
from weightsync.protocol.messages import TensorMeta


def metas(tensors: dict[str, torch.Tensor]) -> list[TensorMeta]:
    return [TensorMeta(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]


def gathered(seed: int) -> dict[str, torch.Tensor]:
    """Transposed, sliced, scalar and empty tensors of mixed dtypes."""
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(6, 10, generator=generator)
    return {
        "transposed": big.t(),
        "sliced": big[1:5, ::3],
        "half": big[0].to(torch.bfloat16),
        "byte": torch.arange(7, dtype=torch.uint8) + seed,
        "scalar": torch.tensor(seed, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def ring() -> Iterator[ExportRing]:
    made = ExportRing("test", [metas(gathered(0))], num_slots=2)
    yield made
    made.close()


def read(ring: ExportRing, path: str, packed: list[tuple[str, int, tuple[int, ...], str]]) -> dict[str, torch.Tensor]:
    """What a producer sees that maps the segment by name."""
    segment = SharedSegment.attach(next(s.name for s in ring.segments if s.name.path == path))
    return {name: _unpack(segment.memory, rest) for name, *rest in packed}


def test_a_group_is_rebuilt_bit_for_bit_in_another_mapping(ring: ExportRing) -> None:
    tensors = gathered(3)
    seen = read(ring, *ring.fill(0, tensors))
    assert seen.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(seen[name], tensor), name
        assert seen[name].dtype == tensor.dtype
        assert seen[name].numel() == 0 or seen[name].data_ptr() % 16 == 0


def test_resident_groups_never_alias(ring: ExportRing) -> None:
    first, second = ring.fill(0, gathered(1)), ring.fill(1, gathered(2))
    for name, tensor in gathered(1).items():
        assert torch.equal(read(ring, *first)[name], tensor)
    for name, tensor in gathered(2).items():
        assert torch.equal(read(ring, *second)[name], tensor)


def test_without_credit_nothing_is_overwritten(ring: ExportRing) -> None:
    kept = [ring.fill(group, gathered(group)) for group in (0, 1)]
    assert not ring.has_free_slot
    with pytest.raises(SyncError, match="group 2: all 2 export slots hold unfreed groups"):
        ring.fill(2, gathered(2))
    for group in (0, 1):
        assert all(torch.equal(t, read(ring, *kept[group])[n]) for n, t in gathered(group).items())


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_slots_come_back_in_whatever_order_groups_are_freed(data: st.DataObject, slots: int) -> None:
    ring = ExportRing("test", [metas({"w": torch.zeros(4)})], slots)
    try:
        resident: dict[int, tuple[str, list[tuple[str, int, tuple[int, ...], str]]]] = {}
        for group in range(12):
            while not ring.has_free_slot:
                ring.release([data.draw(st.sampled_from(sorted(resident)))])
                resident = {g: kept for g, kept in resident.items() if g in ring.resident_groups}
            resident[group] = ring.fill(group, {"w": torch.full((4,), float(group))})
            assert ring.resident_groups == sorted(resident)
            assert len(resident) <= slots
            for kept_group, kept in resident.items():
                assert read(ring, *kept)["w"].tolist() == [float(kept_group)] * 4
    finally:
        ring.close()


def test_a_group_larger_than_announced_is_refused(ring: ExportRing) -> None:
    with pytest.raises(SyncError, match=r"takes 4000 bytes and was announced with"):
        ring.fill(0, {"w": torch.zeros(1000)})
    assert ring.has_free_slot


def test_nothing_stays_in_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    ring = ExportRing("test", [metas(gathered(0))], 3)
    mirror = ShardMirror("test", [LocalShard("w", (0,), torch.arange(5.0))])
    assert len(set(os.listdir("/dev/shm")) - before) == 4
    ring.close()
    mirror.close()
    assert set(os.listdir("/dev/shm")) == before


def test_a_mirror_holds_what_the_shards_held_at_the_last_refresh() -> None:
    values = torch.arange(5.0)
    shards = [LocalShard("a", (0,), values), LocalShard("b", (0, 0), torch.ones(2, 3, dtype=torch.bfloat16))]
    mirror = ShardMirror("test", shards)
    try:
        for step in range(3):
            values.add_(step)
            mirror.refresh(shards)
            assert torch.equal(mirror.segment.memory[:20].view(torch.float32), values)
            assert bool((mirror.segment.memory[32:44].view(torch.bfloat16) == 1).all())
    finally:
        mirror.close()
