"""What people ask of a registry, and tell it to do: the calls behind the CLI, the HTTP API and the metrics."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, replace
from typing import Any

from weightsync.actors.attribution import ask_ledgers
from weightsync.actors.chronicle import Chronicle, summary
from weightsync.actors.epochs import ConsumerMember
from weightsync.actors.parking import Parking
from weightsync.actors.syncs import Syncs
from weightsync.protocol.cost_model import LinkCosts
from weightsync.protocol.errors import (
    NothingRunningError,
    StallError,
    SyncAborted,
    UnknownMemberError,
)
from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import (
    LinkName,
)
from weightsync.protocol.status import (
    ConsumerStatus,
    EventKind,
    LinkStatus,
    News,
    ProducerStatus,
    ServiceStatus,
    VersionRecord,
)


class Operations:
    """The part of the registry that answers operators; nothing here is needed for a sync."""

    _syncs: Syncs
    _parked: Parking
    _chronicle: Chronicle
    _links: dict[LinkName, LinkCosts]
    _closing: bool

    async def why(self) -> list[str]:
        """Who waits for whom now, one line for each member that holds a sync up; empty if none runs."""
        return await self._syncs.why()

    async def reconfigure(self, changes: dict[str, Any]) -> None:
        """Take over options that only this registry reads, and so may change while members run."""
        self._syncs.options = replace(self._syncs.options, **changes)

    async def status(self) -> ServiceStatus:
        """Everything worth knowing, at this moment."""
        now = time.time()
        return ServiceStatus(
            service=self._syncs.options.service,
            address=self._syncs.options.ray_address,
            transport=self._syncs.options.transport,
            transport_reason=self._syncs.options.transport_reason,
            http_url=self._syncs.options.http_url,
            registry_pid=os.getpid(),
            generation=self._syncs.producers.generation,
            world_size=self._syncs.producers.world_size,
            newest_version=self._syncs.newest_version,
            committed_at=self._chronicle.committed_at,
            paused=self._syncs.paused,
            epoch=self._syncs.status(),
            producers=[member.status() for _, member in sorted(self._syncs.producers.members.items())],
            consumers=[self._told(member, now) for _, member in sorted(self._syncs.consumers.members.items())],
            events=self._chronicle.count,
            syncs_committed=self._syncs.syncs_committed,
            syncs_aborted=self._syncs.syncs_aborted,
            last_report=self._syncs.last_report,
            last_error=self._syncs.last_error,
            last_error_at=self._syncs.last_error_at,
            links=[LinkStatus(**asdict(link), **asdict(costs)) for link, costs in self._links.items()],
        )

    async def metrics(self) -> bytes:
        """Counters and histograms as Prometheus reads them; what is true now is in `status`."""
        return self._chronicle.meters.text()

    async def versions(self) -> list[VersionRecord]:
        """The last attempts, newest first, without what each worker measured."""
        return [summary(record) for record in reversed(self._chronicle.records)]

    async def version(self, version: int) -> list[VersionRecord]:
        """The attempts to sync one version, newest first; empty if none is remembered."""
        return [record for record in reversed(self._chronicle.records) if record.version == version]

    async def producer(self, rank: int) -> ProducerStatus:
        """One trainer rank, with what its producer says of itself now.

        Raises:
            UnknownMemberError: no such rank is registered.
        """
        member = self._syncs.producers.members.get(rank)
        if member is None:
            raise UnknownMemberError(f"trainer rank {rank} is not registered")
        ledger = (await ask_ledgers({rank: member.actor}))[rank]
        now = {} if isinstance(ledger, str) else {"inflight_groups": len(ledger.unfreed)}
        return member.status().model_copy(update=now)

    async def consumer(self, worker: str) -> ConsumerStatus:
        """One worker.

        Raises:
            UnknownMemberError: no such worker.
        """
        return self._told(self._member(worker), time.time())

    async def news(self, after: int | None, wait_s: float) -> News:
        """Long poll: events numbered above `after`, at the latest after `wait_s` seconds; none may have happened.

        None asks for those from now on. A number above the newest one is of a registry before this one.
        """
        after = self._chronicle.count if after is None else after
        after = 0 if after > self._chronicle.count else after
        with contextlib.suppress(StallError):
            await self._parked.until(
                lambda: self._closing or self._chronicle.count > after, time.monotonic() + wait_s, lambda: "news"
            )
        epoch, members, now = self._syncs.status(), self._syncs.consumers.members, time.time()
        live = sorted(self._syncs.epoch.live) if self._syncs.epoch is not None and epoch is not None else []
        return News(
            number=self._chronicle.count,
            events=self._chronicle.events(after),
            epoch=epoch,
            consumers=[self._told(members[cid], now) for cid in live if cid in members],
        )

    async def abort(self, version: int, reason: str) -> None:
        """Give a running sync up, or one whose ranks have not all come.

        Raises:
            NothingRunningError: no sync of this version is under way.
        """
        epoch, gathering = self._syncs.epoch, self._syncs.gathering
        if epoch is not None and epoch.open and epoch.version == version:
            self._syncs.abort(Fault.OPERATOR, f"an operator asked for it: {reason}")
        elif gathering is not None and gathering.version == version and not gathering.opening:
            self._syncs.give_up(gathering, SyncAborted(f"version {version} was given up by an operator: {reason}"))
        else:
            running = f"version {epoch.version} is" if epoch is not None and epoch.open else "none is"
            raise NothingRunningError(f"no sync of version {version} is running; {running}")

    async def evict(self, worker: str, reason: str) -> None:
        """Take a worker out of the running sync; it takes part in the next one again.

        Raises:
            UnknownMemberError: no such worker.
            NothingRunningError: no sync is running that it takes part in.
        """
        member = self._member(worker)
        if self._syncs.epoch is None or not self._syncs.epoch.open or member.consumer_id not in self._syncs.epoch.live:
            raise NothingRunningError(f"no sync is running that worker {worker!r} takes part in")
        self._syncs.evict(member.consumer_id, Fault.OPERATOR, f"an operator asked for it: {reason}")

    async def pause(self, reason: str) -> None:
        """Open no more versions until `resume`; a running sync ends as it would. Ranks wait in `publish`."""
        self._syncs.paused = reason
        self._chronicle.note(EventKind.PAUSED, f"publishing is paused: {reason}")

    async def resume(self) -> None:
        """Open versions again. Idempotent."""
        if self._syncs.paused is not None:
            self._syncs.paused = None
            self._chronicle.note(EventKind.RESUMED, "publishing goes on")

    def _told(self, member: ConsumerMember, now: float) -> ConsumerStatus:
        """A worker with how far it is behind; only the chronicle knows what was committed when."""
        return member.status(self._chronicle.lag(member.version, member.joined_at, now))

    def _member(self, worker: str) -> ConsumerMember:
        member = self._syncs.consumers.by_name(worker)
        if member is None:
            known = ", ".join(sorted(m.worker for m in self._syncs.consumers.members.values())[:10]) or "none"
            raise UnknownMemberError(f"no worker {worker!r} is a member (members: {known})")
        return member
