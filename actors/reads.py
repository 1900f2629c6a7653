"""Reads under way: posted within a limit per peer, finished in whatever order they finish.

One `Reads` belongs to one attempt and one thread. The thing to watch: a read that was posted may write its destination
until it is reported; so whoever stops early, for whatever reason, must `settle` first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.actors.transport import PreparedRead, ReadContext, ReadFailedError, ReadHungError

if TYPE_CHECKING:
    from weightsync.actors.transport import Transport

_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 1e-3


@dataclass(frozen=True)
class Finished:
    """A read that is over; `error` says why it failed, None that its bytes are in place."""

    read: PreparedRead
    error: str | None


@dataclass
class _Peer:
    """One peer's reads: those that wait, and (read, its poll) of those posted."""

    waiting: deque[PreparedRead] = field(default_factory=deque)
    posted: list[tuple[PreparedRead, Callable[[], bool]]] = field(default_factory=list)

    @property
    def posted_bytes(self) -> int:
        return sum(read.nbytes for read, _ in self.posted)


class Reads:
    """Reads of one attempt.

    Args:
        transport: carries them out.
        context: on whose behalf, and how long they may stand still.
        max_inflight_bytes: posted at once per peer; a larger read goes alone. 0 means no limit.
    """

    def __init__(self, transport: Transport, context: ReadContext, max_inflight_bytes: int = 0) -> None:
        self._transport = transport
        self._context = context
        self._limit = max_inflight_bytes
        self._peers: dict[int, _Peer] = {}
        self._moved_at = time.monotonic()

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not any(peer.waiting or peer.posted for peer in self._peers.values())

    def add(self, read: PreparedRead) -> None:
        """Post it as soon as its peer's limit allows; peers do not wait for each other."""
        if self.idle:
            self._moved_at = time.monotonic()
        self._peers.setdefault(read.peer.session, _Peer()).waiting.append(read)

    def advance(self) -> list[Finished]:
        """Post what may be posted and report what is over since the last call. Does not wait.

        Raises:
            ReadHungError: reads are under way and none finished for the context's stall timeout.
        """
        finished: list[Finished] = []
        for peer in self._peers.values():
            peer.posted = [(read, poll) for read, poll in peer.posted if self._still_runs(read, poll, finished)]
            while peer.waiting and self._fits(peer):
                read = peer.waiting.popleft()
                try:
                    poll = self._transport.post(read, self._context)
                except ReadFailedError as error:
                    finished.append(Finished(read, str(error)))
                    continue
                if self._still_runs(read, poll, finished):
                    peer.posted.append((read, poll))
        if finished:
            self._moved_at = time.monotonic()
        elif time.monotonic() - self._moved_at > self._context.stall_timeout_s:
            finished = self._give_up()
        return finished

    def settle(self) -> None:
        """Forget what waits and let what was posted end.

        Raises:
            ReadHungError: it does not.
        """
        for peer in self._peers.values():
            peer.waiting.clear()
        pause = Pause()
        while not self.idle:
            pause.after(bool(self.advance()))

    def _fits(self, peer: _Peer) -> bool:
        if not self._limit or not peer.posted:
            return True
        return peer.posted_bytes + peer.waiting[0].nbytes <= self._limit

    @staticmethod
    def _still_runs(read: PreparedRead, poll: Callable[[], bool], finished: list[Finished]) -> bool:
        try:
            if not poll():
                return True
        except ReadFailedError as error:
            finished.append(Finished(read, str(error)))
        else:
            finished.append(Finished(read, None))
        return False

    def _give_up(self) -> list[Finished]:
        """Reads that stand still have failed, unless they may still write by themselves."""
        running = [read for peer in self._peers.values() for read, _ in peer.posted]
        why = f"nothing came for {self._context.stall_timeout_s:g} s"
        if running and self._transport.reads_trainer_memory:
            raise ReadHungError(f"{described(running, self._context)}: {why}")
        for peer in self._peers.values():
            peer.posted.clear()
        return [Finished(read, why) for read in running]


class Pause:
    """Sleeps between polls: short after something happened, longer the longer nothing does."""

    def __init__(self) -> None:
        self._seconds = _FIRST_PAUSE_S

    def after(self, moved: bool) -> None:
        """Sleep, unless something moved just now."""
        if moved:
            self._seconds = _FIRST_PAUSE_S
            return
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _LONGEST_PAUSE_S)


def read_all(
    transport: Transport,
    reads: Sequence[PreparedRead],
    context: ReadContext,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Carry reads out, all posted before any is waited for. Returns or raises when none is under way any more.

    Raises:
        ReadFailedError: with the reads that failed.
        ReadHungError: nothing came for the stall timeout.
    """
    under_way, failed, pause = Reads(transport, context), dict[int, str](), Pause()
    for read in reads:
        under_way.add(read)
    while not under_way.idle:
        finished = under_way.advance()
        for one in finished:
            if one.error is None:
                on_bytes(one.read.nbytes)
            else:
                failed[id(one.read)] = one.error
        if not under_way.idle:
            pause.after(bool(finished))
    if failed:
        lost = [read for read in reads if id(read) in failed]
        raise ReadFailedError(f"{described(lost, context)} failed ({failed[id(lost[0])]})", lost)


def described(reads: Sequence[PreparedRead], context: ReadContext) -> str:
    """What reads were to bring, for messages."""
    ranks = sorted({read.peer.rank for read in reads})
    return (
        f"epoch {context.epoch}: reading {sum(read.nbytes for read in reads)} bytes from "
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    )
