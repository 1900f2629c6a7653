"""The state of a service in one line: what somebody who glances at the page must know.

Pure. The thing to watch: several things are true at once, so the order in `headline` is the order of what cannot
wait. What the line does not say is in its notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from weightsync.protocol.messages import ConsumerState
from weightsync.protocol.status import ServiceStatus
from weightsync.service.page.words import counted, duration

QUIET_S = 5.0
"""A running sync in which nothing has moved for longer stands still. The page says so much earlier than the watchdog
acts, and calls nothing an error: a worker that writes in place may rightly finish its requests first."""


class PageState(StrEnum):
    """What the page's colour stands for."""

    CURRENT = "current"
    EMPTY = "empty"
    SYNCING = "syncing"
    WAITING = "waiting"
    BEHIND = "behind"
    PAUSED = "paused"
    STALLED = "stalled"
    BROKEN = "broken"
    DOWN = "down"


@dataclass(frozen=True)
class Headline:
    """`text` changes only when the state does, because it is read out loud; `detail` and `notes` may move."""

    state: PageState
    text: str
    detail: str = ""
    notes: tuple[str, ...] = ()


def headline(status: ServiceStatus, why: Sequence[str]) -> Headline:
    """The most urgent thing that is true of the service; the others are its notes.

    Args:
        why: who waits for whom, where a sync runs or is about to.
    """
    found = [line for line in (_sync(status, why), _broken(status), _paused(status), _behind(status)) if line]
    first, *others = found or [_calm(status)]
    missing = (status.world_size or 0) - len(status.producers)
    notes = [f"{other.text}{f': {other.detail}' if other.detail else ''}" for other in others]
    if missing > 0:
        notes.append(f"{missing} of {counted(status.world_size or 0, 'trainer rank')} not registered")
    return Headline(first.state, first.text, first.detail, tuple(notes))


def _sync(status: ServiceStatus, why: Sequence[str]) -> Headline | None:
    epoch = status.epoch
    if epoch is None:
        if not why or status.paused is not None:
            return None
        return Headline(PageState.WAITING, "A version waits to begin", "see below for whom it waits")
    if epoch.quiet_seconds >= QUIET_S:
        return Headline(
            PageState.STALLED,
            f"The sync of version {epoch.version} stands still",
            f"nothing has moved for {duration(epoch.quiet_seconds)}",
        )
    return Headline(PageState.SYNCING, f"Version {epoch.version} is being synced")


def _broken(status: ServiceStatus) -> Headline | None:
    torn = [c.worker for c in status.consumers if c.torn]
    failed = [c.worker for c in status.consumers if c.state is ConsumerState.FAILED and not c.torn]
    if not torn and not failed:
        return None
    parts = [f"{len(names)} {word}" for names, word in ((torn, "torn"), (failed, "failed")) if names]
    of = counted(len(status.consumers), "worker")
    verb = "needs" if len(torn) + len(failed) == 1 else "need"
    return Headline(PageState.BROKEN, f"{len(torn) + len(failed)} of {of} {verb} attention", ", ".join(parts))


def _paused(status: ServiceStatus) -> Headline | None:
    if status.paused is None:
        return None
    return Headline(PageState.PAUSED, "Publishing is paused", status.paused)


def _behind(status: ServiceStatus) -> Headline | None:
    """Workers that neither show nor hold the newest version. While a sync runs nobody is called behind for it."""
    newest = status.newest_version
    behind = [c for c in status.consumers if c.lag_versions > 0 and c.staged_version != newest]
    if newest is None or not behind:
        return None
    versions, seconds = max(c.lag_versions for c in behind), max(c.lag_seconds for c in behind)
    verb = "is" if len(behind) == 1 else "are"
    return Headline(
        PageState.BEHIND,
        f"{len(behind)} of {counted(len(status.consumers), 'worker')} {verb} behind",
        f"by up to {counted(versions, 'version')}, {duration(seconds)}",
    )


def _calm(status: ServiceStatus) -> Headline:
    workers, newest = len(status.consumers), status.newest_version
    if not workers:
        return Headline(PageState.EMPTY, "No worker has joined", "a Subscriber of this service's name joins it")
    if newest is None:
        return Headline(PageState.EMPTY, "No version has been published", f"{counted(workers, 'worker')} joined")
    current = sum(c.version == newest for c in status.consumers)
    staged = sum(c.staged_version == newest and c.version != newest for c in status.consumers)
    if current + staged < workers:
        return Headline(
            PageState.CURRENT,
            f"No worker is behind version {newest}",
            f"{counted(workers - current - staged, 'worker')} joined since, and take part in the next sync",
        )
    if staged:
        return Headline(
            PageState.CURRENT,
            f"All workers hold version {newest}",
            f"{staged} of {workers} show it from their next `sync` call on",
        )
    return Headline(PageState.CURRENT, f"All workers are on version {newest}", f"{counted(workers, 'worker')}")
