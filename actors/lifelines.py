"""Lifelines: one open connection per inference worker, so that its death is noticed at once.

When a process ends, whatever killed it, the kernel closes its sockets, and the registry reads the end of the
connection within a millisecond. What that cannot show (a stopped process, a lost node) the lease does: the
worker's end sends a byte every third of `lease_s`, and silence for `lease_s` counts as death.

The thing to watch: a lifeline belongs to one registration. A worker whose lease expired is no member any more
and has to register again; nothing it says under its old token has an effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable

from weightsync.protocol.errors import RegistrationError
from weightsync.protocol.faults import Fault

Address = tuple[str, int]

_CONNECT_TIMEOUT_S = 10.0


class LifelineServer:
    """The registry's end, in its event loop.

    Args:
        host: address to listen on, reachable from every worker.
        lease_s: seconds of silence after which a worker counts as dead.
        admit: whether (consumer id, token) is a member now.
        lost: told once of each member whose lifeline ended: (consumer id, token, reason, the same in words).
    """

    def __init__(
        self,
        host: str,
        lease_s: float,
        admit: Callable[[int, str], bool],
        lost: Callable[[int, str, Fault, str], Awaitable[None]],
    ) -> None:
        self._host = host
        self._lease_s = lease_s
        self._admit = admit
        self._lost = lost
        self._server: asyncio.Server | None = None
        self._held: set[tuple[int, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def address(self) -> Address:
        """Where to connect; starts listening at the first call."""
        if self._server is None:
            self._server = await asyncio.start_server(self._hold, self._host, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    def expect(self, consumer_id: int, token: str) -> None:
        """A member that never connects is lost after one lease."""
        task = asyncio.create_task(self._expect(consumer_id, token))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop listening and drop every connection."""
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()

    async def _expect(self, consumer_id: int, token: str) -> None:
        await asyncio.sleep(self._lease_s)
        if (consumer_id, token) not in self._held and self._admit(consumer_id, token):
            await self._lost(consumer_id, token, Fault.LEASE, f"it gave no sign of life within {self._lease_s:g} s")

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            member = await self._greeting(reader)
            if member is None or not self._admit(*member):
                return
            self._held.add(member)
            try:
                fault, why = await self._listen(reader)
            finally:
                self._held.discard(member)
            await self._lost(*member, fault, why)
        finally:
            writer.close()

    async def _greeting(self, reader: asyncio.StreamReader) -> tuple[int, str] | None:
        try:
            line = await asyncio.wait_for(reader.readline(), self._lease_s)
            consumer_id, token = line.decode("ascii").split()
            return int(consumer_id), token
        except (TimeoutError, ValueError, OSError):
            return None

    async def _listen(self, reader: asyncio.StreamReader) -> tuple[Fault, str]:
        """Returns why the connection ended."""
        while True:
            try:
                beats = await asyncio.wait_for(reader.read(256), self._lease_s)
            except TimeoutError:
                return Fault.LEASE, f"it gave no sign of life for {self._lease_s:g} s"
            except OSError:
                beats = b""
            if not beats:
                return Fault.DIED, "its process ended"


class Lifeline:
    """A worker's end: a socket, and a thread that sends a byte every third of the lease.

    Raises:
        RegistrationError: the registry cannot be reached.
    """

    def __init__(self, address: Address, consumer_id: int, token: str, lease_s: float) -> None:
        try:
            self._socket = socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S)
        except OSError as error:
            raise RegistrationError(
                f"cannot connect to the registry at {address[0]}:{address[1]} ({error}); workers need to reach its "
                "node by TCP"
            ) from error
        self._closed = threading.Event()
        self._period_s = lease_s / 3
        self._socket.sendall(f"{consumer_id} {token}\n".encode("ascii"))
        threading.Thread(target=self._beat, name="weightsync-lifeline", daemon=True).start()

    def close(self) -> None:
        """End it. Idempotent."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._period_s):
            try:
                self._socket.send(b".")
            except OSError:  # the registry is gone or has given us up; its next answer says which
                return
