"""The registry: membership, versions, epochs, and the orchestration of one sync. Never tensor bytes.

One asyncio actor: thousands of parked calls cost it nothing, and its state changes only between awaits, so it
needs no locks. A publish passes through here as

    begin_publish   every rank arrives with the same, higher version; every producer opens the epoch
    next_work       every live consumer's long poll returns the epoch; it pulls
    pulled          a consumer holds the complete version; parked until the outcome
    end_publish     a rank's groups are all freed; parked until the outcome
    commit          all of them: consumers may flip, ranks get the report -- or abort, and nobody flips

Members call this class; `Syncs` decides, and `Operations` answers people. The thing to watch: a parked call returns
only through a commit, an abort, an eviction, or its own timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any

import ray

from weightsync.actors.chronicle import Chronicle
from weightsync.actors.epochs import ConsumerMember
from weightsync.actors.lifelines import LifelineServer
from weightsync.actors.logs import event_logger
from weightsync.actors.membership import ProducerMember
from weightsync.actors.operations import Operations
from weightsync.actors.options import RegistryOptions
from weightsync.actors.parking import Parking
from weightsync.actors.spans import Spans
from weightsync.actors.syncs import RECOVERY_S, Syncs
from weightsync.protocol.cost_model import LinkCosts
from weightsync.protocol.errors import (
    MembershipLostError,
    RegistrationError,
    StaleEpochError,
    StallError,
    SyncAborted,
    WeightsyncError,
)
from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import (
    ConsumerGrant,
    ConsumerState,
    EpochBegin,
    EpochGrant,
    EpochState,
    LayoutSnapshot,
    LinkName,
    MemberHistory,
    PlanFacts,
    ProducerGrant,
    ProducerRegistration,
    PullStats,
    RankLayout,
    RankStats,
)
from weightsync.protocol.status import (
    EventKind,
    SyncReport,
)

_MEASURED_WITHIN_S = 3.0
"""Workers on one node measure one after another; one that dies meanwhile is waited for this long."""
_DEATH_NOTICED_S = 2.0
"""A parked watch tells of a death within 15 ms; a rank that is a member for longer is alive but out of reach."""


class Registry(Operations):
    """State of one service. Wrapped as a named, detached, async Ray actor by `spawn`."""

    def __init__(self, options: RegistryOptions) -> None:
        log = event_logger(options.service, options.log_level, options.log_format)
        self._parked = Parking()
        self._spans = Spans(options.service) if options.traces else None
        traced = self._spans.send if self._spans is not None else None
        self._chronicle = Chronicle(options.service, self._parked.notify, log, traced)
        self._syncs = Syncs(options, self._parked, self._chronicle)
        self._lifelines = LifelineServer(
            ray.util.get_node_ip_address(), options.lease_s, self._syncs.consumers.holds, self._consumer_lost
        )
        self._links = {}
        self._measuring: set[LinkName] = set()
        self._closing = False

    async def options(self) -> RegistryOptions:
        return self._syncs.options

    async def watch(self) -> None:
        """Parked until the service closes; its caller learns of this registry's death at once."""
        await self._parked.until(lambda: self._closing)

    # -- trainer ranks --------------------------------------------------------------------------------

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
            self._syncs.producers.add(member, self._syncs.consumers.ids_given)
        except WeightsyncError as error:
            self._syncs.note_error(error)
            self._chronicle.refused("producer", f"trainer rank {registration.rank}", error)
            self._syncs.end_gathering(f"rank {registration.rank} was refused: {error}")
            raise
        self._catch_up(known)
        self._parked.run(self._watch(registration.rank, member))
        self._chronicle.meters.registered(registration.registration_s)
        self._chronicle.note(
            EventKind.JOINED, f"trainer rank {registration.rank} joined", member=f"trainer rank {registration.rank}"
        )
        return ProducerGrant(member.token, self._syncs.producers.generation)

    async def unregister_producer(self, rank: int, token: str) -> None:
        """A trainer rank leaves; a running epoch that needs it aborts."""
        self._check_rank(rank, token)
        self._syncs.drop_producer(rank, "it closed its publisher")

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
            lambda: self._syncs.epoch is None or not self._syncs.epoch.open or rank not in self._syncs.epoch.ended,
            deadline,
            lambda: f"rank {rank}: the sync of version {self._syncs.epoch and self._syncs.epoch.version} to close",
        )
        gathering = self._syncs.join_gathering(rank, version)
        try:
            await self._parked.until(
                lambda: gathering.decided or self._syncs.all_arrived(gathering),
                deadline,
                lambda: f"ranks {self._syncs.missing(gathering)} to publish version {version}",
            )
            await self._parked.until(
                lambda: gathering.decided or self._syncs.paused is None, deadline, self._syncs.why_paused
            )
            if not gathering.decided and not gathering.opening:
                gathering.opening = True
                await self._syncs.open(gathering, deadline)
            await self._parked.until(
                lambda: gathering.decided,
                deadline,
                self._syncs.consumers_wanted,
            )
        except WeightsyncError as error:
            self._syncs.give_up(gathering, error)
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

    async def end_publish(self, rank: int, token: str, epoch: int, stats: RankStats) -> SyncReport:
        """A rank's groups are all freed; wait for the outcome.

        Args:
            stats: what the rank measured.

        Raises:
            SyncAborted: the attempt was given up; the message says why.
        """
        self._check_rank(rank, token)
        running = self._syncs.running(epoch)
        running.ended.add(rank)
        running.rank_stats[rank] = stats
        running.moved_at = time.monotonic()
        self._syncs.settle()
        await self._parked.until(lambda: not running.open)
        if running.state is EpochState.ABORTED:
            raise SyncAborted(self._syncs.aborted_text(running))
        return running.report(self._syncs.options.service)

    async def fail_publish(self, rank: int, token: str, epoch: int, message: str) -> None:
        """A rank gives its attempt up; the epoch aborts for everyone."""
        self._check_rank(rank, token)
        if self._syncs.epoch is not None and self._syncs.epoch.epoch == epoch and self._syncs.epoch.open:
            self._syncs.abort(Fault.RANK_FAILED, f"trainer rank {rank}: {message}")

    # -- inference workers ----------------------------------------------------------------------------

    async def register_consumer(
        self, worker: str, install: str, node_id: str, pid: int, known: MemberHistory
    ) -> ConsumerGrant:
        """Admit a worker. A new registration under a known name replaces the old one (a restart)."""
        self._refuse_when_closing()
        namesake = self._syncs.consumers.by_name(worker)
        if namesake is not None:
            self._syncs.evict(namesake.consumer_id, Fault.REPLACED, f"replaced by process {pid}")
        try:
            member = self._syncs.consumers.add(worker, install, node_id, pid, known)
        except WeightsyncError as error:
            self._chronicle.refused("consumer", f"worker {worker}", error)
            raise
        self._catch_up(known)
        address = await self._lifelines.address()
        self._lifelines.expect(member.consumer_id, member.token)
        self._chronicle.note(EventKind.JOINED, f"worker {worker} joined", member=f"worker {worker}")
        return ConsumerGrant(member.consumer_id, member.token, address)

    async def unregister_consumer(self, consumer_id: int, token: str) -> None:
        """A worker leaves; a running epoch goes on without it."""
        await self._consumer_lost(consumer_id, token, Fault.LEFT, "it left")

    def _catch_up(self, known: MemberHistory) -> None:
        """Versions and epochs never go back, also when this registry is younger than its members."""
        if self._syncs.epoch_number == 0 < known.epoch:
            self._syncs.recovered_at = time.monotonic() + RECOVERY_S
        self._syncs.epoch_number = max(self._syncs.epoch_number, known.epoch)
        if known.version is not None and known.version > (
            -1 if self._syncs.newest_version is None else self._syncs.newest_version
        ):
            self._syncs.newest_version = known.version
            self._chronicle.recovered(known.version)

    async def _consumer_lost(self, consumer_id: int, token: str, fault: Fault, why: str) -> None:
        """A worker left or died: forget it, and take it out of a running epoch."""
        if self._syncs.consumers.holds(consumer_id, token) and not self._closing:
            worker = f"worker {self._syncs.consumers.members[consumer_id].worker}"
            self._syncs.evict(consumer_id, fault, why)
            self._syncs.consumers.remove(consumer_id)
            self._chronicle.note(EventKind.LEFT, f"{worker} is no member any more: {why}", member=worker, fault=fault)

    async def layout(self) -> LayoutSnapshot | None:
        """The complete model if every rank is registered, else None. Does not wait."""
        return self._syncs.producers.layout

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
        if self._syncs.producers.layout is None or self._syncs.producers.generation != generation:
            raise StaleEpochError(f"layout generation {generation} is gone; plan again")
        return [self._syncs.producers.members[rank].actor for rank in range(len(self._syncs.producers.members))]

    async def next_work(
        self, consumer_id: int, token: str, generation: int, after_epoch: int
    ) -> LayoutSnapshot | EpochBegin | None:
        """Long poll: a layout newer than `generation` to plan, else an epoch to pull, else None.

        An epoch that was aborted before its consumer heard of it is told too: whoever waits for that version must
        learn that it will not come.
        """
        member = self._check_consumer(consumer_id, token)

        def work() -> LayoutSnapshot | EpochBegin | None:
            layout = self._syncs.producers.layout
            if layout is not None and layout.generation > generation:
                return layout
            epoch = self._syncs.epoch
            unheard = epoch is not None and epoch.epoch > after_epoch and consumer_id in epoch.live
            if epoch is not None and unheard and epoch.state is not EpochState.COMMITTED:
                refusal = self._syncs.aborted_text(epoch) if epoch.state is EpochState.ABORTED else None
                return EpochBegin(epoch.epoch, epoch.version, generation, epoch.one_sided, refusal)
            return None

        def anything() -> bool:
            return self._closing or self._syncs.consumers.members.get(consumer_id) is not member or work() is not None

        try:
            await self._parked.until(anything, time.monotonic() + self._syncs.options.long_poll_s, lambda: "work")
        except StallError:
            return None
        self._check_consumer(consumer_id, token)
        self._refuse_when_closing()
        found = work()
        if isinstance(found, EpochBegin) and found.refusal is None and not member.writes_live:
            self._pull_begins(member)
        return found

    async def planned(self, consumer_id: int, token: str, generation: int, facts: PlanFacts) -> None:
        """A worker can pull this layout generation; from now on it is live in new epochs."""
        member = self._check_consumer(consumer_id, token)
        member.state, member.generation = ConsumerState.IDLE, generation
        member.facts, member.error = facts, None
        self._chronicle.meters.planned(facts)
        self._parked.notify()

    async def plan_failed(self, consumer_id: int, token: str, generation: int, message: str) -> None:
        """A worker cannot pull this model; it stays out of epochs until it can."""
        member = self._check_consumer(consumer_id, token)
        member.state, member.generation, member.error = ConsumerState.FAILED, generation, message
        self._syncs.evict(consumer_id, Fault.PLAN_FAILED, message)
        self._chronicle.refused("plan", f"worker {member.worker}", message)

    async def start_pull(self, consumer_id: int, token: str, epoch: int) -> bool:
        """True if the epoch is still open for this worker: it may start to write live parameters.

        One that writes beside them need not ask: what it wrote too late is never installed.

        Raises:
            SyncAborted: it was given up; the message says why.
        """
        member = self._check_consumer(consumer_id, token)
        running = self._syncs.epoch
        if running is not None and running.epoch == epoch and running.state is EpochState.ABORTED:
            raise SyncAborted(self._syncs.aborted_text(running))
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
        running = self._syncs.running(epoch)
        with contextlib.suppress(StallError):
            await self._parked.until(
                lambda: not running.open or rank not in running.ranks,
                time.monotonic() + _DEATH_NOTICED_S,
                lambda: f"word of the death of rank {rank}",
            )
        if consumer_id not in running.live:
            raise StaleEpochError(f"consumer {consumer_id} was evicted from epoch {epoch}")
        if not running.open:
            raise SyncAborted(self._syncs.aborted_text(running))
        return rank not in running.ranks

    async def progress(self, consumer_id: int, token: str, epoch: int, bytes_done: int, waits_for: str) -> None:
        """Bytes in place so far, for progress bars; not part of the protocol."""
        member = self._check_consumer(consumer_id, token)
        if self._syncs.epoch is not None and self._syncs.epoch.epoch == epoch:
            if (member.bytes_done, member.waits_for) != (bytes_done, waits_for):
                member.moved_at = time.monotonic()
            member.bytes_done, member.waits_for = bytes_done, waits_for

    async def pulled(self, consumer_id: int, token: str, epoch: int, stats: PullStats) -> str | None:
        """A worker holds the complete version; wait for the outcome. None: committed, it may install; else why not."""
        member = self._check_consumer(consumer_id, token)
        running = self._syncs.epoch
        if running is None or running.epoch != epoch or not running.open or consumer_id not in running.live:
            member.state = ConsumerState.IDLE
            return running.refusal(member) if running is not None and running.epoch == epoch else "its epoch is over"
        running.pulled[consumer_id] = stats
        running.moved_at = time.monotonic()
        member.state, member.bytes_done = ConsumerState.PULLED, member.facts.bytes_total
        self._syncs.settle()
        await self._parked.until(lambda: not running.open or consumer_id not in running.live)
        refusal = running.refusal(member)
        member.state = ConsumerState.IDLE
        return refusal

    async def pull_failed(self, consumer_id: int, token: str, epoch: int, message: str, fault: Fault) -> None:
        """A worker's own attempt failed; survivors go on without it, unless what it read was wrong at its source."""
        member = self._check_consumer(consumer_id, token)
        member.state, member.error = ConsumerState.IDLE, message
        running = self._syncs.epoch
        if running is None or running.epoch != epoch or consumer_id not in running.live:
            return
        if fault is Fault.VERIFICATION:
            self._syncs.abort(fault, f"worker {member.worker}: {message}")
        else:
            self._syncs.evict(consumer_id, fault, message)

    async def installed(
        self, consumer_id: int, token: str, version: int, flips: int, failure: str | None = None
    ) -> None:
        """A worker made a version visible, or failed halfway; news of its `flips` flips may overtake each other."""
        member = self._check_consumer(consumer_id, token)
        if flips <= member.flips:
            return
        member.flips = flips
        if failure is not None:
            member.torn, member.staged_version, member.error = True, None, failure
            return
        member.version, member.staged_version, member.error, member.torn = version, None, None, False

    async def explain(self, consumer_id: int, token: str) -> str:
        """Why a worker's `sync` is still waiting, in one sentence."""
        self._check_consumer(consumer_id, token)
        if self._syncs.producers.world_size is None:
            return "no trainer rank has registered"
        if self._syncs.producers.missing_ranks:
            return f"trainer ranks {self._syncs.producers.missing_ranks} have not registered"
        if self._syncs.epoch is not None and self._syncs.epoch.open:
            return f"version {self._syncs.epoch.version} is waiting for {', '.join(self._syncs.epoch.waiting_for())}"
        return f"no sync is running; the newest version is {self._syncs.newest_version}"

    async def open_version(self, consumer_id: int, token: str) -> int | None:
        """The version of the running epoch if this worker is live in it."""
        self._check_consumer(consumer_id, token)
        epoch = self._syncs.epoch
        return epoch.version if epoch is not None and epoch.open and consumer_id in epoch.live else None

    async def close(self) -> None:
        """Stop the service: abort what runs, close every producer, wake every parked call."""
        self._closing = True
        if self._syncs.epoch is not None and self._syncs.epoch.open:
            self._syncs.abort(Fault.SHUTDOWN, "the service is shutting down")
        self._parked.cancel()
        self._lifelines.close()
        closing = [member.actor.close.remote() for member in self._syncs.producers.members.values()]
        if closing:
            await asyncio.wait([asyncio.ensure_future(_quietly(ref)) for ref in closing], timeout=5)
        if self._spans is not None:
            await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(self._spans.close))], timeout=5)
        self._parked.notify()

    async def _watch(self, rank: int, member: ProducerMember) -> None:
        """Parked on a producer actor; its death ends the call within milliseconds."""
        try:
            await member.actor.watch.remote()
        except Exception as error:
            why = f"its producer died ({type(error).__name__})"
        else:
            why = "its producer was closed"
        if self._syncs.producers.members.get(rank) is member and not self._closing:
            self._syncs.drop_producer(rank, why)

    def _check_rank(self, rank: int, token: str) -> None:
        self._refuse_when_closing()
        member = self._syncs.producers.members.get(rank)
        if member is None:
            raise MembershipLostError(f"rank {rank} is not registered: its producer died, or the registry restarted")
        if not secrets.compare_digest(member.token, token):
            raise RegistrationError(f"rank {rank} is held by process {member.registration.pid}; make a new Publisher")

    def _check_consumer(self, consumer_id: int, token: str) -> ConsumerMember:
        self._refuse_when_closing()
        return self._syncs.consumers.get(consumer_id, token)

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise SyncAborted(f"service {self._syncs.options.service!r} is shutting down")


async def _quietly(ref: Any) -> None:
    try:
        await ref
    except Exception:
        return
