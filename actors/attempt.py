"""One worker's attempt at one epoch: what a pull tells the registry, and asks it when a rank does not answer."""

from __future__ import annotations

import threading
import time
from typing import Any

from weightsync.actors.spawn import call
from weightsync.actors.transport import ReadContext
from weightsync.protocol.messages import EpochBegin, PullStats

_PROGRESS_PERIOD_S = 0.1


class Attempt:
    """The running attempt, as a pull sees it.

    Args:
        registry: the service's registry.
        consumer_id, token: who pulls.
        begin: what it pulls.
        stall_timeout_s: how long a read may stand still.
    """

    def __init__(self, registry: Any, consumer_id: int, token: str, begin: EpochBegin, stall_timeout_s: float) -> None:
        self.context = ReadContext(begin.epoch, consumer_id, stall_timeout_s)
        self.version = begin.version
        self.one_sided = begin.one_sided
        self.regions_verified = 0
        self.regions_repeated = 0
        self._registry = registry
        self._signature = (consumer_id, token, begin.epoch)
        self._done = 0
        self._what = ""
        self._started_at = self._told_at = time.monotonic()
        self._first_news = threading.Timer(_PROGRESS_PERIOD_S, self._tell)  # a quick pull has none
        self._first_news.daemon = True
        self._first_news.start()

    def moved(self, nbytes: int) -> None:
        """Bytes came in; the registry hears of it a few times a second at most."""
        self._done += nbytes
        self._tell()

    def waiting(self, what: str) -> None:
        """What the pull waits for now, in words."""
        self._what = what
        self._tell()

    def stats(self, bytes_needed: int, phases: dict[str, float]) -> PullStats:
        """What the pull did, now that it is over."""
        seconds = time.monotonic() - self._started_at
        return PullStats(self._done, bytes_needed, seconds, phases, self.regions_verified, self.regions_repeated)

    def close(self) -> None:
        """It is over. Idempotent."""
        self._first_news.cancel()

    def rank_failed(self, rank: int) -> bool:
        """A rank did not answer. True if it is gone and the epoch goes on without it, False if it is a member still.

        Raises:
            SyncAborted, StaleEpochError: the epoch does not go on, or not for this worker.
        """
        gone: bool = call(self._registry.outlives.remote(*self._signature, rank))
        return gone

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at >= _PROGRESS_PERIOD_S:
            self._told_at = now
            self._registry.progress.remote(*self._signature, self._done, self._what)
