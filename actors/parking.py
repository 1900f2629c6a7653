"""Calls of an asyncio actor, parked until its state lets them go on."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

from weightsync.protocol.errors import StallError


class Parking:
    """Where calls wait for a change of state, and tasks live that belong to nobody's call.

    Hundreds of calls are parked here, so `notify` asks each whether it may go on, and wakes only those.
    """

    def __init__(self) -> None:
        self._parked: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def notify(self) -> None:
        """The state changed: whoever waited for that goes on."""
        for future, done in self._parked.items():
            if not future.done() and done():
                future.set_result(None)

    async def until(
        self, done: Callable[[], bool], deadline: float = math.inf, what: Callable[[], str] = lambda: ""
    ) -> None:
        """Park until `done()`. Without a deadline (on the monotonic clock) something else must end it.

        Raises:
            StallError: the deadline passed first; names `what` was waited for.
        """
        while not done():  # again after each wake: the state may have changed back before this task's turn
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise StallError(f"waited in vain for {what()}")
            await self._park(done, None if remaining == math.inf else remaining)

    async def _park(self, done: Callable[[], bool], seconds: float | None) -> None:
        future = asyncio.get_running_loop().create_future()
        self._parked[future] = done
        try:
            await asyncio.wait([future], timeout=seconds)
        finally:
            del self._parked[future]

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it run until it ends or `cancel`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """End what `run` started."""
        for task in list(self._tasks):
            task.cancel()
