"""A worker's death is the end of its connection; its silence is a lease that ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from weightsync.actors.lifelines import Lifeline, LifelineServer
from weightsync.protocol.errors import RegistrationError
from weightsync.protocol.faults import Fault

MEMBERS = {(0, "secret"), (1, "other")}

CHILD = """
import sys, time
from weightsync.actors.lifelines import Lifeline
line = Lifeline(("127.0.0.1", int(sys.argv[1])), 0, "secret", float(sys.argv[2]))
print("up", flush=True)
time.sleep(600)
"""


@contextlib.asynccontextmanager
async def served(lease_s: float) -> AsyncIterator[tuple[LifelineServer, int, list[tuple[int, str, str]]]]:
    lost: list[tuple[int, str, Fault, str]] = []

    async def tell(consumer_id: int, token: str, fault: Fault, why: str) -> None:
        lost.append((consumer_id, token, fault, why))

    server = LifelineServer("127.0.0.1", lease_s, lambda cid, token: (cid, token) in MEMBERS, tell)
    _, port = await server.address()
    try:
        yield server, port, lost
    finally:
        server.close()


async def until(lost: list[tuple[int, str, Fault, str]], seconds: float) -> float:
    """Seconds until somebody is lost."""
    started = time.monotonic()
    while not lost and time.monotonic() - started < seconds:
        await asyncio.sleep(0.005)
    return time.monotonic() - started


def _child(port: int, lease_s: float) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(port), str(lease_s)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    return child


def test_a_killed_process_is_noticed_at_once() -> None:
    async def scene() -> None:
        async with served(lease_s=30.0) as (_, port, lost):
            child = await asyncio.to_thread(_child, port, 30.0)
            await asyncio.sleep(0.1)
            child.kill()
            assert await until(lost, 10) < 5, "long before the lease of 30 s"
            assert lost == [(0, "secret", Fault.DIED, "its process ended")]
            child.wait()

    asyncio.run(scene())


def test_a_stopped_process_is_noticed_by_its_lease() -> None:
    async def scene() -> None:
        async with served(lease_s=1.0) as (_, port, lost):
            child = await asyncio.to_thread(_child, port, 1.0)
            await asyncio.sleep(2.5)
            assert lost == [], "while it lives its lease is renewed"
            os.kill(child.pid, signal.SIGSTOP)
            await until(lost, 20)
            assert lost == [(0, "secret", Fault.LEASE, "it gave no sign of life for 1 s")]
            child.kill()
            child.wait()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "greeting", [b"0 wrong\n", b"7 secret\n", b"nonsense\n", b"\xff\xfe\n", b"0\n", b"x" * 100_000]
)
def test_a_stranger_is_nobodys_lifeline(greeting: bytes) -> None:
    async def scene() -> None:
        async with served(lease_s=0.3) as (_, port, lost):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.setblocking(False)
                with contextlib.suppress(OSError):
                    stranger.sendall(greeting)
                await asyncio.sleep(0.6)
            assert lost == []

    asyncio.run(scene())


def test_a_member_that_never_connects_is_lost_after_a_lease() -> None:
    async def scene() -> None:
        async with served(lease_s=0.3) as (server, _, lost):
            server.expect(1, "other")
            server.expect(5, "left already")
            await asyncio.sleep(1.0)
            assert lost == [(1, "other", Fault.LEASE, "it gave no sign of life within 0.3 s")]

    asyncio.run(scene())


def test_an_unreachable_registry_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(RegistrationError, match=f"cannot connect to the registry at 127.0.0.1:{port}"):
        Lifeline(("127.0.0.1", port), 0, "secret", 1.0)
