"""Pauses of an inference engine, each held for a limited time, so that nobody's death leaves it paused for ever.

Several may hold the engine at once: a driver that prepares a step, an install that is under way. It runs again when
the last one lets go or its lease runs out. The thing to watch: an engine whose weights are torn is not let run,
whoever lets go; it is not ready, and runs again with the next whole version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

log = logging.getLogger("weightsync.pause")

_RETRY_S = 1.0


class PausableEngine(Protocol):
    """What an engine must offer to be held at a step boundary."""

    def pause(self) -> None:
        """Return when no step is being computed and none will be until `resume`."""

    def resume(self) -> None:
        """Compute again."""


class PauseBracket:
    """Who holds an engine, and until when.

    Args:
        engine: paused by the first hold, resumed by the last release.
        may_run: False while its weights must not be used.
    """

    def __init__(self, engine: PausableEngine, may_run: Callable[[], bool]) -> None:
        self._engine = engine
        self._may_run = may_run
        self._cond = threading.Condition()
        self._until: dict[str, float] = {}
        self._paused = False
        self._closed = False
        self._watch = threading.Thread(target=self._expire, name="weightsync-pause", daemon=True)
        self._watch.start()

    @property
    def holders(self) -> list[str]:
        """Who holds the engine now."""
        with self._cond:
            return sorted(self._until)

    def hold(self, holder: str, lease_s: float) -> None:
        """Pause the engine for `holder`, or renew its lease. Returns when the engine is paused.

        Raises:
            ValueError: a lease that is not positive.
            Exception: whatever the engine's `pause` raises; nothing is held then.
        """
        if lease_s <= 0:
            raise ValueError(f"a pause of {lease_s} s ends before it begins; lease_s must be positive")
        with self._cond:
            if not self._paused:
                self._engine.pause()
                self._paused = True
            self._until[holder] = time.monotonic() + lease_s
            self._cond.notify_all()

    def release(self, holder: str) -> None:
        """Let go; the engine runs again if nobody else holds it. Idempotent."""
        with self._cond:
            self._until.pop(holder, None)
            self._run_if_free()
            self._cond.notify_all()

    @contextmanager
    def held(self, holder: str, lease_s: float) -> Iterator[None]:
        """Hold for a block, however it ends."""
        self.hold(holder, lease_s)
        try:
            yield
        finally:
            self.release(holder)

    def close(self) -> None:
        """Forget all holds; the engine runs, unless it must not. Idempotent."""
        with self._cond:
            self._closed = True
            self._until.clear()
            self._run_if_free()
            self._cond.notify_all()
        self._watch.join(5.0)

    def _run_if_free(self) -> None:
        if self._until or not self._paused or not self._may_run():
            return
        try:
            self._engine.resume()
        except Exception:
            log.exception("the engine does not resume; trying again in %g s", _RETRY_S)
            return
        self._paused = False

    def _expire(self) -> None:
        """Ends leases that nobody renewed."""
        with self._cond:
            while not self._closed:
                now = time.monotonic()
                for holder, until in list(self._until.items()):
                    if until <= now:
                        log.warning("the pause held by %s ran out; the engine goes on", holder)
                        del self._until[holder]
                self._run_if_free()
                waits = [until - now for until in self._until.values()]
                if self._paused and not waits:
                    waits = [_RETRY_S]
                self._cond.wait(min(waits, default=None))
