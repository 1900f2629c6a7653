"""What the page's tables show: which rows, in which order, and what is left out.

Pure. The thing to watch: a table has a limited number of rows whatever the service holds, worst first, and says how
many it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import ConsumerState, EpochState
from weightsync.protocol.status import (
    PHASES,
    ConsumerStatus,
    EpochStatus,
    Event,
    EventKind,
    LinkStatus,
    ProducerStatus,
    ServiceStatus,
    VersionRecord,
)
from weightsync.service.page.words import duration, natural

MEMBERS_SHOWN = 100
VERSIONS_SHOWN = 20
FAULTS_SHOWN = 20
LINKS_SHOWN = 50

_FAULTS = (EventKind.EVICTED, EventKind.ABORTED, EventKind.REFUSED)


@dataclass(frozen=True)
class Progress:
    """Bytes in place. Nothing to pull counts as all of it."""

    done: int
    total: int

    @property
    def fraction(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 1.0


@dataclass(frozen=True)
class Segment:
    """A phase in the bar of a version. `start` and `width` are in percent of the whole bar."""

    phase: str
    seconds: float
    start: float
    width: float


def progress(consumer: ConsumerStatus) -> Progress:
    return Progress(consumer.bytes_done, consumer.bytes_total)


def standing(consumer: ConsumerStatus) -> str:
    """Whether its weights can serve, in a word."""
    return "torn" if consumer.torn else "ready" if consumer.ready else "not ready"


def workers(status: ServiceStatus) -> list[ConsumerStatus]:
    """Torn and failed ones first, then those that are furthest behind."""
    return sorted(
        status.consumers,
        key=lambda c: (
            not c.torn,
            c.state is not ConsumerState.FAILED,
            -c.lag_versions,
            -c.lag_seconds,
            natural(c.worker),
        ),
    )


def pulling(status: ServiceStatus) -> list[ConsumerStatus]:
    """Those that take part in the running sync, those with most to do first."""
    if status.epoch is None:
        return []
    waited_for = set(status.epoch.waiting_for)
    part = [
        c
        for c in status.consumers
        if c.state in (ConsumerState.PULLING, ConsumerState.PULLED) or f"worker {c.worker}" in waited_for
    ]
    return sorted(part, key=lambda c: (f"worker {c.worker}" not in waited_for, progress(c).fraction, natural(c.worker)))


def waits(consumer: ConsumerStatus, epoch: EpochStatus) -> str:
    """What a worker of the running sync is doing, in words."""
    if f"worker {consumer.worker}" not in epoch.waiting_for:
        return "done"
    if consumer.state is ConsumerState.PULLING:
        return f"waiting for {consumer.waits_for or 'its first reads'}"
    return "has not begun"


def others(epoch: EpochStatus | None, workers: Iterable[ConsumerStatus]) -> list[str]:
    """Members that a sync waits for and that have no bar: trainer ranks."""
    shown = {f"worker {c.worker}" for c in workers}
    return [member for member in epoch.waiting_for if member not in shown] if epoch else []


def ranks(status: ServiceStatus) -> list[tuple[int, ProducerStatus | None]]:
    """Every rank of the trainer's world; None for one that is not registered, and those first."""
    registered = {producer.rank: producer for producer in status.producers}
    world = sorted(registered.keys() | set(range(status.world_size or 0)))
    return sorted(((rank, registered.get(rank)) for rank in world), key=lambda row: (row[1] is not None, row[0]))


def attempts(versions: Iterable[VersionRecord]) -> list[VersionRecord]:
    """Newest first."""
    return sorted(versions, key=lambda record: record.epoch, reverse=True)


def segments(record: VersionRecord) -> list[Segment]:
    """The phases of a committed attempt, one after the other. Phases of different workers overlap: it is a share."""
    phases = record.report.phases if record.report else {}
    whole = sum(phases.values())
    found: list[Segment] = []
    start = 0.0
    for phase, seconds in phases.items() if whole > 0 else ():
        width = 100 * seconds / whole
        found.append(Segment(phase if phase in PHASES else "other", seconds, start, width))
        start += width
    return found


def timings(record: VersionRecord) -> str:
    """The same in words."""
    phases = record.report.phases if record.report else {}
    return ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in phases.items())


def outcome(record: VersionRecord) -> str:
    if record.state is EpochState.COMMITTED:
        return "committed"
    return f"aborted: {record.fault.value}" if record.fault else record.state.value


def faults(events: Iterable[Event]) -> list[Event]:
    """Evictions, aborts, refusals and members that vanished between syncs, newest first."""
    found = [
        event
        for event in events
        if event.kind in _FAULTS or (event.kind is EventKind.LEFT and event.fault in (Fault.DIED, Fault.LEASE))
    ]
    return sorted(found, key=lambda event: event.number, reverse=True)


def links(status: ServiceStatus) -> Sequence[LinkStatus]:
    """Slowest first."""
    return sorted(status.links, key=lambda link: link.bytes_per_s)
