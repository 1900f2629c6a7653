"""The publish/free ledger: each rule of the sync protocol that one producer's state can hold or break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightsync.protocol.errors import StaleEpochError, StallError, SyncAborted, SyncError
from weightsync.protocol.ledger import SyncLedger, SyncState


def opened(live: set[int] | None = None, epoch: int = 1, stall_timeout_s: float = 5.0) -> SyncLedger:
    ledger = SyncLedger(stall_timeout_s)
    ledger.begin(epoch, live or {0, 1})
    return ledger


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run `work`; its result, or the exception it raised, ends up in the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_a_group_is_released_when_the_last_live_consumer_frees_it() -> None:
    ledger = opened()
    ledger.publish(0)
    assert ledger.free(0, 0, 1)
    assert ledger.inflight_groups == [0]
    assert ledger.free(0, 1, 1)
    assert ledger.inflight_groups == []
    assert ledger.freed_pending == [0]


def test_a_repeated_free_is_counted_and_never_credited() -> None:
    ledger = opened()
    ledger.publish(0)
    assert ledger.free(0, 0, 1)
    assert not ledger.free(0, 0, 1)
    assert ledger.rejected_signals == 1
    assert ledger.inflight_groups == [0], "one consumer's two signals must not stand for two consumers"


def test_a_free_before_the_publish_counts_at_the_publish() -> None:
    ledger = opened()
    ledger.free(3, 0, 1)
    ledger.free(3, 1, 1)
    assert ledger.freed_pending == []
    ledger.publish(3)
    assert ledger.freed_pending == [3]


@pytest.mark.parametrize(("consumer", "epoch"), [(0, 1), (7, 2)], ids=["another epoch", "not live"])
def test_a_foreign_signal_has_no_effect(consumer: int, epoch: int) -> None:
    ledger = opened(epoch=2, live={0})
    ledger.publish(0)
    assert not ledger.free(0, consumer, epoch)
    assert ledger.rejected_signals == 1
    assert ledger.inflight_groups == [0]


def test_nothing_of_the_epoch_before_survives_begin() -> None:
    ledger = opened(live={0})
    ledger.free(5, 0, 1)
    ledger.publish(0)
    ledger.free(0, 0, 1)
    ledger.begin(2, {0})
    assert ledger.freed_pending == []
    ledger.publish(5)
    assert ledger.inflight_groups == [5], "an early free of epoch 1 must not release a group of epoch 2"


def test_an_empty_live_set_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        SyncLedger().begin(1, [])


@pytest.mark.parametrize("epoch", [0, 1])
def test_epochs_strictly_increase(epoch: int) -> None:
    ledger = opened()
    with pytest.raises(StaleEpochError):
        ledger.begin(epoch, {0})


def test_publishing_twice_or_without_an_epoch_is_refused() -> None:
    with pytest.raises(SyncError, match="no sync is open"):
        SyncLedger().publish(0)
    ledger = opened()
    ledger.publish(0)
    with pytest.raises(SyncError, match="already"):
        ledger.publish(0)


def test_every_notice_is_handed_out_once_by_wait_freed_or_end() -> None:
    ledger = opened(live={0})
    for group in range(3):
        ledger.publish(group)
        ledger.free(group, 0, 1)
    assert ledger.wait_freed() == [0, 1, 2]
    ledger.publish(3)
    ledger.free(3, 0, 1)
    assert ledger.end() == [3]
    assert ledger.freed_pending == []


def test_an_eviction_releases_what_only_the_evicted_held_back() -> None:
    ledger = opened(live={0, 1})
    ledger.publish(0)
    ledger.publish(1)
    ledger.free(0, 0, 1)
    thread, outcome = in_thread(ledger.wait_freed)
    assert ledger.evict(1, 1)
    thread.join(2)
    assert outcome == [[0]]
    assert ledger.inflight_groups == [1]
    assert not ledger.free(1, 1, 1), "a straggler that was evicted must not be credited"


def test_fail_reaches_every_waiter_with_that_error() -> None:
    ledger = opened()
    ledger.publish(0)
    waiters = [in_thread(ledger.wait_freed), in_thread(ledger.end)]
    time.sleep(0.05)
    ledger.fail(SyncAborted("rank 3 ran out of memory"))
    for thread, outcome in waiters:
        thread.join(2)
        assert isinstance(outcome[0], SyncAborted)
        assert "rank 3" in str(outcome[0])
    with pytest.raises(SyncAborted):
        ledger.publish(1)


def test_a_new_epoch_ends_the_waits_of_the_old_one() -> None:
    ledger = opened()
    ledger.publish(0)
    thread, outcome = in_thread(ledger.end)
    time.sleep(0.05)
    ledger.begin(2, {0})
    thread.join(2)
    assert isinstance(outcome[0], StaleEpochError)


def test_a_stall_names_who_has_not_freed_what() -> None:
    ledger = opened(live={4, 9}, stall_timeout_s=0.2)
    ledger.publish(7)
    ledger.free(7, 4, 1)
    with pytest.raises(StallError, match=r"group 7 not freed by consumers \[9\]"):
        ledger.end()
    assert ledger.snapshot().state is SyncState.FAILED


def test_slow_progress_never_trips_the_watchdog() -> None:
    ledger = opened(live={0}, stall_timeout_s=0.4)
    for group in range(4):
        ledger.publish(group)
    thread, outcome = in_thread(ledger.end)
    for group in range(4):
        time.sleep(0.2)
        ledger.free(group, 0, 1)
    thread.join(2)
    assert outcome == [[0, 1, 2, 3]]


def test_release_tells_the_owner_once_per_group() -> None:
    released: list[int] = []
    ledger = SyncLedger(on_release=released.append)
    ledger.begin(1, {0, 1})
    ledger.publish(0)
    ledger.publish(1)
    for consumer in (0, 1, 1):
        ledger.free(0, consumer, 1)
    ledger.begin(2, {0})
    assert released == [0, 1], "group 1 was never freed: the next epoch drops it"


def test_many_threads_free_each_group_exactly_once() -> None:
    for _ in range(100):
        released: list[int] = []
        ledger = SyncLedger(on_release=released.append)
        ledger.begin(1, range(4))

        def consume(consumer: int, ledger: SyncLedger = ledger) -> None:
            for group in range(8):
                ledger.free(group, consumer, 1)
                ledger.free(group, consumer, 1)

        threads = [in_thread(lambda c=consumer: consume(c))[0] for consumer in range(4)]
        for group in range(8):
            ledger.publish(group)
        notices = ledger.end()
        for thread in threads:
            thread.join(2)
        assert sorted(released) == list(range(8))
        assert sorted(notices) == list(range(8))


class LedgerMachine(RuleBasedStateMachine):
    """Random interleavings against a model that keeps plain sets and recomputes everything from scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.released_hook: list[int] = []
        self.ledger = SyncLedger(on_release=self.released_hook.append)
        self.epoch = 0
        self.open = False
        self.live: set[int] = set()
        self.published: list[int] = []
        self.frees: set[tuple[int, int]] = set()
        self.rejected = 0
        self.handed_out: list[int] = []

    def expected_released(self) -> set[int]:
        return {g for g in self.published if all((g, c) in self.frees for c in self.live)}

    @rule(live=st.sets(st.integers(0, 3), min_size=1), step=st.integers(1, 2))
    def begin(self, live: set[int], step: int) -> None:
        self.epoch += step
        self.released_hook.clear()
        self.ledger.begin(self.epoch, live)
        self.released_hook.clear()
        self.open, self.live, self.published, self.frees, self.handed_out = True, set(live), [], set(), []

    @precondition(lambda self: self.open)
    @rule(group=st.integers(0, 3))
    def publish(self, group: int) -> None:
        if group in self.published:
            with pytest.raises(SyncError):
                self.ledger.publish(group)
            return
        self.ledger.publish(group)
        self.published.append(group)

    @rule(group=st.integers(0, 3), consumer=st.integers(0, 4), lag=st.integers(0, 1))
    def free(self, group: int, consumer: int, lag: int) -> None:
        credited = self.ledger.free(group, consumer, self.epoch - lag)
        expected = self.open and lag == 0 and consumer in self.live and (group, consumer) not in self.frees
        assert credited == expected
        if expected:
            self.frees.add((group, consumer))
        else:
            self.rejected += 1

    @precondition(lambda self: self.open)
    @rule(consumer=st.integers(0, 4))
    def evict(self, consumer: int) -> None:
        assert self.ledger.evict(consumer, self.epoch) == (consumer in self.live)
        self.live.discard(consumer)

    @precondition(lambda self: self.open)
    @rule()
    def fail(self) -> None:
        self.ledger.fail(SyncAborted("injected"))
        self.open = False

    @precondition(lambda self: self.open and set(self.published) == self.expected_released())
    @rule()
    def end(self) -> None:
        self.handed_out += self.ledger.end()
        assert sorted(self.handed_out) == sorted(self.published)
        self.open = False

    @precondition(lambda self: self.open and len(self.expected_released()) > len(self.handed_out))
    @rule()
    def wait_freed(self) -> None:
        self.handed_out += self.ledger.wait_freed()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.ledger.rejected_signals == self.rejected
        if self.open:
            released = self.expected_released()
            assert set(self.ledger.inflight_groups) == set(self.published) - released
            assert set(self.ledger.freed_pending) == released - set(self.handed_out)
            assert sorted(self.released_hook) == sorted(released)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
