"""What happened to a service: its last attempts, and the news of them for whoever follows live.

Pure state of the registry. The thing to watch: both are short rings, so that a week of syncs costs no memory; who
asks for news older than the ring is told the oldest that is left and the number of what is lost.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from weightsync.actors.epochs import Epoch
from weightsync.actors.meters import Meters
from weightsync.protocol.faults import Fault
from weightsync.protocol.status import Event, EventKind, SyncReport, VersionRecord

RECORDS_KEPT = 100
DETAILED = 10
"""Records that keep what each worker measured; with 500 workers that is about a megabyte per version."""
EVENTS_KEPT = 500
_GOOD_NEWS = (EventKind.OPENED, EventKind.COMMITTED, EventKind.JOINED, EventKind.LEFT, EventKind.RESUMED)

Traced = Callable[[VersionRecord], None]


class Chronicle:
    """Attempts and events of one service.

    Args:
        service: its name.
        changed: called after each event; wakes who waits for news.
        log: gets each event as a line, see `logs`.
        traced: told of each attempt that has ended.
    """

    def __init__(self, service: str, changed: Callable[[], None], log: Any, traced: Traced | None = None) -> None:
        self.meters = Meters(service)
        self.records: deque[VersionRecord] = deque(maxlen=RECORDS_KEPT)
        """The last attempts, newest last."""
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._committed_at: list[tuple[int, float]] = []
        """The last versions and when they were committed, in seconds since 1970."""
        self._count = 0
        self._changed = changed
        self._log = log
        self._traced = traced

    @property
    def count(self) -> int:
        """Events so far; the number of the newest."""
        return self._count

    @property
    def committed_at(self) -> float | None:
        """When the newest version was committed, in seconds since 1970."""
        return self._committed_at[-1][1] if self._committed_at else None

    def lag(self, version: int | None, joined_at: float, now: float) -> tuple[int, float]:
        """(committed versions a worker is behind, seconds since the oldest of them was committed).

        Of a worker that holds none: those committed since it joined. At most as many as are remembered. Times are
        seconds since 1970.
        """
        known, number = self._committed_at, -1 if version is None else version
        first = bisect.bisect_right(known, number, key=lambda entry: entry[0])
        if version is None:
            first = bisect.bisect_right(known, joined_at, key=lambda entry: entry[1])
        return len(known) - first, max(0.0, now - known[first][1]) if first < len(known) else 0.0

    def recovered(self, version: int) -> None:
        """A registry that restarted hears of a version; when it was committed, nobody remembers."""
        self._commit(version)

    def events(self, after: int) -> list[Event]:
        """Those with a higher number, oldest first."""
        if after >= self._count:
            return []
        return [event for event in self._events if event.number > after]

    def note(
        self,
        kind: EventKind,
        text: str,
        *,
        version: int | None = None,
        epoch: int | None = None,
        member: str | None = None,
        fault: Fault | None = None,
    ) -> None:
        """Something happened."""
        self._count += 1
        about = {"kind": kind, "version": version, "epoch": epoch, "member": member, "fault": fault}
        self._events.append(Event(number=self._count, time=time.time(), text=text, **about))  # type: ignore[arg-type]
        (self._log.info if kind in _GOOD_NEWS else self._log.warning)(text, **about)
        self._changed()

    def refused(self, kind: str, member: str, why: object) -> None:
        """A member was not admitted (`producer`, `consumer`), or cannot pull (`plan`)."""
        self.meters.refused(kind)
        self.note(EventKind.REFUSED, f"{member} was refused: {why}", member=member)

    def opened(self, epoch: Epoch) -> None:
        ranks, workers = len(epoch.ranks), len(epoch.live)
        text = f"version {epoch.version}: {workers} workers begin to pull from {ranks} trainer ranks"
        self.note(EventKind.OPENED, text, version=epoch.version, epoch=epoch.epoch)

    def evicted(self, epoch: Epoch, worker: str, fault: Fault, text: str) -> None:
        self.meters.evicted(fault)
        self.note(
            EventKind.EVICTED,
            f"worker {worker} was taken out of version {epoch.version}: {text}",
            version=epoch.version,
            epoch=epoch.epoch,
            member=f"worker {worker}",
            fault=fault,
        )

    def committed(self, epoch: Epoch, report: SyncReport) -> None:
        self.meters.committed(report)
        self._commit(epoch.version)
        self._keep(epoch, report=report)
        text = (
            f"version {epoch.version} is complete on {len(report.installed)} workers after {report.seconds:.3f} s "
            f"({report.gbytes_per_second:.2f} GB/s)"
        )
        self.note(EventKind.COMMITTED, text, version=epoch.version, epoch=epoch.epoch)

    def aborted(self, epoch: Epoch, fault: Fault) -> None:
        self.meters.aborted(fault)
        self._keep(epoch, fault=fault)
        text = f"version {epoch.version} was given up: {epoch.error}"
        self.note(EventKind.ABORTED, text, version=epoch.version, epoch=epoch.epoch, fault=fault)

    def _commit(self, version: int) -> None:
        self._committed_at.append((version, time.time()))
        del self._committed_at[:-RECORDS_KEPT]

    def _keep(self, epoch: Epoch, report: SyncReport | None = None, fault: Fault | None = None) -> None:
        if len(self.records) >= DETAILED:
            self.records[-DETAILED] = summary(self.records[-DETAILED])
        record = VersionRecord(
            version=epoch.version,
            epoch=epoch.epoch,
            state=epoch.state,
            ended_at=time.time(),
            seconds=epoch.seconds,
            evicted=dict(epoch.evicted),
            fault=fault,
            error=epoch.error,
            report=report,
        )
        self.records.append(record)
        if self._traced is not None:
            self._traced(record)


def summary(record: VersionRecord) -> VersionRecord:
    """Without what each worker measured."""
    if record.report is None:
        return record
    return record.model_copy(update={"report": record.report.model_copy(update={"workers": {}})})
