"""The publish/free state of one producer during one epoch: who has freed what, and who waits for it.

One lock, one condition, and a name for every wait. The rule to watch: a group is released exactly once, when
every live consumer has freed it (I3), and the trainer learns of it through one channel only, the list that
`wait_freed` and `end` drain between them. A free signal may arrive before its publish and then counts at the
publish; a signal of another epoch, of a consumer that is not live, or a repeated one is rejected and counted,
never credited (I9).

Every blocking wait goes through `wait_until`, so every wait ends: by its condition, by the epoch's error, by
the next epoch, or by the stall watchdog when nothing moved for `stall_timeout_s` (I10). It holds no tensors;
`on_release` tells the owner to drop what it cached for a group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from weightsync.protocol.errors import StaleEpochError, StallError, SyncAborted, SyncError


class SyncState(StrEnum):
    """Where a ledger stands. IDLE -> OPEN -> (FAILED ->) CLOSED -> OPEN ..."""

    IDLE = "idle"
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class Wait:
    """One blocked caller: what it waits for, and since when (seconds on the ledger's clock)."""

    what: str
    since: float


@dataclass(frozen=True)
class LedgerSnapshot:
    """The state of a ledger at one moment, for status and for the text of a stall."""

    state: SyncState
    epoch: int
    live: tuple[int, ...]
    unfreed: dict[int, tuple[int, ...]]
    """Published, unreleased group -> live consumers that have not freed it."""
    waits: tuple[Wait, ...]
    seconds_since_progress: float


@dataclass(frozen=True)
class LedgerMeasures:
    """What a ledger measured since it was asked last."""

    waits: dict[str, float]
    """Kind -> seconds waited, all waiters together: `credit`, `free_barrier`, `slot`."""
    inflight_groups: int
    """Most groups published and not released at once."""
    rejected_signals: int


class SyncLedger:
    """Publish/free state of one producer.

    Args:
        stall_timeout_s: seconds without any publish, serve, free or begin after which every waiter gets a
            `StallError`.
        on_release: called under the lock with the group, once per release; must be short.
        clock: seconds, monotonic (tests pass their own).
    """

    def __init__(
        self,
        stall_timeout_s: float = 300.0,
        on_release: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if stall_timeout_s <= 0:
            raise ValueError(f"stall_timeout_s must be positive, got {stall_timeout_s}")
        self._stall_timeout_s = stall_timeout_s
        self._on_release = on_release or (lambda group: None)
        self._clock = clock
        self._cond = threading.Condition(threading.RLock())
        self._state = SyncState.IDLE
        self._epoch = 0
        self._error: BaseException | None = None
        self._live: set[int] = set()
        self._freed_by: dict[int, set[int]] = {}
        self._published: set[int] = set()
        self._released: set[int] = set()
        self._notices: list[int] = []
        self._progress_at = clock()
        self._waits: dict[int, Wait] = {}
        self.rejected_signals = 0
        self._waited: dict[str, float] = {}
        self._most_inflight = 0
        self._rejected_told = 0

    # -- one epoch ------------------------------------------------------------------------------------

    def begin(self, epoch: int, live_consumers: Collection[int]) -> None:
        """Open `epoch` for these consumers and forget everything of the one before.

        Raises:
            ValueError: the live set is empty (a barrier of nobody would release groups nobody read).
            StaleEpochError: `epoch` is not above the last one.
        """
        with self._cond:
            live = self.check_begin(epoch, live_consumers)
            for group in self._published - self._released:
                self._on_release(group)
            self._epoch, self._live, self._error = epoch, live, None
            self._freed_by, self._published, self._released = {}, set(), set()
            self._notices = []
            self._state = SyncState.OPEN
            self._moved()

    def check_begin(self, epoch: int, live_consumers: Collection[int]) -> set[int]:
        """The live set, if `begin` would accept it; raises what `begin` raises."""
        live = set(live_consumers)
        if not live:
            raise ValueError(f"epoch {epoch}: the live set is empty; a sync needs at least one consumer")
        if epoch <= self._epoch:
            raise StaleEpochError(f"epoch {epoch} is not above {self._epoch}; epochs strictly increase")
        return live

    def drain(self, done: Callable[[], bool], what: str) -> None:
        """Wait for work that an earlier epoch left under way; only its own end ends it.

        Raises:
            StallError: it did not end within the stall timeout.
        """
        with self._cond:
            if not self._cond.wait_for(done, self._stall_timeout_s):
                raise StallError(f"epoch {self._epoch}: waited {self._stall_timeout_s:g} s for {what}")

    def publish(self, group: int) -> None:
        """Make `group` serveable; releases it at once if every live consumer freed it beforehand."""
        with self._cond:
            self.check_open()
            if group in self._published:
                raise SyncError(f"epoch {self._epoch}: group {group} was published already")
            self._published.add(group)
            self._most_inflight = max(self._most_inflight, len(self._published) - len(self._released))
            self._release_if_done(group)
            self._moved()

    def free(self, group: int, consumer_id: int, epoch: int) -> bool:
        """Count one consumer's free signal; False (and counted) if it is stale, foreign or repeated."""
        with self._cond:
            freed_by = self._freed_by.setdefault(group, set()) if epoch == self._epoch else set()
            accepted = (
                epoch == self._epoch
                and self._state is SyncState.OPEN
                and consumer_id in self._live
                and consumer_id not in freed_by
            )
            if not accepted:
                self.rejected_signals += 1
                return False
            freed_by.add(consumer_id)
            self._release_if_done(group)
            self._moved()
            return True

    def evict(self, consumer_id: int, epoch: int) -> bool:
        """Take a consumer out of the running epoch; barriers recompute without it. False if not live."""
        with self._cond:
            if epoch != self._epoch or self._state is not SyncState.OPEN or consumer_id not in self._live:
                return False
            self._live.discard(consumer_id)
            for group in sorted(self._published - self._released):
                self._release_if_done(group)
            self._moved()
            return True

    def fail(self, error: BaseException) -> None:
        """Give the epoch up: every waiter, now and until the next `begin`, raises `error`."""
        with self._cond:
            if self._error is None:
                self._error = error
                if self._state is SyncState.OPEN:
                    self._state = SyncState.FAILED
            self._cond.notify_all()

    def wait_freed(self) -> list[int]:
        """Block until a group was released that no call returned yet; return those groups in order."""
        with self._cond:
            self.wait_until(
                lambda: bool(self._notices), "a group to be freed by every live consumer", measured_as="credit"
            )
            return self._drain_notices()

    def end(self) -> list[int]:
        """Block until every published group is released; return the notices not yet handed out."""
        with self._cond:
            self.wait_until(
                lambda: self._published <= self._released,
                "every published group to be freed",
                measured_as="free_barrier",
            )
            self._state = SyncState.CLOSED
            self._moved()
            return self._drain_notices()

    # -- waiting --------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The ledger's one lock, for owners whose state must change together with it."""
        with self._cond:
            yield

    def wait_until(
        self,
        done: Callable[[], bool],
        what: str,
        consumer_id: int | None = None,
        measured_as: str | None = None,
    ) -> None:
        """Block until `done()`; the only place in a producer that blocks.

        Args:
            done: evaluated under the lock, after every change.
            what: what is waited for, in words; it stands in the stall error and in status.
            consumer_id: the consumer on whose behalf the caller waits; its eviction ends the wait.
            measured_as: the kind of wait that `take_measures` counts it under.

        Raises:
            StaleEpochError: another epoch began meanwhile, or `consumer_id` was evicted.
            StallError: nothing moved for the stall timeout.
            BaseException: whatever `fail` was called with.
        """
        with self._cond:
            epoch, me = self._epoch, threading.get_ident()
            self._waits[me] = Wait(what, self._clock())
            try:
                while True:
                    self._check_wait(epoch, consumer_id)
                    if done():
                        return
                    remaining = self._progress_at + self._stall_timeout_s - self._clock()
                    if remaining <= 0:
                        self.fail(StallError(self._stall_text()))
                        continue
                    self._cond.wait(min(remaining, 1.0))
            finally:
                since = self._waits.pop(me).since
                if measured_as is not None:
                    self._waited[measured_as] = self._waited.get(measured_as, 0.0) + self._clock() - since

    def touch(self) -> None:
        """Note progress that the ledger does not see itself, such as a slot packed."""
        with self._cond:
            self._moved()

    def check_open(self, epoch: int | None = None, consumer_id: int | None = None) -> None:
        """Raise unless an epoch is open (and is `epoch`, and `consumer_id` is live in it)."""
        with self._cond:
            if epoch is not None and epoch != self._epoch:
                raise StaleEpochError(f"epoch {epoch} is not the running one ({self._epoch})")
            if self._error is not None:
                raise self._error
            if self._state is not SyncState.OPEN:
                raise SyncError(f"no sync is open (last epoch {self._epoch}); call begin_sync first")
            if consumer_id is not None and consumer_id not in self._live:
                raise StaleEpochError(f"consumer {consumer_id} is not live in epoch {self._epoch}")

    # -- reading --------------------------------------------------------------------------------------

    def take_measures(self) -> LedgerMeasures:
        """What was measured since the last call."""
        with self._cond:
            rejected = self.rejected_signals - self._rejected_told
            measures = LedgerMeasures(self._waited, self._most_inflight, rejected)
            self._waited, self._most_inflight, self._rejected_told = {}, 0, self.rejected_signals
            return measures

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def live(self) -> frozenset[int]:
        with self._cond:
            return frozenset(self._live)

    @property
    def inflight_groups(self) -> list[int]:
        """Published and not yet released, ascending."""
        with self._cond:
            return sorted(self._published - self._released)

    @property
    def all_released(self) -> bool:
        """Every published group was freed by every live consumer."""
        with self._cond:
            return bool(self._published) and self._published <= self._released

    @property
    def freed_pending(self) -> list[int]:
        """Released groups whose notice the trainer has not taken yet, in order of release."""
        with self._cond:
            return list(self._notices)

    def snapshot(self) -> LedgerSnapshot:
        with self._cond:
            unfreed = {
                group: tuple(sorted(self._live - self._freed_by.get(group, set())))
                for group in sorted(self._published - self._released)
            }
            return LedgerSnapshot(
                state=self._state,
                epoch=self._epoch,
                live=tuple(sorted(self._live)),
                unfreed=unfreed,
                waits=tuple(self._waits.values()),
                seconds_since_progress=self._clock() - self._progress_at,
            )

    # -- inside, all under the lock -------------------------------------------------------------------

    def _moved(self) -> None:
        self._progress_at = self._clock()
        self._cond.notify_all()

    def _release_if_done(self, group: int) -> None:
        if group not in self._published or group in self._released:
            return
        if self._live <= self._freed_by.get(group, set()):
            self._released.add(group)
            self._notices.append(group)
            self._on_release(group)

    def _drain_notices(self) -> list[int]:
        notices, self._notices = self._notices, []
        return notices

    def _check_wait(self, epoch: int, consumer_id: int | None) -> None:
        if self._epoch != epoch:
            raise StaleEpochError(f"epoch {epoch} was replaced by epoch {self._epoch} while waiting")
        if self._error is not None:
            raise self._error
        if consumer_id is not None and consumer_id not in self._live:
            raise StaleEpochError(f"consumer {consumer_id} was evicted from epoch {epoch} while waiting")

    def _stall_text(self) -> str:
        snap = self.snapshot()
        waiting = "; ".join(f"waiting {self._clock() - w.since:.1f} s for {w.what}" for w in snap.waits)
        unfreed = "; ".join(f"group {group} not freed by consumers {list(who)}" for group, who in snap.unfreed.items())
        return (
            f"epoch {snap.epoch}: no progress for {self._stall_timeout_s:g} s: "
            f"{unfreed or 'no published group is outstanding'} ({waiting or 'nobody waits'})"
        )


__all__ = ["LedgerSnapshot", "SyncAborted", "SyncLedger", "SyncState", "Wait"]
