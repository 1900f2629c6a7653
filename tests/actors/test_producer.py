"""The producer without Ray: every rule a consumer or a trainer relies on when calling it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from weightsync.actors.producer import Producer
from weightsync.protocol.errors import (
    RegistrationError,
    StaleEpochError,
    StallError,
    SyncAborted,
    SyncError,
    WrongProducerError,
)

NARROW_TOP = (("narrow", (0, 0, 2), ()),)


def opened(live: tuple[int, ...] = (0, 1), **options: object) -> Producer:
    producer = Producer(**{"stall_timeout_s": 5.0, **options})  # type: ignore[arg-type]
    producer.begin_sync(1, live)
    return producer


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def matrix(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_produce_packs_replayed_chains_at_16_byte_offsets() -> None:
    producer = opened()
    a, b = matrix(0, 3, 5), matrix(1, 4).to(torch.bfloat16)
    producer.publish_group(0, {"a": a, "b": b})
    packed = producer.produce([("a", NARROW_TOP), ("b", ())], consumer_id=0, seq=0, epoch=1)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed[:40].view(torch.float32).view(2, 5), a[:2])
    assert torch.equal(packed[48:56].view(torch.bfloat16), b), "40 bytes are followed by padding to 48"


def test_produce_waits_for_the_publish() -> None:
    producer = opened()
    thread, outcome = in_thread(lambda: producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1).clone())
    time.sleep(0.1)
    assert not outcome
    producer.publish_group(0, {"a": torch.arange(4)})
    thread.join(2)
    assert torch.equal(outcome[0].view(torch.int64), torch.arange(4))  # type: ignore[attr-defined]


def test_a_name_this_rank_never_serves_fails_at_once_and_is_named() -> None:
    producer = opened(served_names=["a"])
    with pytest.raises(WrongProducerError, match=r"model\.norm"):
        producer.produce([("model.norm", ())], consumer_id=0, seq=0, epoch=1)
    with pytest.raises(WrongProducerError, match="stray"):
        producer.publish_group(0, {"a": torch.zeros(1), "stray": torch.zeros(1)})
    assert producer.cached_names == set()


@pytest.mark.parametrize(("consumer", "epoch"), [(0, 2), (0, 0), (5, 1)])
def test_a_request_of_another_epoch_or_a_stranger_is_refused(consumer: int, epoch: int) -> None:
    producer = opened()
    producer.publish_group(0, {"a": torch.zeros(1)})
    with pytest.raises(StaleEpochError):
        producer.produce([("a", ())], consumer_id=consumer, seq=0, epoch=epoch)


@pytest.mark.parametrize("seq", [None, -1, True, "0"])
def test_a_request_without_an_issue_index_is_refused(seq: object) -> None:
    producer = opened()
    with pytest.raises(ValueError, match="seq"):
        producer.produce([("a", ())], consumer_id=0, seq=seq, epoch=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("chain", [(("__class__", (), ()),), (("add_", (1,), ()),), (("narrow", (0, 0), ()),), "view"])
def test_only_pure_views_are_replayed(chain: object) -> None:
    producer = opened()
    tensor = torch.ones(4)
    producer.publish_group(0, {"a": tensor})
    with pytest.raises(ValueError):  # noqa: PT011 - any refusal, by any wording
        producer.produce([("a", chain)], consumer_id=0, seq=0, epoch=1)  # type: ignore[list-item]
    assert torch.equal(tensor, torch.ones(4))


def test_slots_go_round_by_issue_index_not_by_execution_order() -> None:
    producer = opened(live=(0,), num_serve_buffers=2)
    producer.publish_group(0, {name: torch.full((4,), float(i)) for i, name in enumerate("abcd")})
    served = [producer.produce([(name, ())], consumer_id=0, seq=seq, epoch=1) for seq, name in enumerate("ab")]
    assert served[0].data_ptr() != served[1].data_ptr()
    assert served[0].view(torch.float32)[0] == 0
    third = producer.produce([("c", ())], consumer_id=0, seq=2, epoch=1)
    assert third.data_ptr() == served[0].data_ptr()
    assert served[1].view(torch.float32)[0] == 1, "slot 1 is not touched by request 2"


def test_serve_slots_of_consumers_do_not_alias_unless_shared() -> None:
    producer = opened()
    producer.publish_group(0, {"a": torch.zeros(8), "b": torch.ones(8)})
    first = producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1)
    second = producer.produce([("b", ())], consumer_id=1, seq=0, epoch=1)
    assert first.data_ptr() != second.data_ptr()
    assert set(producer.serve_rings) == {0, 1}


def test_the_same_worker_of_two_deployments_shares_one_packing() -> None:
    producer = opened(live=(0, 1, 2, 3), workers_per_replica=2)
    source = torch.arange(6.0)
    producer.publish_group(0, {"a": source})
    thread, outcome = in_thread(lambda: producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1))
    time.sleep(0.1)
    assert not outcome, "consumer 0 waits for consumer 2, the same worker of the other deployment"
    mine = producer.produce([("a", ())], consumer_id=2, seq=0, epoch=1)
    thread.join(2)
    assert outcome[0].data_ptr() == mine.data_ptr()  # type: ignore[attr-defined]
    assert torch.equal(mine.view(torch.float32), source)


def test_an_evicted_sharer_does_not_hold_the_others_up() -> None:
    producer = opened(live=(0, 1), workers_per_replica=1)
    producer.publish_group(0, {"a": torch.arange(3)})
    thread, outcome = in_thread(lambda: producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1))
    time.sleep(0.05)
    producer.evict(1, 1)
    thread.join(2)
    assert torch.equal(outcome[0].view(torch.int64), torch.arange(3))  # type: ignore[attr-defined]


def test_a_failed_packing_reaches_every_sharer() -> None:
    producer = opened(live=(0, 1), workers_per_replica=1)
    producer.publish_group(0, {"a": torch.arange(3)})
    bad = [("a", (("narrow", (0, 0, 99), ()),))]
    waiting = [
        in_thread(lambda c=consumer: producer.produce(bad, consumer_id=c, seq=0, epoch=1)) for consumer in (0, 1)
    ]
    for thread, outcome in waiting:
        thread.join(2)
        assert isinstance(outcome[0], Exception)


def test_sharers_with_different_plans_are_refused_at_reservation() -> None:
    producer = Producer(workers_per_replica=1)
    producer.reserve_serve_buffer(0, 64, "digest-a")
    producer.reserve_serve_buffer(1, 64, "digest-a")
    producer.reserve_serve_buffer(2, 64)
    with pytest.raises(RegistrationError, match="consumer 3"):
        producer.reserve_serve_buffer(3, 64, "digest-b")


def test_reservation_is_idempotent_and_allocates_ahead() -> None:
    made: list[torch.Tensor] = []
    producer = Producer(num_serve_buffers=3, on_slot=made.append)
    producer.reserve_serve_buffer(0, 100)
    before = [slot.data_ptr() for slot in producer.serve_rings[0]]
    producer.reserve_serve_buffer(0, 100)
    producer.reserve_serve_buffer(0, 10)
    assert [slot.data_ptr() for slot in producer.serve_rings[0]] == before
    assert len(made) == 3


def test_packed_views_survive_regrowth_of_the_slots() -> None:
    producer = opened(live=(0,), num_serve_buffers=1)
    producer.publish_group(0, {"a": torch.arange(4)})
    producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1)
    producer.reserve_serve_buffer(0, 1 << 16)
    producer.begin_sync(2, (0,))
    producer.publish_group(0, {"a": torch.arange(4) + 10})
    packed = producer.produce([("a", ())], consumer_id=0, seq=0, epoch=2)
    assert torch.equal(packed.view(torch.int64), torch.arange(4) + 10)
    assert packed.data_ptr() == producer.serve_rings[0][0].data_ptr()


def test_asking_twice_for_one_slot_is_refused() -> None:
    producer = opened()
    producer.publish_group(0, {"a": torch.zeros(1)})
    producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1)
    with pytest.raises(SyncError, match="twice"):
        producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1)


def test_a_released_group_is_dropped_and_asking_for_it_fails_at_once() -> None:
    producer = opened(live=(0,))
    producer.publish_group(0, {"a": torch.zeros(1)})
    assert producer.cached_names == {"a"}
    producer.free_group(0, 0, 1)
    assert producer.cached_names == set()
    with pytest.raises(SyncError, match="freed"):
        producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1)


def test_fail_reaches_a_parked_request() -> None:
    producer = opened()
    thread, outcome = in_thread(lambda: producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1))
    time.sleep(0.05)
    producer.fail("gather of group 3 failed on rank 1")
    thread.join(2)
    assert isinstance(outcome[0], SyncAborted)
    assert "rank 1" in str(producer.error)


def test_a_request_nobody_can_satisfy_ends_by_the_watchdog() -> None:
    producer = opened(stall_timeout_s=0.2)
    with pytest.raises(StallError, match="a to be published"):
        producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1)


def test_close_wakes_everybody() -> None:
    producer = opened()
    producer.publish_group(0, {"a": torch.zeros(1)})
    thread, outcome = in_thread(producer.end_sync)
    time.sleep(0.05)
    producer.close()
    thread.join(2)
    assert isinstance(outcome[0], SyncAborted)


@pytest.mark.parametrize("bad", [{"num_serve_buffers": 0}, {"gather_lookahead": -1}, {"stall_timeout_s": 0}])
def test_settings_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Producer(**bad)  # type: ignore[arg-type]


def test_a_slot_is_never_written_by_a_pack_of_an_earlier_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort leaves a pack under way; the next epoch would use the very slot it writes."""
    producer = opened((0,))
    old, new = matrix(0, 4), matrix(1, 4)
    reached, go_on = threading.Event(), threading.Event()

    def slow_replay(tensor: torch.Tensor, chain: object) -> torch.Tensor:
        if torch.equal(tensor, old):
            reached.set()
            go_on.wait(5)
        return tensor

    monkeypatch.setattr("weightsync.actors.producer.replay", slow_replay)
    producer.publish_group(0, {"w": old})
    packing, outcome = in_thread(lambda: producer.produce([("w", ())], consumer_id=0, seq=0, epoch=1))
    assert reached.wait(5)
    producer.fail("the trainer gave up")

    def next_epoch() -> torch.Tensor:
        producer.begin_sync(2, (0,))
        producer.publish_group(0, {"w": new})
        return producer.produce([("w", ())], consumer_id=0, seq=0, epoch=2)

    second, packed = in_thread(next_epoch)
    second.join(0.3)
    assert second.is_alive(), "the next epoch waits for the pack of the old one"
    go_on.set()
    packing.join(5)
    second.join(5)
    assert isinstance(outcome[0], SyncError)
    assert torch.equal(packed[0].view(torch.float32), new)


def test_an_epoch_that_begins_over_an_open_one_ends_its_waits() -> None:
    producer = opened((0,))
    waiting, outcome = in_thread(lambda: producer.produce([("w", ())], consumer_id=0, seq=0, epoch=1))
    while not producer.snapshot().waits:
        pass
    producer.begin_sync(2, (0,))
    waiting.join(5)
    assert isinstance(outcome[0], StaleEpochError)
    with pytest.raises(StaleEpochError):
        producer.begin_sync(2, (0,))
    producer.publish_group(0, {"w": matrix(0, 2)})
    assert producer.inflight_groups == [0], "a refused begin changes nothing"
