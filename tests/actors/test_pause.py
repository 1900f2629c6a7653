"""A pause ends: with its last holder, with its lease, whoever dies; but a torn engine is never let run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from weightsync.actors.pause import PauseBracket

SOON_S = 5.0


class Engine:
    """Records what it was told; `pause` and `resume` may fail."""

    def __init__(self) -> None:
        self.running = True
        self.calls: list[str] = []
        self.failures = 0

    def pause(self) -> None:
        self._told("pause")
        assert self.running
        self.running = False

    def resume(self) -> None:
        self._told("resume")
        assert not self.running
        self.running = True

    def _told(self, what: str) -> None:
        self.calls.append(what)
        if self.failures:
            self.failures -= 1
            raise RuntimeError(f"{what} failed (injected)")


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_it_runs_again_when_the_last_holder_lets_go(engine: Engine) -> None:
    bracket = PauseBracket(engine, lambda: True)
    bracket.hold("driver", 60)
    with bracket.held("install", 60):
        assert bracket.holders == ["driver", "install"]
    assert not engine.running
    bracket.release("driver")
    bracket.release("driver")
    assert engine.running
    assert engine.calls == ["pause", "resume"]
    bracket.close()


def test_a_lease_that_nobody_renews_runs_out(engine: Engine) -> None:
    bracket = PauseBracket(engine, lambda: True)
    begun = time.monotonic()
    bracket.hold("driver", 0.2)
    while time.monotonic() - begun < 0.5:
        bracket.hold("driver", 0.2)
        assert not engine.running
        time.sleep(0.02)
    wait_for(lambda: engine.running)
    assert bracket.holders == []
    assert engine.calls == ["pause", "resume"], "renewing pauses nothing again"
    bracket.close()


def test_a_block_that_raises_lets_go(engine: Engine) -> None:
    bracket = PauseBracket(engine, lambda: True)
    with pytest.raises(ZeroDivisionError), bracket.held("install", 60):
        raise ZeroDivisionError
    assert engine.running
    bracket.close()


def test_a_torn_engine_stays_paused_until_it_is_whole(engine: Engine) -> None:
    whole = False
    bracket = PauseBracket(engine, lambda: whole)
    with bracket.held("install", 60):
        pass
    bracket.hold("driver", 0.05)
    wait_for(lambda: bracket.holders == [])
    assert not engine.running
    whole = True
    with bracket.held("install", 60):
        pass
    assert engine.running
    assert engine.calls == ["pause", "resume"]
    bracket.close()


def test_an_engine_that_does_not_pause_is_not_held(engine: Engine) -> None:
    bracket = PauseBracket(engine, lambda: True)
    engine.failures = 1
    with pytest.raises(RuntimeError, match="pause failed"):
        bracket.hold("driver", 60)
    assert bracket.holders == []
    bracket.hold("driver", 60)
    assert not engine.running
    bracket.close()
    assert engine.running


def test_an_engine_that_does_not_resume_is_asked_again(engine: Engine) -> None:
    bracket = PauseBracket(engine, lambda: True)
    bracket.hold("driver", 60)
    engine.failures = 1
    bracket.release("driver")
    assert not engine.running
    wait_for(lambda: engine.running)
    bracket.close()


@pytest.mark.parametrize("lease_s", [0, -1.0])
def test_a_lease_must_be_positive(engine: Engine, lease_s: float) -> None:
    bracket = PauseBracket(engine, lambda: True)
    with pytest.raises(ValueError, match="lease_s must be positive"):
        bracket.hold("driver", lease_s)
    assert engine.calls == []
    bracket.close()


def test_many_holders_at_once_never_pause_twice_or_leave_it_paused(engine: Engine) -> None:
    bracket = PauseBracket(engine, lambda: True)

    def holder(name: str) -> None:
        for _ in range(200):
            with bracket.held(name, 60):
                assert not engine.running

    threads = [threading.Thread(target=holder, args=(f"h{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.running
    assert engine.calls == ["pause", "resume"] * (len(engine.calls) // 2)
    bracket.close()
