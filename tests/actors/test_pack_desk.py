"""Packed chunks of live memory: asked for in turn, packed once, and nobody waits for a consumer that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from weightsync.actors.pack_desk import PackDesk, PackPlan
from weightsync.actors.producer import Producer
from weightsync.actors.trainer_packer import TrainerPacker
from weightsync.actors.transport import Transport
from weightsync.protocol.errors import RegistrationError, StaleEpochError, SyncAborted, SyncError


def plan(*chunks: tuple[int, int], slots: int = 2, key: str = "k") -> PackPlan:
    """Chunks of one run each: (address, bytes)."""
    addresses = tuple(np.array([addr], dtype=np.int64) for addr, _ in chunks)
    return PackPlan(key, addresses, tuple(np.array([n], dtype=np.int64) for _, n in chunks), slots)


@pytest.fixture
def producer() -> Producer:
    producer = Producer(stall_timeout_s=5.0, staging_budget_bytes=1000)
    for consumer in (1, 2):
        assert producer.packs.reserve(consumer, plan((0, 8), (8, 8), (16, 8))) is None
    producer.begin_sync(1, {1, 2})
    producer.publish_group(0, {})
    return producer


def later(call: Callable[..., Any], *args: Any) -> Future[Any]:
    return ThreadPoolExecutor(1).submit(call, *args)


def trainer(desk: PackDesk, rounds: list[list[tuple[int, int]]]) -> None:
    packed: dict[tuple[int, int], tuple[int, int]] = {}
    while requests := desk.exchange(1, packed):
        rounds.append(requests)
        packed = {request: (100 * request[0] + request[1], 8) for request in requests}


def test_every_request_gets_its_own_slot_and_the_trainer_goes_when_all_is_freed(producer: Producer) -> None:
    rounds: list[list[tuple[int, int]]] = []
    packing = later(trainer, producer.packs, rounds)
    for seq in range(3):
        for consumer in (1, 2):
            assert producer.packs.request(consumer, seq, 1) == (100 * consumer + seq, 8)
    for consumer in (1, 2):
        assert not packing.done()
        producer.free_group(0, consumer, 1)
    packing.result(5)
    assert sorted(request for requests in rounds for request in requests) == [(c, s) for c in (1, 2) for s in range(3)]


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        ((1, 2, 1), SyncError),  # its slot is that of chunk 0, which was not packed
        ((1, 3, 1), RegistrationError),
        ((3, 0, 1), StaleEpochError),
        ((1, 0, 2), StaleEpochError),
    ],
)
def test_requests_out_of_turn_are_refused(producer: Producer, ask: tuple[int, int, int], error: type) -> None:
    with pytest.raises(error):
        producer.packs.request(*ask)


def test_a_chunk_is_not_packed_twice_in_an_epoch(producer: Producer) -> None:
    packing = later(trainer, producer.packs, [])
    producer.packs.request(1, 0, 1)
    with pytest.raises(SyncError, match="twice"):
        producer.packs.request(1, 0, 1)
    producer.fail("over")
    with pytest.raises(SyncAborted):
        packing.result(5)


def test_eviction_ends_a_request_and_lets_the_trainer_go(producer: Producer) -> None:
    parked = later(producer.packs.request, 1, 0, 1)
    while not producer.snapshot().waits:
        time.sleep(0.001)
    producer.free_group(0, 2, 1)
    producer.evict(1, 1)
    with pytest.raises(StaleEpochError):
        parked.result(5)
    assert producer.packs.exchange(1, {}) in ([], [(1, 0)])  # it may pack for nobody once, and is then let go
    assert producer.packs.exchange(1, {}) == []


def test_slots_over_the_budget_are_refused_with_the_number_and_change_nothing(producer: Producer) -> None:
    assert producer.packs.reserve(3, plan((0, 600), (0, 600))) == 2 * 16 + 2 * 600
    assert set(producer.packs.plans) == {1, 2}
    assert producer.packs.reserve(1, plan((0, 480), (0, 480))) is None  # in place of what it had
    assert producer.packs.reserve(3, plan((0, 600))) == 16 + 960 + 600


class Registered(Transport):
    """What a packer asks of a transport, noted."""

    name = "noted"
    reads_trainer_memory = True
    fetches_slots = True

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def register(self, tensors: Any) -> None:
        self.memory |= {t.data_ptr() for t in tensors}

    def deregister(self, tensors: Any) -> None:
        self.memory -= {t.data_ptr() for t in tensors}

    def metadata(self) -> bytes:
        raise NotImplementedError

    connect = prepare = post = fetch_slot = release = carrier = close = metadata  # type: ignore[assignment]


def bytes_at(addr: int, nbytes: int) -> bytes:
    import ctypes

    return ctypes.string_at(addr, nbytes)


def test_a_packer_fills_slots_with_exactly_the_runs_and_gives_them_back() -> None:
    shard = torch.arange(64, dtype=torch.uint8)
    base = shard.data_ptr()
    transport = Registered()
    packer = TrainerPacker(transport, [shard])
    src = np.array([base + 3, base + 40, base + 8], dtype=np.int64)
    two = PackPlan("a", (src, src[:1]), (np.array([2, 5, 1]), np.array([4])), 1)
    packer.expect({7: two, 8: plan((base, 8))}, {7})
    assert packer.serves({7})
    assert not packer.serves({8})
    assert packer.slot_bytes == 8
    revision, registered = packer.revision, set(transport.memory)
    packed = packer.pack([(7, 0)])
    assert bytes_at(*packed[7, 0]) == bytes([3, 4, 40, 41, 42, 43, 44, 8])
    shard.add_(1)
    packed = packer.pack([(7, 1)])
    assert bytes_at(*packed[7, 1]) == bytes([4, 5, 6, 7])
    packer.expect({7: PackPlan("a", two.src_addr, two.nbytes, 1)}, {7})  # the same plan, as another process sends it
    assert (packer.revision, transport.memory) == (revision, registered)
    packer.expect({7: two}, {8})
    assert transport.memory == set()
    assert packer.revision > revision
    packer.close()


def test_a_packer_packs_nothing_that_was_not_published() -> None:
    shard = torch.zeros(64, dtype=torch.uint8)
    packer = TrainerPacker(Registered(), [shard])
    with pytest.raises(SyncError, match="no memory that was published"):
        packer.expect({7: plan((shard.data_ptr() + 60, 8))}, {7})


def test_many_consumers_and_rounds_lose_no_request() -> None:
    consumers, chunks = range(8), 12
    producer = Producer(stall_timeout_s=10.0)
    for consumer in consumers:
        producer.packs.reserve(consumer, plan(*[(0, 8)] * chunks))
    for epoch in range(1, 30):
        producer.begin_sync(epoch, set(consumers))
        producer.publish_group(0, {})

        def pull(consumer: int, epoch: int = epoch) -> list[tuple[int, int]]:
            found = [producer.packs.request(consumer, seq, epoch) for seq in range(chunks)]
            producer.free_group(0, consumer, epoch)
            return found

        threads = ThreadPoolExecutor(len(consumers))
        pulls = [threads.submit(pull, consumer) for consumer in consumers]
        packed: dict[tuple[int, int], tuple[int, int]] = {}
        while requests := producer.packs.exchange(epoch, packed):
            packed = {request: request for request in requests}
        assert [future.result(5) for future in pulls] == [[(c, s) for s in range(chunks)] for c in consumers]
        threads.shutdown()
    assert threading.active_count() < 50
