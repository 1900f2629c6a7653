"""Parked calls: a change wakes whom it concerns and nobody else, and a deadline names what was waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from weightsync.actors.parking import Parking
from weightsync.protocol.errors import StallError


def test_a_change_wakes_only_those_that_may_go_on() -> None:
    asked = {"a": 0, "b": 0}
    state = {"a": False, "b": False}

    def done(name: str) -> bool:
        asked[name] += 1
        return state[name]

    async def scenario() -> None:
        parking = Parking()
        waiting = {name: asyncio.ensure_future(parking.until(lambda name=name: done(name))) for name in state}
        await asyncio.sleep(0)
        assert asked == {"a": 1, "b": 1}
        state["a"] = True
        parking.notify()
        await asyncio.sleep(0.01)
        assert {name: task.done() for name, task in waiting.items()} == {"a": True, "b": False}
        assert asked["b"] == 2, "asked once by notify; its task did not run"
        state["b"] = True
        parking.notify()
        await waiting["b"]
        assert parking._parked == {}

    asyncio.run(scenario())


def test_who_is_woken_looks_again_before_it_goes_on() -> None:
    state = {"open": False}

    async def scenario() -> None:
        parking = Parking()
        waiting = asyncio.ensure_future(parking.until(lambda: state["open"]))
        await asyncio.sleep(0)
        state["open"] = True
        parking.notify()
        state["open"] = False  # before the woken task has its turn
        await asyncio.sleep(0.01)
        assert not waiting.done()
        state["open"] = True
        parking.notify()
        await asyncio.wait_for(waiting, 1)

    asyncio.run(scenario())


def test_a_deadline_names_what_was_waited_for_and_leaves_nothing_parked() -> None:
    async def scenario() -> None:
        parking = Parking()
        with pytest.raises(StallError, match="waited in vain for rank 1"):
            await parking.until(lambda: False, time.monotonic() + 0.02, lambda: "rank 1")
        assert parking._parked == {}
        await parking.until(lambda: True, time.monotonic() - 1)  # what is done already needs no time
        task = asyncio.ensure_future(parking.until(lambda: False))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert parking._parked == {}

    asyncio.run(scenario())
