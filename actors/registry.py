"""The registry: membership, versions, epochs, and the orchestration of one sync. Never tensor bytes.

One asyncio actor: thousands of parked calls cost it nothing, and its state changes only between awaits, so it
needs no locks. A publish passes through here as

    begin_publish   every rank arrives with the same, higher version; every producer opens the epoch
    next_work       every live consumer's long poll returns the epoch; it pulls
    pulled          a consumer holds the complete version; parked until the outcome
    end_publish     a rank's groups are all freed; parked until the outcome
    commit          all of them: consumers may flip, ranks get the report -- or abort, and nobody flips

The thing to watch: anything that can no longer finish must `_abort`, or drop a member with `_evict`; a parked
call returns only through those, the commit, or its own timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from dataclasses import asdict
from typing import Any

import ray

from weightsync.actors.attribution import ask_ledgers, explain_consumer, explain_epoch, who_holds_others_up
from weightsync.actors.epochs import ConsumerMember, Epoch
from weightsync.actors.gathering import Gathering, check_version
from weightsync.actors.lifelines import LifelineServer
from weightsync.actors.membership import ConsumerTable, ProducerMember, ProducerTable
from weightsync.actors.options import RegistryOptions
from weightsync.actors.parking import Parking
from weightsync.protocol.cost_model import LinkCosts
from weightsync.protocol.errors import (
    MembershipLostError,
    RegistrationError,
    StaleEpochError,
    StallError,
    SyncAborted,
    SyncError,
    VersionError,
    WeightsyncError,
)
from weightsync.protocol.messages import (
    ConsumerGrant,
    ConsumerState,
    EpochBegin,
    EpochGrant,
    EpochState,
    LayoutSnapshot,
    LinkName,
    MemberHistory,
    ProducerGrant,
    ProducerRegistration,
    PullStats,
    RankLayout,
)
from weightsync.protocol.status import LinkStatus, ServiceStatus, SyncReport

RECOVERY_S = 1.0
"""After a restart, workers get this long to be members again before a publish opens without them; they notice at
once and retry every 0.2 s."""
_PATIENCE = 0.8
"""Of the stall timeout, after which the registry evicts a member that does not move; the producers' own watchdogs
fire after all of it and give the whole sync up, so they must come second."""
_MEASURED_WITHIN_S = 3.0
"""Workers on one node measure one after another; one that dies meanwhile is waited for this long."""
_DEATH_NOTICED_S = 2.0
"""A parked watch tells of a death within 15 ms; a rank that is a member for longer is alive but out of reach."""


class Registry:
    """State of one service. Wrapped as a named, detached, async Ray actor by `spawn`."""

    def __init__(self, options: RegistryOptions) -> None:
        self._options = options
        self._producers = ProducerTable()
        self._consumers = ConsumerTable(options.max_consumers)
        self._lifelines = LifelineServer(
            ray.util.get_node_ip_address(), options.lease_s, self._consumers.holds, self._consumer_lost
        )
        self._epoch: Epoch | None = None
        self._epoch_number = 0
        self._newest_version: int | None = None
        self._gathering: Gathering | None = None
        self._parked = Parking()
        self._links: dict[LinkName, LinkCosts] = {}
        self._measuring: set[LinkName] = set()
        self._committed = 0
        self._aborted = 0
        self._last_report: SyncReport | None = None
        self._last_error: str | None = None
        self._closing = False
        self._recovered_at = 0.0

    # -- trainer ranks --------------------------------------------------------------------------------

    async def options(self) -> RegistryOptions:
        return self._options

    async def watch(self) -> None:
        """Parked until the service closes; its caller learns of this registry's death at once."""
        await self._parked.until(lambda: self._closing)

    async def register_producer(
        self, registration: ProducerRegistration, actor: Any, known: MemberHistory
    ) -> ProducerGrant:
        """Admit a trainer rank.

        Args:
            known: what it has seen; a registry that restarted learns from its members how far the service was.

        Raises:
            RegistrationError, InvalidLayoutError: see `ProducerTable.add`. Ranks that are waiting in
                `begin_publish` get the same error; nothing else changes.
        """
        self._refuse_when_closing()
        member = ProducerMember(registration, secrets.token_hex(16), actor)
        try:
            self._producers.add(member, self._consumers.ids_given)
        except WeightsyncError as error:
            self._last_error = str(error)
            if self._gathering is not None and not self._gathering.opening:
                self._gathering.error = SyncAborted(f"rank {registration.rank} was refused: {error}")
                self._gathering = None
            self._parked.notify()
            raise
        self._catch_up(known)
        self._parked.run(self._watch(registration.rank, member))
        self._parked.notify()
        return ProducerGrant(member.token, self._producers.generation)

    async def unregister_producer(self, rank: int, token: str) -> None:
        """A trainer rank leaves; a running epoch that needs it aborts."""
        self._check_rank(rank, token)
        self._drop_producer(rank, "it closed its publisher")

    async def begin_publish(self, rank: int, token: str, version: int, timeout_s: float, generation: int) -> EpochGrant:
        """Wait for every rank to publish `version`, then open its epoch.

        Args:
            generation: of the layout that the rank knows; it is told a newer one.

        Raises:
            VersionError: not above the newest version, or ranks disagree about it.
            StallError: ranks or consumers are missing after `timeout_s`; the message says which.
            SyncAborted: another rank was refused or failed meanwhile.
        """
        self._check_rank(rank, token)
        deadline = time.monotonic() + timeout_s
        await self._parked.until(
            lambda: self._epoch is None or not self._epoch.open or rank not in self._epoch.ended,
            deadline,
            lambda: f"rank {rank}: the sync of version {self._epoch and self._epoch.version} to close",
        )
        gathering = self._join_gathering(rank, version)
        try:
            await self._parked.until(
                lambda: gathering.decided or self._all_arrived(gathering),
                deadline,
                lambda: f"ranks {self._missing(gathering)} to publish version {version}",
            )
            if not gathering.decided and not gathering.opening:
                gathering.opening = True
                await self._open(gathering, deadline)
            await self._parked.until(
                lambda: gathering.decided,
                deadline,
                self._consumers_wanted,
            )
        except WeightsyncError as error:
            self._give_up(gathering, error)
        if gathering.error is not None:
            raise gathering.error
        assert gathering.opened is not None
        epoch, layout = gathering.opened, gathering.opened.layout
        return EpochGrant(
            epoch=epoch.epoch,
            version=version,
            live_consumers=tuple(epoch.live),
            layout=None
            if layout.generation == generation
            else RankLayout(layout.generation, layout.rank_groups[rank], layout.names, layout.group_lens),
            one_sided=epoch.one_sided,
        )

    async def end_publish(self, rank: int, token: str, epoch: int, extra_bytes: int) -> SyncReport:
        """A rank's groups are all freed; wait for the outcome.

        Args:
            extra_bytes: memory the rank took beside its weights.

        Raises:
            SyncAborted: the attempt was given up; the message says why.
        """
        self._check_rank(rank, token)
        running = self._running(epoch)
        running.ended.add(rank)
        running.extra_bytes[rank] = extra_bytes
        running.moved_at = time.monotonic()
        self._settle()
        await self._parked.until(lambda: not running.open)
        if running.state is EpochState.ABORTED:
            raise SyncAborted(self._aborted_text(running))
        return running.report(self._options.service)

    async def fail_publish(self, rank: int, token: str, epoch: int, message: str) -> None:
        """A rank gives its attempt up; the epoch aborts for everyone."""
        self._check_rank(rank, token)
        if self._epoch is not None and self._epoch.epoch == epoch and self._epoch.open:
            self._abort(f"trainer rank {rank}: {message}")

    # -- inference workers ----------------------------------------------------------------------------

    async def register_consumer(
        self, worker: str, install: str, node_id: str, pid: int, known: MemberHistory
    ) -> ConsumerGrant:
        """Admit a worker. A new registration under a known name replaces the old one (a restart)."""
        self._refuse_when_closing()
        namesake = self._consumers.by_name(worker)
        if namesake is not None:
            self._evict(namesake.consumer_id, f"replaced by process {pid}")
        member = self._consumers.add(worker, install, node_id, pid, known)
        self._catch_up(known)
        address = await self._lifelines.address()
        self._lifelines.expect(member.consumer_id, member.token)
        self._parked.notify()
        return ConsumerGrant(member.consumer_id, member.token, address)

    async def unregister_consumer(self, consumer_id: int, token: str) -> None:
        """A worker leaves; a running epoch goes on without it."""
        await self._consumer_lost(consumer_id, token, "it left")

    def _catch_up(self, known: MemberHistory) -> None:
        """Versions and epochs never go back, also when this registry is younger than its members."""
        if self._epoch_number == 0 < known.epoch:
            self._recovered_at = time.monotonic() + RECOVERY_S
        self._epoch_number = max(self._epoch_number, known.epoch)
        if known.version is not None:
            self._newest_version = max(self._newest_version or 0, known.version)

    async def _consumer_lost(self, consumer_id: int, token: str, why: str) -> None:
        """A worker left or died: forget it, and take it out of a running epoch."""
        if self._consumers.holds(consumer_id, token) and not self._closing:
            self._evict(consumer_id, why)
            self._consumers.remove(consumer_id)
            self._parked.notify()

    async def layout(self) -> LayoutSnapshot | None:
        """The complete model if every rank is registered, else None. Does not wait."""
        return self._producers.layout

    async def link_costs(self, link: LinkName) -> LinkCosts | None:
        """What a link costs. None, told to one caller at a time: measure it, and say so to `measured`."""
        with contextlib.suppress(StallError):
            await self._parked.until(
                lambda: link not in self._measuring, time.monotonic() + _MEASURED_WITHIN_S, lambda: "a measurement"
            )
        if link not in self._links:
            self._measuring.add(link)
        return self._links.get(link)

    async def measured(self, link: LinkName, costs: LinkCosts | None) -> None:
        """A worker has measured a link, or could not."""
        self._measuring.discard(link)
        if costs is not None:
            self._links[link] = costs
        self._parked.notify()

    async def producer_actors(self, generation: int) -> list[Any]:
        """Handles of the producer actors in rank order.

        Raises:
            StaleEpochError: the layout changed since `generation`.
        """
        if self._producers.layout is None or self._producers.generation != generation:
            raise StaleEpochError(f"layout generation {generation} is gone; plan again")
        return [self._producers.members[rank].actor for rank in range(len(self._producers.members))]

    async def next_work(
        self, consumer_id: int, token: str, generation: int, after_epoch: int
    ) -> LayoutSnapshot | EpochBegin | None:
        """Long poll: a layout newer than `generation` to plan, else an epoch to pull, else None.

        An epoch that was aborted before its consumer heard of it is told too: whoever waits for that version must
        learn that it will not come.
        """
        member = self._check_consumer(consumer_id, token)

        def work() -> LayoutSnapshot | EpochBegin | None:
            layout = self._producers.layout
            if layout is not None and layout.generation > generation:
                return layout
            epoch = self._epoch
            unheard = epoch is not None and epoch.epoch > after_epoch and consumer_id in epoch.live
            if epoch is not None and unheard and epoch.state is not EpochState.COMMITTED:
                refusal = self._aborted_text(epoch) if epoch.state is EpochState.ABORTED else None
                return EpochBegin(epoch.epoch, epoch.version, generation, epoch.one_sided, refusal)
            return None

        def anything() -> bool:
            return self._closing or self._consumers.members.get(consumer_id) is not member or work() is not None

        try:
            await self._parked.until(anything, time.monotonic() + self._options.long_poll_s, lambda: "work")
        except StallError:
            return None
        self._check_consumer(consumer_id, token)
        self._refuse_when_closing()
        found = work()
        if isinstance(found, EpochBegin) and found.refusal is None and not member.writes_live:
            self._pull_begins(member)
        return found

    async def planned(
        self, consumer_id: int, token: str, generation: int, bytes_total: int, needs_producers: bool
    ) -> None:
        """A worker can pull this layout generation; from now on it is live in new epochs.

        Args:
            needs_producers: its pulls ask something of producers beyond what registration told it.
        """
        member = self._check_consumer(consumer_id, token)
        member.needs_producers = needs_producers
        member.state, member.generation = ConsumerState.IDLE, generation
        member.bytes_total, member.error = bytes_total, None
        self._parked.notify()

    async def plan_failed(self, consumer_id: int, token: str, generation: int, message: str) -> None:
        """A worker cannot pull this model; it stays out of epochs until it can."""
        member = self._check_consumer(consumer_id, token)
        member.state, member.generation, member.error = ConsumerState.FAILED, generation, message
        self._evict(consumer_id, message)
        self._parked.notify()

    async def start_pull(self, consumer_id: int, token: str, epoch: int) -> bool:
        """True if the epoch is still open for this worker: it may start to write live parameters.

        One that writes beside them need not ask: what it wrote too late is never installed.

        Raises:
            SyncAborted: it was given up; the message says why.
        """
        member = self._check_consumer(consumer_id, token)
        running = self._epoch
        if running is not None and running.epoch == epoch and running.state is EpochState.ABORTED:
            raise SyncAborted(self._aborted_text(running))
        if running is None or running.epoch != epoch or not running.open or consumer_id not in running.live:
            return False
        self._pull_begins(member)
        return True

    @staticmethod
    def _pull_begins(member: ConsumerMember) -> None:
        member.state, member.bytes_done, member.staged_version = ConsumerState.PULLING, 0, None
        member.waits_for, member.moved_at = "", time.monotonic()
        member.torn = member.torn or member.writes_live  # until a whole version is installed

    async def outlives(self, consumer_id: int, token: str, epoch: int, rank: int) -> bool:
        """A rank did not answer a worker: whether it is gone. Waits a moment for word of its death.

        Raises:
            SyncAborted: the epoch is over; the message says why.
            StaleEpochError: it goes on without this worker.
        """
        self._check_consumer(consumer_id, token)
        running = self._running(epoch)
        with contextlib.suppress(StallError):
            await self._parked.until(
                lambda: not running.open or rank not in running.ranks,
                time.monotonic() + _DEATH_NOTICED_S,
                lambda: f"word of the death of rank {rank}",
            )
        if consumer_id not in running.live:
            raise StaleEpochError(f"consumer {consumer_id} was evicted from epoch {epoch}")
        if not running.open:
            raise SyncAborted(self._aborted_text(running))
        return rank not in running.ranks

    async def progress(self, consumer_id: int, token: str, epoch: int, bytes_done: int, waits_for: str) -> None:
        """Bytes in place so far, for progress bars; not part of the protocol."""
        member = self._check_consumer(consumer_id, token)
        if self._epoch is not None and self._epoch.epoch == epoch:
            if (member.bytes_done, member.waits_for) != (bytes_done, waits_for):
                member.moved_at = time.monotonic()
            member.bytes_done, member.waits_for = bytes_done, waits_for

    async def pulled(self, consumer_id: int, token: str, epoch: int, stats: PullStats) -> str | None:
        """A worker holds the complete version; wait for the outcome. None: committed, it may install; else why not."""
        member = self._check_consumer(consumer_id, token)
        running = self._epoch
        if running is None or running.epoch != epoch or not running.open or consumer_id not in running.live:
            member.state = ConsumerState.IDLE
            return running.refusal(member) if running is not None and running.epoch == epoch else "its epoch is over"
        running.pulled[consumer_id] = stats
        running.moved_at = time.monotonic()
        member.state, member.bytes_done = ConsumerState.PULLED, member.bytes_total
        self._settle()
        await self._parked.until(lambda: not running.open or consumer_id not in running.live)
        refusal = running.refusal(member)
        member.state = ConsumerState.IDLE
        member.staged_version = running.version if refusal is None else None
        return refusal

    async def pull_failed(self, consumer_id: int, token: str, epoch: int, message: str, everyone: bool) -> None:
        """A worker's own attempt failed; survivors go on without it, unless it is `everyone`'s failure."""
        member = self._check_consumer(consumer_id, token)
        member.state, member.error = ConsumerState.IDLE, message
        running = self._epoch
        if running is None or running.epoch != epoch or consumer_id not in running.live:
            return
        if everyone:
            self._abort(f"worker {member.worker}: {message}")
        else:
            self._evict(consumer_id, message)

    async def installed(self, consumer_id: int, token: str, version: int, flips: int) -> None:
        """A worker made a version visible; news of its `flips` flips may overtake each other."""
        member = self._check_consumer(consumer_id, token)
        if flips <= member.flips:
            return
        member.flips = flips
        member.version, member.staged_version, member.error, member.torn = version, None, None, False

    async def explain(self, consumer_id: int, token: str) -> str:
        """Why a worker's `sync` is still waiting, in one sentence."""
        self._check_consumer(consumer_id, token)
        if self._producers.world_size is None:
            return "no trainer rank has registered"
        if self._producers.missing_ranks:
            return f"trainer ranks {self._producers.missing_ranks} have not registered"
        if self._epoch is not None and self._epoch.open:
            return f"version {self._epoch.version} is waiting for {', '.join(self._epoch.waiting_for())}"
        return f"no sync is running; the newest version is {self._newest_version}"

    async def open_version(self, consumer_id: int, token: str) -> int | None:
        """The version of the running epoch if this worker is live in it."""
        self._check_consumer(consumer_id, token)
        epoch = self._epoch
        return epoch.version if epoch is not None and epoch.open and consumer_id in epoch.live else None

    # -- operators ------------------------------------------------------------------------------------

    async def why(self) -> list[str]:
        """Who waits for whom now, one line for each member that holds a sync up; empty if none runs."""
        epoch, gathering = self._epoch, self._gathering
        if epoch is not None and epoch.open:
            partners = {} if epoch.one_sided else self._producers.members
            ledgers = await ask_ledgers({rank: member.actor for rank, member in partners.items()})
            return explain_epoch(epoch, self._consumers.members, ledgers, time.monotonic())
        if gathering is None:
            return []
        missing = self._missing(gathering)
        if missing or self._producers.layout is None:
            return [
                f"trainer ranks {sorted(gathering.ranks)} want to publish version {gathering.version} and wait for "
                f"ranks {missing or self._producers.missing_ranks}"
            ]
        return [f"version {gathering.version} waits for {self._consumers_wanted()}"]

    async def status(self) -> ServiceStatus:
        """Everything worth knowing, at this moment."""
        return ServiceStatus(
            service=self._options.service,
            address=self._options.ray_address,
            transport=self._options.transport,
            transport_reason=self._options.transport_reason,
            http_url=self._options.http_url,
            registry_pid=os.getpid(),
            generation=self._producers.generation,
            world_size=self._producers.world_size,
            newest_version=self._newest_version,
            epoch=self._epoch.status() if self._epoch is not None and self._epoch.open else None,
            producers=[member.status() for _, member in sorted(self._producers.members.items())],
            consumers=[member.status() for _, member in sorted(self._consumers.members.items())],
            syncs_committed=self._committed,
            syncs_aborted=self._aborted,
            last_report=self._last_report,
            last_error=self._last_error,
            links=[LinkStatus(**asdict(link), **asdict(costs)) for link, costs in self._links.items()],
        )

    async def close(self) -> None:
        """Stop the service: abort what runs, close every producer, wake every parked call."""
        self._closing = True
        if self._epoch is not None and self._epoch.open:
            self._abort("the service is shutting down")
        self._parked.cancel()
        self._lifelines.close()
        closing = [member.actor.close.remote() for member in self._producers.members.values()]
        if closing:
            await asyncio.wait([asyncio.ensure_future(_quietly(ref)) for ref in closing], timeout=5)
        self._parked.notify()

    # -- inside: opening and closing epochs -----------------------------------------------------------

    def _join_gathering(self, rank: int, version: int) -> Gathering:
        check_version(rank, version, self._newest_version)
        if self._gathering is None:
            self._gathering = Gathering(version)
        gathering = self._gathering
        try:
            gathering.join(rank, version)
        except VersionError:
            self._gathering = None
            self._parked.notify()
            raise
        return gathering

    def _missing(self, gathering: Gathering) -> list[int]:
        return [rank for rank in range(self._producers.world_size or 0) if rank not in gathering.ranks]

    def _all_arrived(self, gathering: Gathering) -> bool:
        return self._producers.layout is not None and not self._missing(gathering)

    async def _open(self, gathering: Gathering, deadline: float) -> None:
        """Pick the live consumers and open the epoch on every producer."""
        await self._wait_for_consumers(deadline)
        started = time.monotonic()
        live = {c.consumer_id: c.worker for c in self._consumers.members.values() if c.planned}
        self._epoch_number += 1
        one_sided = not any(self._consumers.members[consumer].needs_producers for consumer in live)
        epoch = Epoch(self._epoch_number, gathering.version, self._layout(), live, one_sided, opened_at=started)
        try:
            await asyncio.gather(
                *(actor.begin_sync.remote(epoch.epoch, tuple(live)) for actor in self._partners(epoch))
            )
        except Exception as error:
            raise SyncAborted(f"a producer could not open epoch {epoch.epoch}: {error}") from error
        if not epoch.ranks <= self._producers.members.keys():
            gone = sorted(epoch.ranks - self._producers.members.keys())
            raise SyncAborted(f"trainer ranks {gone} died while epoch {epoch.epoch} was opened")
        epoch.begin_seconds = time.monotonic() - started
        self._epoch, self._gathering, gathering.opened = epoch, None, epoch
        self._parked.run(self._guard(epoch))
        self._parked.notify()

    async def _wait_for_consumers(self, deadline: float) -> None:
        """At least `min_consumers` that can pull; those still planning get `join_grace_s` to finish."""
        if time.monotonic() < self._recovered_at:
            await asyncio.sleep(self._recovered_at - time.monotonic())

        def planning() -> list[str]:
            return self._consumers.planning(self._producers.generation)

        grace = min(deadline, time.monotonic() + self._options.join_grace_s)
        try:
            await self._parked.until(lambda: not planning(), grace, lambda: f"workers {planning()} to plan")
        except StallError as error:
            self._last_error = str(error)
        await self._parked.until(
            lambda: self._consumers.able >= self._options.min_consumers, deadline, self._consumers_wanted
        )

    def _consumers_wanted(self) -> str:
        failed = self._consumers.failures()
        return f"{self._options.min_consumers} inference worker(s) to join; {self._consumers.able} can pull now" + (
            f" ({'; '.join(failed)})" if failed else ""
        )

    def _give_up(self, gathering: Gathering, error: WeightsyncError) -> None:
        if not gathering.decided:
            gathering.error = error
            self._last_error = str(error)
        if self._gathering is gathering:
            self._gathering = None
        self._parked.notify()

    def _settle(self) -> None:
        """Commit the running epoch if everybody has finished."""
        epoch = self._epoch
        if epoch is not None and epoch.open and epoch.complete:
            epoch.close(EpochState.COMMITTED)
            self._newest_version = epoch.version
            self._committed += 1
            self._last_report = epoch.report(self._options.service)
            self._parked.notify()

    def _evict(self, consumer_id: int, reason: str) -> None:
        """Take a consumer out of the running epoch; the last one to go aborts it."""
        epoch = self._epoch
        if epoch is None or not epoch.open or not epoch.evict(consumer_id, reason):
            return
        if not epoch.live:
            self._abort("; ".join(f"worker {w}: {why}" for w, why in epoch.evicted.items()))
            return
        for actor in self._partners(epoch):
            actor.evict.remote(consumer_id, epoch.epoch)
        self._parked.notify()
        self._settle()

    def _abort(self, reason: str) -> None:
        epoch = self._epoch
        if epoch is None or not epoch.open:
            return
        epoch.close(EpochState.ABORTED, reason)
        self._aborted += 1
        self._last_error = self._aborted_text(epoch)
        for actor in self._partners(epoch):
            actor.fail.remote(self._aborted_text(epoch))
        self._parked.notify()

    def _drop_producer(self, rank: int, why: str) -> None:
        """A rank is gone. A running epoch goes on if nobody needs it any more, or others hold what it held."""
        epoch, lost = self._epoch, self._producers.members[rank].registration.describe_held()
        if epoch is not None and epoch.open and rank in epoch.ranks:
            freed = rank in epoch.ended and not epoch.one_sided
            dispensable = freed or self._producers.replaceable(rank)
            self._producers.remove(rank)
            if dispensable:
                epoch.lose(rank, why)
                self._settle()
            else:
                self._abort(f"trainer rank {rank}: {why}, and with it {lost}")
        else:
            self._producers.remove(rank)
        if self._gathering is not None and not self._gathering.opening:
            self._gathering.error = SyncAborted(f"trainer rank {rank}: {why}")
            self._gathering = None
        self._parked.notify()

    async def _watch(self, rank: int, member: ProducerMember) -> None:
        """Parked on a producer actor; its death ends the call within milliseconds."""
        try:
            await member.actor.watch.remote()
        except Exception as error:
            why = f"its producer died ({type(error).__name__})"
        else:
            why = "its producer was closed"
        if self._producers.members.get(rank) is member and not self._closing:
            self._drop_producer(rank, why)

    async def _guard(self, epoch: Epoch) -> None:
        """The stall watchdog of one epoch: whoever holds up others that move is evicted; if nothing moves, it aborts.

        Producers have one too, of the whole timeout, and cannot see one-sided reads: they are told that bytes move.
        """
        patience_s = _PATIENCE * self._options.stall_timeout_s
        told_at = epoch.opened_at
        while epoch.open:
            await asyncio.sleep(min(1.0, patience_s / 10))
            now, outstanding = time.monotonic(), [c for c in epoch.live if c not in epoch.pulled]
            moved_at = {c: max(self._consumers.members[c].moved_at, epoch.opened_at) for c in outstanding}
            if max(moved_at.values(), default=0.0) > told_at and now - told_at > patience_s / 4:
                told_at = now
                for actor in self._partners(epoch):
                    actor.touch.remote(epoch.epoch)
            holding_up = who_holds_others_up(moved_at, len(outstanding) < len(epoch.live), now, patience_s)
            for consumer in [self._consumers.members[c] for c in holding_up]:
                self._evict(consumer.consumer_id, f"it stalled: {explain_consumer(consumer, now)}")
            if not holding_up and now - max(moved_at.values(), default=epoch.moved_at) > patience_s:
                self._abort(f"nothing moved for {patience_s:g} s: {'; '.join(await self.why())}")

    # -- inside: small things -------------------------------------------------------------------------

    def _partners(self, epoch: Epoch) -> list[Any]:
        """Producer actors that take part in an epoch."""
        return [] if epoch.one_sided else [member.actor for member in self._producers.members.values()]

    def _layout(self) -> LayoutSnapshot:
        layout = self._producers.layout
        if layout is None:
            raise SyncError(f"trainer ranks {self._producers.missing_ranks} are not registered")
        return layout

    def _running(self, epoch: int) -> Epoch:
        if self._epoch is None or self._epoch.epoch != epoch:
            raise StaleEpochError(f"epoch {epoch} is not the newest one ({self._epoch_number})")
        return self._epoch

    @staticmethod
    def _aborted_text(epoch: Epoch) -> str:
        return f"version {epoch.version} (epoch {epoch.epoch}) was aborted: {epoch.error}"

    def _check_rank(self, rank: int, token: str) -> None:
        self._refuse_when_closing()
        member = self._producers.members.get(rank)
        if member is None:
            raise MembershipLostError(f"rank {rank} is not registered: its producer died, or the registry restarted")
        if not secrets.compare_digest(member.token, token):
            raise RegistrationError(f"rank {rank} is held by process {member.registration.pid}; make a new Publisher")

    def _check_consumer(self, consumer_id: int, token: str) -> ConsumerMember:
        self._refuse_when_closing()
        return self._consumers.get(consumer_id, token)

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise SyncAborted(f"service {self._options.service!r} is shutting down")


async def _quietly(ref: Any) -> None:
    try:
        await ref
    except Exception:
        return
