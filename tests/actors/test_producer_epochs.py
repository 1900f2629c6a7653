"""Publish, free and sharing over epochs, against the real producer: each rule of the sync protocol by name."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from weightsync.actors.producer import Producer
from weightsync.protocol.errors import RegistrationError, StaleEpochError, SyncAborted, SyncError
from weightsync.protocol.views import replay

ROUNDS = 300


def opened(live: tuple[int, ...] = (0, 1), **options: object) -> Producer:
    producer = Producer(**{"stall_timeout_s": 10.0, **options})  # type: ignore[arg-type]
    producer.begin_sync(1, live)
    return producer


def one(value: int = 0) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(4) + value}


def values(packed: torch.Tensor) -> list[int]:
    return packed.view(torch.int64).tolist()


# -- publish and free ---------------------------------------------------------------------------------


def test_publish_never_blocks_whatever_is_resident() -> None:
    producer = opened(gather_lookahead=0)
    for group in range(50):
        producer.publish_group(group, {f"w{group}": torch.zeros(1)})
    assert producer.inflight_groups == list(range(50))


def test_a_signal_may_precede_its_publish_and_completes_there() -> None:
    producer = opened()
    assert producer.free_group(0, 0, 1)
    assert producer.free_group(0, 1, 1)
    assert producer.freed_pending == []
    producer.publish_group(0, one())
    assert producer.freed_pending == [0]
    assert producer.cached_names == set()


def test_a_repeated_stale_or_foreign_signal_is_rejected_and_counted() -> None:
    producer = opened()
    producer.publish_group(0, one())
    assert producer.free_group(0, 0, 1)
    for consumer, epoch in ((0, 1), (1, 0), (1, 2), (9, 1)):
        assert not producer.free_group(0, consumer, epoch)
    assert producer.rejected_signals == 4
    assert producer.inflight_groups == [0]


def test_a_release_is_told_once_by_wait_freed_or_end_sync() -> None:
    producer = opened(live=(0,))
    for group in range(3):
        producer.publish_group(group, {f"w{group}": torch.zeros(1)})
    producer.free_group(1, 0, 1)
    assert producer.wait_freed() == [1]
    producer.free_group(2, 0, 1)
    producer.free_group(0, 0, 1)
    assert producer.end_sync() == [2, 0]
    assert producer.freed_pending == []


def test_begin_resets_everything_of_the_epoch_before() -> None:
    producer = opened()
    producer.publish_group(0, one())
    producer.free_group(0, 0, 1)
    producer.fail("gather failed")
    assert isinstance(producer.error, SyncAborted)
    producer.begin_sync(2, (0, 1))
    assert producer.error is None
    assert producer.cached_names == set()
    assert producer.inflight_groups == []
    producer.publish_group(0, one())
    assert producer.free_group(0, 1, 2)
    assert producer.inflight_groups == [0], "the signal of epoch 1 does not count"


def test_an_empty_live_set_or_an_old_epoch_is_refused_and_changes_nothing() -> None:
    producer = opened()
    producer.publish_group(0, one())
    with pytest.raises(ValueError, match="live set is empty"):
        producer.begin_sync(2, ())
    with pytest.raises(StaleEpochError, match="epoch 1 is not above 1"):
        producer.begin_sync(1, (0,))
    assert producer.inflight_groups == [0]
    assert values(producer.produce([("a", ())], consumer_id=0, seq=0, epoch=1)) == [0, 1, 2, 3]


def test_an_eviction_recomputes_barriers_and_fences_the_evicted() -> None:
    producer = opened()
    producer.publish_group(0, one())
    producer.free_group(0, 0, 1)
    assert producer.evict(1, 1)
    assert producer.end_sync() == [0]
    assert not producer.free_group(0, 1, 1)
    assert not producer.evict(1, 1)
    assert not producer.evict(0, 7), "of another epoch"


# -- slots --------------------------------------------------------------------------------------------


def test_views_of_a_packed_layout_are_made_once_and_again_after_regrowth() -> None:
    producer = opened(live=(0,), num_serve_buffers=2)
    made = []
    original = producer._slots._packed_views

    def watched(ring: int, slot: int, layout: object) -> list[torch.Tensor]:
        views = original(ring, slot, layout)  # type: ignore[arg-type]
        made.append((slot, id(views)))
        return views

    producer._slots._packed_views = watched  # type: ignore[method-assign,assignment]
    for epoch in range(2, 7):
        producer.begin_sync(epoch, (0,))
        producer.publish_group(0, one(epoch))
        for seq in (0, 1):
            packed = producer.produce([("a", ())], consumer_id=0, seq=seq, epoch=epoch)
            assert values(packed) == [epoch, epoch + 1, epoch + 2, epoch + 3]
    assert len(set(made)) == 2, "one list for each slot, over all epochs"
    producer.reserve_serve_buffer(0, 1 << 12)
    producer.begin_sync(7, (0,))
    producer.publish_group(0, one(7))
    assert values(producer.produce([("a", ())], consumer_id=0, seq=0, epoch=7)) == [7, 8, 9, 10]
    assert producer.serve_rings[0][0].numel() >= 1 << 12


def test_a_missing_digest_skips_the_check_and_width_0_shares_nothing() -> None:
    sharing = Producer(workers_per_replica=1)
    sharing.reserve_serve_buffer(0, 64)
    sharing.reserve_serve_buffer(1, 64, "digest-a")
    sharing.reserve_serve_buffer(2, 64)
    with pytest.raises(RegistrationError, match="consumer 3"):
        sharing.reserve_serve_buffer(3, 64, "digest-b")
    alone = Producer(workers_per_replica=0)
    alone.reserve_serve_buffer(0, 64, "digest-a")
    alone.reserve_serve_buffer(1, 64, "digest-b")
    assert set(alone.serve_rings) == {0, 1}


def test_a_degraded_sync_waits_for_its_live_sharers_only() -> None:
    producer = opened(live=(0, 2), workers_per_replica=1)
    producer.publish_group(0, one())
    producer.begin_sync(2, (2,))
    producer.publish_group(0, one(5))
    assert values(producer.produce([("a", ())], consumer_id=2, seq=0, epoch=2)) == [5, 6, 7, 8]


def test_sharers_pack_once_for_all_whatever_the_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    packs: list[int] = []
    monkeypatch.setattr(
        "weightsync.actors.producer.replay", lambda tensor, chain: packs.append(1) or replay(tensor, chain)
    )
    sharers, chance = (0, 1, 2), random.Random(1)
    producer = Producer(workers_per_replica=1, stall_timeout_s=10.0)
    for epoch in range(1, ROUNDS + 1):
        packs.clear()
        absent = chance.choice((None, None, *sharers))
        producer.begin_sync(epoch, sharers)
        got: dict[int, list[int]] = {}

        def ask(consumer: int, epoch: int = epoch, got: dict[int, list[int]] = got) -> None:
            got[consumer] = values(producer.produce([("a", ())], consumer_id=consumer, seq=0, epoch=epoch))

        threads = [threading.Thread(target=ask, args=(c,)) for c in sharers if c != absent]
        chance.shuffle(threads)
        for thread in threads:
            thread.start()
        producer.publish_group(0, one(epoch))
        if absent is not None:
            producer.evict(absent, epoch)
        for thread in threads:
            thread.join(10)
        expected = [epoch, epoch + 1, epoch + 2, epoch + 3]
        assert got == {c: expected for c in sharers if c != absent}
        assert len(packs) == 1


# -- many threads -------------------------------------------------------------------------------------


def test_hundreds_of_rounds_of_serving_freeing_and_faults_end_and_never_serve_another_epochs_bytes() -> None:
    """Consumers pull and free from threads while the trainer publishes, and some rounds fail or lose a consumer."""
    consumers, groups, chance = (0, 1, 2), 4, random.Random(5)
    producer = Producer(num_serve_buffers=2, stall_timeout_s=10.0)
    for epoch in range(1, ROUNDS + 1):
        producer.begin_sync(epoch, consumers)
        fault = chance.choice(("none", "none", "fail", "evict"))
        wrong: list[object] = []

        def pull(consumer: int, epoch: int = epoch, fault: str = fault, wrong: list[object] = wrong) -> None:
            try:
                for seq in range(groups):
                    packed = producer.produce([(f"w{seq}", ())], consumer_id=consumer, seq=seq, epoch=epoch)
                    if values(packed) != [1000 * epoch + seq] * 3:
                        wrong.append((epoch, consumer, seq, values(packed)))
                    producer.free_group(seq, consumer, epoch)
            except (SyncError, StaleEpochError) as error:
                if fault == "none":
                    wrong.append(error)

        threads = [threading.Thread(target=pull, args=(c,)) for c in consumers]
        for thread in threads:
            thread.start()
        try:
            for group in range(groups):
                producer.publish_group(group, {f"w{group}": torch.full((3,), 1000 * epoch + group)})
                if group == 1 and fault == "fail":
                    producer.fail("the trainer raised")
                if group == 1 and fault == "evict":
                    producer.evict(2, epoch)
            released = producer.end_sync()
            assert sorted(released) == list(range(groups))
            assert fault != "fail"
        except SyncAborted:
            assert fault == "fail"
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert wrong == []
