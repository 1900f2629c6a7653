"""Calls of an asyncio actor, parked until its state lets them go on."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

from weightsync.protocol.errors import StallError


class Parking:
    """Where calls wait for a change of state, and tasks live that belong to nobody's call."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def notify(self) -> None:
        """The state changed: everybody looks again."""
        async with self._changed:
            self._changed.notify_all()

    async def until(
        self, done: Callable[[], bool], deadline: float = math.inf, what: Callable[[], str] = lambda: ""
    ) -> None:
        """Park until `done()`. Without a deadline (on the monotonic clock) something else must end it.

        Raises:
            StallError: the deadline passed first; names `what` was waited for.
        """
        async with self._changed:
            while not done():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise StallError(f"waited in vain for {what()}")
                try:
                    await asyncio.wait_for(self._changed.wait(), None if remaining == math.inf else remaining)
                except TimeoutError:
                    continue

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it run until it ends or `cancel`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """End what `run` started."""
        for task in list(self._tasks):
            task.cancel()
