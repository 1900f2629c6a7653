"""The versions of a service: trainer ranks meet, an epoch opens, members finish or drop out, and it ends.

The part of the registry that decides. The thing to watch: an epoch ends in `settle` (everybody has finished) or in
`abort`, and whatever makes either possible must call it: a finished part, an evicted worker, a lost rank, the guard.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from weightsync.actors.attribution import ask_ledgers, explain_consumer, explain_epoch, who_holds_others_up
from weightsync.actors.chronicle import Chronicle
from weightsync.actors.epochs import Epoch
from weightsync.actors.gathering import Gathering, check_version
from weightsync.actors.membership import ConsumerTable, ProducerTable
from weightsync.actors.options import RegistryOptions
from weightsync.actors.parking import Parking
from weightsync.protocol.errors import (
    StaleEpochError,
    StallError,
    SyncAborted,
    SyncError,
    VersionError,
    WeightsyncError,
)
from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import (
    EpochState,
    LayoutSnapshot,
)
from weightsync.protocol.status import (
    EpochStatus,
    EventKind,
    SyncReport,
)

RECOVERY_S = 1.0
"""After a restart, workers get this long to be members again before a publish opens without them; they notice at
once and retry every 0.2 s."""
_PATIENCE = 0.8
"""Of the stall timeout, after which the registry evicts a member that does not move; the producers' own watchdogs
fire after all of it and give the whole sync up, so they must come second."""


class Syncs:
    """Gatherings and epochs of one service, one after the other.

    Args:
        options: how the service is set up.
        parked: where calls wait for what happens here.
        chronicle: is told what happens.
    """

    def __init__(self, options: RegistryOptions, parked: Parking, chronicle: Chronicle) -> None:
        self.options = options
        self.producers = ProducerTable()
        self.consumers = ConsumerTable(options.max_consumers)
        self.epoch: Epoch | None = None
        self.epoch_number = 0
        self.newest_version: int | None = None
        self.gathering: Gathering | None = None
        self.parked = parked
        self.chronicle = chronicle
        self.paused: str | None = None
        """Why an operator lets no version open."""
        self.syncs_committed = 0
        self.syncs_aborted = 0
        self.last_report: SyncReport | None = None
        self.last_error: str | None = None
        self.last_error_at: float | None = None
        """Seconds since 1970."""
        self.recovered_at = 0.0

    async def why(self) -> list[str]:
        """Who waits for whom now, one line for each member that holds a sync up; empty if none runs."""
        epoch, gathering = self.epoch, self.gathering
        if epoch is not None and epoch.open:
            partners = {} if epoch.one_sided else self.producers.members
            ledgers = await ask_ledgers({rank: member.actor for rank, member in partners.items()})
            return explain_epoch(epoch, self.consumers.members, ledgers, time.monotonic())
        if gathering is None:
            return []
        missing = self.missing(gathering)
        if self.paused is not None and not missing:
            return [f"version {gathering.version} waits for {self.why_paused()}"]
        if missing or self.producers.layout is None:
            return [
                f"trainer ranks {sorted(gathering.ranks)} want to publish version {gathering.version} and wait for "
                f"ranks {missing or self.producers.missing_ranks}"
            ]
        return [f"version {gathering.version} waits for {self.consumers_wanted()}"]

    def join_gathering(self, rank: int, version: int) -> Gathering:
        check_version(rank, version, self.newest_version)
        if self.gathering is None:
            self.gathering = Gathering(version)
        gathering = self.gathering
        try:
            gathering.join(rank, version)
        except VersionError:
            self.gathering = None
            self.parked.notify()
            raise
        return gathering

    def missing(self, gathering: Gathering) -> list[int]:
        return [rank for rank in range(self.producers.world_size or 0) if rank not in gathering.ranks]

    def all_arrived(self, gathering: Gathering) -> bool:
        return self.producers.layout is not None and not self.missing(gathering)

    async def open(self, gathering: Gathering, deadline: float) -> None:
        """Pick the live consumers and open the epoch on every producer."""
        await self._wait_for_consumers(deadline)
        started = time.monotonic()
        live = {c.consumer_id: c.worker for c in self.consumers.members.values() if c.planned}
        self.epoch_number += 1
        one_sided = not any(self.consumers.members[consumer].facts.needs_producers for consumer in live)
        epoch = Epoch(self.epoch_number, gathering.version, self._layout(), live, one_sided, opened_at=started)
        try:
            await asyncio.gather(
                *(actor.begin_sync.remote(epoch.epoch, tuple(live)) for actor in self._partners(epoch))
            )
        except Exception as error:
            raise SyncAborted(f"a producer could not open epoch {epoch.epoch}: {error}") from error
        if not epoch.ranks <= self.producers.members.keys():
            gone = sorted(epoch.ranks - self.producers.members.keys())
            raise SyncAborted(f"trainer ranks {gone} died while epoch {epoch.epoch} was opened")
        epoch.begin_seconds = time.monotonic() - started
        self.epoch, self.gathering, gathering.opened = epoch, None, epoch
        self.parked.run(self._guard(epoch))
        self.chronicle.opened(epoch)

    async def _wait_for_consumers(self, deadline: float) -> None:
        """At least `min_consumers` that can pull; those still planning get `join_grace_s` to finish."""
        if time.monotonic() < self.recovered_at:
            await asyncio.sleep(self.recovered_at - time.monotonic())

        def planning() -> list[str]:
            return self.consumers.planning(self.producers.generation)

        grace = min(deadline, time.monotonic() + self.options.join_grace_s)
        try:
            await self.parked.until(lambda: not planning(), grace, lambda: f"workers {planning()} to plan")
        except StallError as error:
            self.note_error(error)
        await self.parked.until(
            lambda: self.consumers.able >= self.options.min_consumers, deadline, self.consumers_wanted
        )

    def consumers_wanted(self) -> str:
        failed = self.consumers.failures()
        return f"{self.options.min_consumers} inference worker(s) to join; {self.consumers.able} can pull now" + (
            f" ({'; '.join(failed)})" if failed else ""
        )

    def note_error(self, error: object) -> None:
        """Kept until the next one, with its time: whoever reads it must see whether a version came after it."""
        self.last_error, self.last_error_at = str(error), time.time()

    def give_up(self, gathering: Gathering, error: WeightsyncError) -> None:
        if not gathering.decided:
            gathering.error = error
            self.note_error(error)
        if self.gathering is gathering:
            self.gathering = None
        self.parked.notify()

    def end_gathering(self, why: str) -> None:
        """Ranks that wait for others to publish hear why it will not come to that; an epoch that opens goes on."""
        if self.gathering is not None and not self.gathering.opening:
            self.gathering.error = SyncAborted(why)
            self.gathering = None
        self.parked.notify()

    def settle(self) -> None:
        """Commit the running epoch if everybody has finished."""
        epoch = self.epoch
        if epoch is not None and epoch.open and epoch.complete:
            epoch.close(EpochState.COMMITTED)
            self.newest_version = epoch.version
            self.syncs_committed += 1
            self.last_report = epoch.report(self.options.service)
            for consumer_id in epoch.live:
                self.consumers.members[consumer_id].staged_version = epoch.version
            self._account(epoch)
            self.chronicle.committed(epoch, self.last_report)

    def _account(self, epoch: Epoch) -> None:
        """What each rank did in a committed epoch."""
        for consumer_id in epoch.pulled:
            for rank, nbytes in self.consumers.members[consumer_id].facts.bytes_by_rank.items():
                if rank in self.producers.members:
                    self.producers.members[rank].served_bytes += nbytes
        for rank, stats in epoch.rank_stats.items():
            if epoch.one_sided:  # the barrier is here, not at the rank's producer
                stats = replace(stats, waits={"free_barrier": epoch.seconds - epoch.begin_seconds})
            self.chronicle.meters.rank_ended(stats)
            if rank in self.producers.members:
                self.producers.members[rank].stats = stats
                self.producers.members[rank].rejected_signals += stats.rejected_signals

    def evict(self, consumer_id: int, fault: Fault, reason: str) -> None:
        """Take a consumer out of the running epoch; the last one to go aborts it."""
        epoch = self.epoch
        if epoch is None or not epoch.open or not epoch.evict(consumer_id, reason):
            return
        self.chronicle.evicted(epoch, self.consumers.members[consumer_id].worker, fault, reason)
        if not epoch.live:
            self.abort(Fault.NOBODY_LEFT, "; ".join(f"worker {w}: {why}" for w, why in epoch.evicted.items()))
            return
        for actor in self._partners(epoch):
            actor.evict.remote(consumer_id, epoch.epoch)
        self.settle()

    def abort(self, fault: Fault, reason: str) -> None:
        epoch = self.epoch
        if epoch is None or not epoch.open:
            return
        epoch.close(EpochState.ABORTED, reason)
        self.syncs_aborted += 1
        self.note_error(self.aborted_text(epoch))
        for actor in self._partners(epoch):
            actor.fail.remote(self.aborted_text(epoch))
        self.chronicle.aborted(epoch, fault)

    def drop_producer(self, rank: int, why: str) -> None:
        """A rank is gone. A running epoch goes on if nobody needs it any more, or others hold what it held."""
        epoch, lost = self.epoch, self.producers.members[rank].registration.describe_held()
        if epoch is not None and epoch.open and rank in epoch.ranks:
            freed = rank in epoch.ended and not epoch.one_sided
            dispensable = freed or self.producers.replaceable(rank)
            self.producers.remove(rank)
            if dispensable:
                epoch.lose(rank, why)
                self.settle()
            else:
                self.abort(Fault.RANK_LOST, f"trainer rank {rank}: {why}, and with it {lost}")
        else:
            self.producers.remove(rank)
        self.end_gathering(f"trainer rank {rank}: {why}")
        member = f"trainer rank {rank}"
        self.chronicle.note(
            EventKind.LEFT, f"{member} is no member any more: {why}", member=member, fault=Fault.RANK_LOST
        )

    async def _guard(self, epoch: Epoch) -> None:
        """The stall watchdog of one epoch: whoever holds up others that move is evicted; if nothing moves, it aborts.

        Producers have one too, of the whole timeout, and cannot see one-sided reads: they are told that bytes move.
        """
        patience_s = _PATIENCE * self.options.stall_timeout_s
        told_at = epoch.opened_at
        while epoch.open:
            await asyncio.sleep(min(1.0, patience_s / 10))
            now, outstanding = time.monotonic(), [c for c in epoch.live if c not in epoch.pulled]
            moved_at = {c: max(self.consumers.members[c].moved_at, epoch.opened_at) for c in outstanding}
            if max(moved_at.values(), default=0.0) > told_at and now - told_at > patience_s / 4:
                told_at = now
                for actor in self._partners(epoch):
                    actor.touch.remote(epoch.epoch)
            holding_up = who_holds_others_up(moved_at, len(outstanding) < len(epoch.live), now, patience_s)
            for consumer in [self.consumers.members[c] for c in holding_up]:
                self.evict(consumer.consumer_id, Fault.STALLED, f"it stalled: {explain_consumer(consumer, now)}")
            if not holding_up and now - max(moved_at.values(), default=epoch.moved_at) > patience_s:
                self.abort(Fault.STALLED, f"nothing moved for {patience_s:g} s: {'; '.join(await self.why())}")

    def _partners(self, epoch: Epoch) -> list[Any]:
        """Producer actors that take part in an epoch."""
        return [] if epoch.one_sided else [member.actor for member in self.producers.members.values()]

    def _layout(self) -> LayoutSnapshot:
        layout = self.producers.layout
        if layout is None:
            raise SyncError(f"trainer ranks {self.producers.missing_ranks} are not registered")
        return layout

    def running(self, epoch: int) -> Epoch:
        if self.epoch is None or self.epoch.epoch != epoch:
            raise StaleEpochError(f"epoch {epoch} is not the newest one ({self.epoch_number})")
        return self.epoch

    @staticmethod
    def aborted_text(epoch: Epoch) -> str:
        return f"version {epoch.version} (epoch {epoch.epoch}) was aborted: {epoch.error}"

    def status(self) -> EpochStatus | None:
        epoch = self.epoch
        return epoch.status(self.consumers.members) if epoch is not None and epoch.open else None

    def why_paused(self) -> str:
        return (
            f"an operator to resume publishing, which is paused: {self.paused}; `weightsync resume --name "
            f"{self.options.service}` does"
        )
