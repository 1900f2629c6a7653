"""A producer actor in a process of its own: parked calls of any number the settings allow starve nobody."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from weightsync.actors.producer_actor import ProducerOptions, concurrency_groups, serve_pool_threads
from weightsync.actors.shared_memory import SharedSegment
from weightsync.actors.spawn import call, spawn_producer
from weightsync.protocol.errors import RegistrationError, SyncAborted

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
    plan = tuple(((("w", ()),),) * SLOTS)
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

    for packed in ray.get(parked["serve"], timeout=ANSWERS_S):
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
