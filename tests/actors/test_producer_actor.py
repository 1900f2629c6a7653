"""A producer actor in a process of its own: parked calls of any number the settings allow starve nobody."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from weightsync.actors.producer_actor import ProducerOptions, SlotRequest, concurrency_groups, serve_pool_threads
from weightsync.actors.shared_memory import SharedSegment
from weightsync.actors.spawn import call, spawn_producer
from weightsync.protocol.errors import RegistrationError, StaleEpochError, SyncAborted, SyncError

CONSUMERS, SLOTS = 3, 2
ANSWERS_S = 10.0
"""A control call takes milliseconds; a starved one waits for ever."""


@pytest.fixture
def producer(cluster: None) -> Iterator[Any]:
    options = ProducerOptions(
        agent_name=f"t{secrets.token_hex(3)}",
        transport="object_store",
        served_names=("w",),
        num_serve_buffers=SLOTS,
        gather_lookahead=1,
        stall_timeout_s=60.0,
    )
    actor = spawn_producer("pools", 0, secrets.token_hex(3), options, CONSUMERS)
    yield actor
    ray.kill(actor)


def _begin(producer: Any) -> None:
    plan = [SlotRequest((("w", ()),), ((0, 16),))] * SLOTS
    for consumer in range(CONSUMERS):
        call(producer.reserve.remote(consumer, 16, "same", plan), ANSWERS_S)
    call(producer.begin_sync.remote(1, list(range(CONSUMERS))), ANSWERS_S)


def _park_all_that_may(producer: Any) -> dict[str, list[Any]]:
    """Every call that can be under way at once before anything is published."""
    _begin(producer)
    return {
        "serve": [producer.serve.remote(c, seq, 1) for c in range(CONSUMERS) for seq in range(SLOTS)],
        "trainer": [producer.wait_freed.remote()],
        "watch": [producer.watch.remote()],
    }


def test_control_calls_pass_while_every_pull_the_settings_allow_is_parked(producer: Any) -> None:
    parked = _park_all_that_may(producer)
    everything = [ref for refs in parked.values() for ref in refs]
    assert len(parked["serve"]) == serve_pool_threads(CONSUMERS, SLOTS)
    done, _ = ray.wait(everything, num_returns=1, timeout=2)
    assert done == []

    assert call(producer.snapshot.remote(), ANSWERS_S).epoch == 1
    values = torch.arange(4, dtype=torch.float32)
    segment = SharedSegment.create("pools", values.nbytes)
    try:
        segment.memory.copy_(values.view(torch.uint8))
        call(producer.map_segment.remote(segment.name), ANSWERS_S)
    finally:
        segment.unlink()
    call(producer.publish_packed.remote(0, segment.name.path, [("w", 0, (4,), "float32")]), ANSWERS_S)

    for packed, _ in ray.get(parked["serve"], timeout=ANSWERS_S):
        assert bytes(packed) == values.numpy().tobytes()
    for consumer in range(CONSUMERS):
        call(producer.free_groups.remote([0], consumer, 1), ANSWERS_S)
    assert ray.get(parked["trainer"], timeout=ANSWERS_S) == [[0]]


def test_an_abort_passes_them_too_and_frees_all(producer: Any) -> None:
    parked = _park_all_that_may(producer)
    call(producer.fail.remote("the trainer died"), ANSWERS_S)
    for ref in parked["serve"] + parked["trainer"]:
        with pytest.raises(SyncAborted, match="the trainer died"):
            call(ref, ANSWERS_S)
    call(producer.close.remote(), ANSWERS_S)
    assert ray.get(parked["watch"], timeout=ANSWERS_S) == [None]


def _publish(producer: Any, group: int, name: str) -> None:
    call(producer.publish_packed.remote(group, _SEGMENTS[id(producer)].name.path, [(name, 0, (4,), "float32")]))


_SEGMENTS: dict[int, SharedSegment] = {}


@pytest.fixture
def published(producer: Any) -> Iterator[Any]:
    """A producer with the values 0..3 of "w" mapped, ready to be published."""
    segment = SharedSegment.create("lifecycle", 16)
    segment.memory.copy_(torch.arange(4, dtype=torch.float32).view(torch.uint8))
    call(producer.map_segment.remote(segment.name), ANSWERS_S)
    segment.unlink()
    _SEGMENTS[id(producer)] = segment
    yield producer
    del _SEGMENTS[id(producer)]


def test_a_group_is_released_once_by_every_live_consumer_and_by_nothing_else(published: Any) -> None:
    _begin(published)
    call(published.free_groups.remote([0], 0, 1), ANSWERS_S)  # before its publish: counts at the publish
    _publish(published, 0, "w")
    freed = published.wait_freed.remote()
    call(published.free_groups.remote([0], 1, 1), ANSWERS_S)
    for duplicate_stale_foreign in ((0, 1), (1, 1), (2, 0), (2, 2), (7, 1)):
        call(published.free_groups.remote([0], *duplicate_stale_foreign), ANSWERS_S)
    assert ray.wait([freed], timeout=0.5)[0] == []
    assert call(published.snapshot.remote(), ANSWERS_S).unfreed == {0: (2,)}
    call(published.free_groups.remote([0], 2, 1), ANSWERS_S)
    assert call(freed, ANSWERS_S) == [0]
    assert call(published.end_sync.remote(), ANSWERS_S)[0] == [], "no second notice"


def test_an_evicted_consumer_holds_nobody_up_and_is_fenced(published: Any) -> None:
    _begin(published)
    _publish(published, 0, "w")
    for consumer in (0, 1):
        call(published.free_groups.remote([0], consumer, 1), ANSWERS_S)
    freed = published.wait_freed.remote()
    assert ray.wait([freed], timeout=0.5)[0] == []
    assert call(published.evict.remote(2, 1), ANSWERS_S)
    assert call(freed, ANSWERS_S) == [0]
    with pytest.raises(StaleEpochError, match="consumer 2 is not live in epoch 1"):
        call(published.serve.remote(2, 0, 1), ANSWERS_S)
    assert not call(published.evict.remote(2, 1), ANSWERS_S), "once"
    assert call(published.end_sync.remote(), ANSWERS_S)[0] == []


def test_nothing_of_an_epoch_reaches_into_the_next(published: Any) -> None:
    _begin(published)
    _publish(published, 0, "w")
    call(published.free_groups.remote([0], 0, 1), ANSWERS_S)
    parked = published.end_sync.remote()
    deadline = time.monotonic() + ANSWERS_S
    while not call(published.snapshot.remote(), ANSWERS_S).waits:  # calls of different pools overtake each other
        assert time.monotonic() < deadline
    call(published.begin_sync.remote(2, [0, 1]), ANSWERS_S)
    with pytest.raises(StaleEpochError, match="epoch 1 was replaced by epoch 2"):
        call(parked, ANSWERS_S)
    with pytest.raises(StaleEpochError, match="epoch 1 is not the running one"):
        call(published.serve.remote(0, 0, 1), ANSWERS_S)
    call(published.free_groups.remote([0], 0, 1), ANSWERS_S)
    assert call(published.snapshot.remote(), ANSWERS_S).unfreed == {}
    _publish(published, 0, "w")
    assert call(published.snapshot.remote(), ANSWERS_S).unfreed == {0: (0, 1)}
    with pytest.raises(StaleEpochError, match="epoch 2 is not above 2"):
        call(published.begin_sync.remote(2, [0]), ANSWERS_S)
    with pytest.raises(ValueError, match="the live set is empty"):
        call(published.begin_sync.remote(3, []), ANSWERS_S)


def test_hundreds_of_epochs_end_by_success_abort_or_eviction_and_none_hangs(published: Any) -> None:
    chance = random.Random(3)
    _begin(published)
    for epoch in range(2, 202):
        call(published.begin_sync.remote(epoch, list(range(CONSUMERS))), ANSWERS_S)
        ended_by = chance.choice(["free", "evict", "fail"])
        served = [published.serve.remote(c, 0, epoch) for c in range(CONSUMERS)]
        steps = [published.free_groups.remote([0], c, epoch) for c in range(CONSUMERS - 1)]
        _publish(published, 0, "w")
        ended = published.end_sync.remote()
        ray.get(steps, timeout=ANSWERS_S)
        last = CONSUMERS - 1
        if ended_by == "fail":
            call(published.fail.remote(f"epoch {epoch} failed"), ANSWERS_S)
            with pytest.raises(SyncAborted, match=f"epoch {epoch} failed"):
                call(ended, ANSWERS_S)
            ray.wait(served, num_returns=CONSUMERS, timeout=ANSWERS_S)
            continue
        packed, _ = call(served[0], ANSWERS_S)
        assert bytes(packed) == torch.arange(4, dtype=torch.float32).numpy().tobytes()
        if ended_by == "evict":
            call(published.evict.remote(last, epoch), ANSWERS_S)
        else:
            call(published.free_groups.remote([0], last, epoch), ANSWERS_S)
        freed, measures = call(ended, ANSWERS_S)
        assert freed == [0]
        assert measures.inflight_groups == 1
        assert measures.waits["free_barrier"] > 0


def test_digests_are_waited_for_and_belong_to_one_epoch(producer: Any) -> None:
    _begin(producer)
    asked = producer.digests.remote(0, 1)
    assert ray.wait([asked], timeout=0.5)[0] == []
    call(producer.post_digests.remote(1, {0: [[5, -1]]}), ANSWERS_S)
    assert call(asked, ANSWERS_S) == [[5, -1]]
    with pytest.raises(SyncError, match="there are no digests for consumer 1"):
        call(producer.digests.remote(1, 1), ANSWERS_S)
    call(producer.begin_sync.remote(2, [0]), ANSWERS_S)
    with pytest.raises(StaleEpochError, match="epoch 1 is not the running one"):
        call(producer.post_digests.remote(1, {0: [[5, -1]]}), ANSWERS_S)
    parked = producer.digests.remote(0, 2)
    call(producer.fail.remote("the trainer died"), ANSWERS_S)
    with pytest.raises(SyncAborted, match="the trainer died"):
        call(parked, ANSWERS_S)


def test_requests_outside_the_reserved_plan_are_refused(producer: Any) -> None:
    _begin(producer)
    with pytest.raises(RegistrationError, match="consumer 0 has no request 2 reserved"):
        call(producer.serve.remote(0, SLOTS, 1), ANSWERS_S)
    with pytest.raises(RegistrationError, match="consumer 9 has no request 0 reserved"):
        call(producer.serve.remote(9, 0, 1), ANSWERS_S)


def test_the_bound_grows_with_consumers_and_slots() -> None:
    for consumers in (1, 7, 64):
        for slots in (1, 2, 3):
            assert concurrency_groups(consumers, slots)["serve"] >= consumers * slots
