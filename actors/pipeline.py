"""Chunks of one attempt on their way: asked for, read, scattered, all at once as far as slots and limits allow.

    direct   posted at once
    span     posted when its bounce slot is free, then scattered
    packed   asked for when its bounce slot is free, posted when the trainer has packed it, then scattered

Peers never wait for each other. Scattering runs in a thread of its own, because a read from host memory keeps the
posting thread busy (measured: UCX copies inside the call, with Python's lock released). The thing to watch: a bounce
slot is free only when its chunk was scattered, and chunks of a rank take slots in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ray

from weightsync.actors.attempt import Attempt
from weightsync.actors.chunks import ChunkDraft
from weightsync.actors.moves import Moves
from weightsync.actors.reads import Pause, Reads
from weightsync.actors.spawn import call
from weightsync.actors.transport import PreparedRead
from weightsync.protocol.cost_model import Strategy


@dataclass(eq=False)
class Chunk:
    """A prepared chunk. `read` is None while nobody has said where a packed chunk lies."""

    group: int
    rank: int
    strategy: Strategy
    draft: ChunkDraft
    nbytes: int
    read: PreparedRead | None = None
    moves: Moves | None = None
    slot: int = -1
    """Bounce slot of its rank; -1 for none."""
    seq: int = -1
    """Issue index of a packed chunk at its rank."""
    packed_at: tuple[int, int, int] | None = None
    """Where `read` finds a packed chunk: address, bytes, revision of the trainer's slots."""


@dataclass(frozen=True)
class Failure:
    """A chunk whose bytes did not come."""

    chunk: Chunk
    error: str


@dataclass
class _Rank:
    """One rank's bounced chunks that wait, in order, and its slots that are taken."""

    waiting: deque[Chunk] = field(default_factory=deque)
    taken: set[int] = field(default_factory=set)


class Pipeline:
    """One attempt's chunks.

    Args:
        reads: posts within the limits.
        attempt: hears of progress.
        ask: asks a rank to pack a chunk; returns the reply to come.
        found: makes a packed chunk's read of that reply.
        scatterer: runs the scatters, one after another.
    """

    def __init__(
        self,
        reads: Reads,
        attempt: Attempt,
        ask: Callable[[Chunk], Any],
        found: Callable[[Chunk, Any], PreparedRead],
        scatterer: ThreadPoolExecutor,
    ) -> None:
        self._reads = reads
        self._attempt = attempt
        self._ask = ask
        self._found = found
        self._scatterer = scatterer
        self._ranks: dict[int, _Rank] = {}
        self._asked: dict[Any, Chunk] = {}
        self._reading: dict[int, Chunk] = {}
        self._scattering: dict[Future[float], Chunk] = {}
        self.scatter_s = 0.0
        """Seconds of scattering, most of them beside reads."""

    def run(self, chunks: Iterable[Chunk], done: Callable[[Chunk], None]) -> list[Failure]:
        """Bring all of them in; `done` is called for each that is in place. Returns those that failed.

        Raises:
            WeightsyncError: the attempt is over; nothing is under way then.
        """
        for chunk in chunks:
            if chunk.slot < 0:
                self._post(chunk)
            else:
                self._ranks.setdefault(chunk.rank, _Rank()).waiting.append(chunk)
        failures: list[Failure] = []
        pause = Pause()
        try:
            while True:
                moved = self._start() + self._hear(failures) + self._land(done, failures) + self._settle(done)
                if not (
                    self._asked or self._reading or self._scattering or any(r.waiting for r in self._ranks.values())
                ):
                    return failures
                pause.after(bool(moved))
        except BaseException:
            self._stop()
            raise

    # -- steps: each returns how many chunks it moved on ----------------------------------------------

    def _start(self) -> int:
        """Bounced chunks whose slot is free."""
        started = 0
        for rank in self._ranks.values():
            while rank.waiting and rank.waiting[0].slot not in rank.taken:
                chunk = rank.waiting.popleft()
                rank.taken.add(chunk.slot)
                started += 1
                if chunk.strategy is Strategy.PACKED:
                    self._asked[self._ask(chunk)] = chunk
                else:
                    self._post(chunk)
        return started

    def _hear(self, failures: list[Failure]) -> int:
        """Replies of trainers that have packed."""
        if not self._asked:
            return 0
        self._attempt.waiting(f"ranks {sorted({chunk.rank for chunk in self._asked.values()})} to pack")
        replies, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for reply in replies:
            chunk = self._asked.pop(reply)
            try:
                answer = call(reply)
            except ray.exceptions.RayActorError as error:
                self._fail(chunk, f"its producer died ({type(error).__name__})", failures)
                continue
            chunk.read = self._found(chunk, answer)
            self._post(chunk)
        return len(replies)

    def _land(self, done: Callable[[Chunk], None], failures: list[Failure]) -> int:
        """Reads that are over."""
        finished = self._reads.advance()
        for one in finished:
            chunk = self._reading.pop(id(one.read))
            if one.error is not None:
                self._fail(chunk, one.error, failures)
                continue
            self._attempt.moved(chunk.nbytes)
            if chunk.moves is None:
                done(chunk)
            else:
                self._scattering[self._scatterer.submit(_timed, chunk.moves)] = chunk
        return len(finished)

    def _settle(self, done: Callable[[Chunk], None]) -> int:
        """Scatters that are over: their slots are free."""
        over = [future for future in self._scattering if future.done()]
        for future in over:
            chunk = self._scattering.pop(future)
            self.scatter_s += future.result()
            self._ranks[chunk.rank].taken.discard(chunk.slot)
            done(chunk)
        return len(over)

    # -- inside ---------------------------------------------------------------------------------------

    def _post(self, chunk: Chunk) -> None:
        assert chunk.read is not None
        self._reading[id(chunk.read)] = chunk
        self._reads.add(chunk.read)

    def _fail(self, chunk: Chunk, error: str, failures: list[Failure]) -> None:
        failures.append(Failure(chunk, error))
        if chunk.slot >= 0:
            self._ranks[chunk.rank].taken.discard(chunk.slot)

    def _stop(self) -> None:
        """Nothing may write any more when the error is told."""
        for reply in self._asked:  # an error nobody asks for any more; Ray would log it
            reply.future().add_done_callback(lambda future: future.exception())
        for future in self._scattering:
            future.exception()
        self._reads.settle()


def _timed(moves: Moves) -> float:
    started = time.monotonic()
    moves.run()
    return time.monotonic() - started


def in_turns(chunks: Sequence[Chunk], num_slots: int) -> None:
    """Give bounced chunks their slots, and packed ones their issue index, in this order for each rank."""
    bounced: dict[int, int] = {}
    packed: dict[int, int] = {}
    for chunk in chunks:
        if chunk.strategy is Strategy.DIRECT:
            continue
        turn = bounced[chunk.rank] = bounced.get(chunk.rank, -1) + 1
        chunk.slot = turn % num_slots
        if chunk.strategy is Strategy.PACKED:
            packed[chunk.rank] = packed.get(chunk.rank, -1) + 1
            chunk.seq = packed[chunk.rank]
