"""How bytes get from a producer's memory into a consumer's: one interface, and the choice between ways.

A transport has two faces. The owner of memory `register`s it and hands out `metadata`; a reader `connect`s to
that, `prepare`s reads once per layout and `post`s them once per version. The thing to watch: source addresses
belong to the peer's address space and destination addresses to ours; both sides must have been registered,
and a transport refuses to touch anything that was not.

`nixl` reads the trainer's memory one-sidedly. The other two read what the producer actor lends or packs out of a
shared-memory mirror of the rank's shard, so they cost the trainer one copy of it: `rdt` is Ray Direct Transport,
which is NIXL set up and driven by Ray, and `object_store` needs nothing but Ray.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import ray
import torch

from weightsync.actors.nixl_package import nixl_problem
from weightsync.protocol.errors import StallError, SyncError, TransportUnavailableError

TRANSPORT_NAMES = ("nixl", "rdt", "object_store")


@dataclass(frozen=True)
class Device:
    """A kind of memory in NIXL's words (DRAM, VRAM), and which of them."""

    kind: str
    index: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Device:
        return cls("DRAM" if tensor.device.type == "cpu" else "VRAM", tensor.device.index or 0)

    def __str__(self) -> str:
        return "host memory" if self.kind == "DRAM" else f"device {self.index}"


HOST = Device("DRAM", 0)


@dataclass(frozen=True)
class Peer:
    """Where a session's memory is reached: its transport metadata, the producer actor behind it, and what it is."""

    session: int
    rank: int
    metadata: bytes
    actor: Any
    device: Device = HOST


@dataclass(frozen=True)
class PreparedRead:
    """Runs of one session, checked and prepared; `nbytes` is what one execution moves."""

    peer: Peer
    nbytes: int
    handle: Any


@dataclass(frozen=True)
class ReadContext:
    """On whose behalf a read happens, so that stale attempts can be refused, and how long it may stand still."""

    epoch: int
    consumer_id: int
    stall_timeout_s: float = 300.0


class ReadFailedError(SyncError):
    """Some reads failed; all others of the call are complete. `failed` are the ones to repeat elsewhere."""

    def __init__(self, message: str, failed: Sequence[PreparedRead]) -> None:
        super().__init__(message)
        self.failed = tuple(failed)


class ReadHungError(StallError):
    """A read neither completes nor fails. It may still write its destination, whenever; nothing may use that again."""


class Transport(ABC):
    """One way to move bytes. Not thread-safe; each member owns one and uses it from one thread at a time."""

    name: ClassVar[str]
    reads_trainer_memory: ClassVar[bool]
    """True if peers can read the trainer's own memory in place, False if they need a mirror of it."""
    fetches_slots: ClassVar[bool]
    """True if a peer brings a packed serve slot here by its address, False if the answer to `serve` holds the bytes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """What was prepared so far: registrations, connections, descriptor_lists. A sync in steady state adds none."""
        self._carriers: tuple[tuple[str, ...], int] = ((), 0)

    @abstractmethod
    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the storages of these tensors readable by peers and usable as destinations."""

    @abstractmethod
    def deregister(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the storages of these tensors back; no read may be under way on them."""

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs to `connect` to the memory registered so far."""

    @abstractmethod
    def connect(self, peer: Peer) -> None:
        """Learn (or refresh) how to reach a peer's memory."""

    @abstractmethod
    def prepare(self, peer: Peer, src_addr: np.ndarray, dst_addr: np.ndarray, nbytes: np.ndarray) -> PreparedRead:
        """Check and prepare runs (uint64 addresses, int64 byte counts, equal lengths) for repeated reads.

        Raises:
            SyncError: a run would write memory that was not registered here, or, where the transport can see it,
                read memory that was not registered there; the others refuse the latter when they read.
        """

    @abstractmethod
    def post(self, read: PreparedRead, context: ReadContext) -> Callable[[], bool]:
        """Start a prepared read; it is over when the returned poll says True. Nothing here waits.

        Until then it may write its destination. See `reads` for waiting, limits and hung reads.

        Raises:
            ReadFailedError: here or from the poll: the peer is gone or refuses. The read is over then.
        """

    @abstractmethod
    def fetch_slot(self, peer: Peer, reply: Any, into: torch.Tensor, context: ReadContext) -> None:
        """Bring a packed serve slot (a producer's reply to `serve`) into the start of `into` (uint8)."""

    @abstractmethod
    def release(self, reads: Iterable[PreparedRead]) -> None:
        """Give prepared reads back, after a change of layout."""

    @abstractmethod
    def carrier(self, peer: Peer) -> str:
        """What carries bytes from a connected peer: "cma", "shared memory", "rdma", "tcp", "object store", ...

        "unknown" where nothing can be found out, and never a guess.
        """

    @abstractmethod
    def close(self) -> None:
        """Release prepared reads, peers and registrations. Idempotent."""

    def carriers(self, peers: Iterable[Peer]) -> tuple[str, ...]:
        """What carries the bytes of these peers, each once; asked again only after a new connection."""
        known, connections = self._carriers
        if connections != self.counts["connections"] or not known or "unknown" in known:
            known = tuple(sorted({self.carrier(peer) for peer in peers}))
            self._carriers = known, self.counts["connections"]
        return known

    @property
    def description(self) -> str:
        """For status: the transport and what carries it."""
        return self.name


def choose_transport(wanted: str) -> tuple[str, str]:
    """Resolve a setting ("auto", "nixl", "rdt", "object_store") to a transport name and the reason for it.

    Raises:
        TransportUnavailableError: a transport is demanded and cannot be used; the message carries the remedy.
        ValueError: not a transport.
    """
    if wanted not in ("auto", *TRANSPORT_NAMES):
        raise ValueError(f"transport must be one of auto, {', '.join(TRANSPORT_NAMES)}; got {wanted!r}")
    if wanted == "object_store":
        return "object_store", "set by configuration"
    problem = nixl_problem()
    if wanted == "rdt":
        problem = problem or _rdt_problem()
    if problem is None:
        return ("rdt", "set by configuration; NIXL imports here") if wanted == "rdt" else ("nixl", "NIXL imports here")
    if wanted != "auto":
        raise TransportUnavailableError(problem)
    return "object_store", problem


def _rdt_problem() -> str | None:
    """Why Ray Direct Transport cannot be used here, in one line with the remedy; None if it can."""
    try:
        from weightsync.actors import rdt_transport  # noqa: F401
    except ImportError as error:
        return (
            f"this Ray ({ray.__version__}) has no Ray Direct Transport into registered targets ({error}); upgrade "
            "`ray`, or set WEIGHTSYNC_TRANSPORT=nixl"
        )
    return None


def create_transport(name: str, agent_name: str, *, serves: bool) -> Transport:
    """Make a transport by name for one member.

    Args:
        agent_name: unique in the cluster.
        serves: peers will read memory that this member registers.
    """
    if name == "nixl":
        from weightsync.actors.nixl_transport import NixlTransport

        return NixlTransport(agent_name, serves)
    if name == "rdt":
        from weightsync.actors.rdt_transport import RdtTransport

        return RdtTransport()
    if name == "object_store":
        from weightsync.actors.object_store_transport import ObjectStoreTransport

        return ObjectStoreTransport()
    raise ValueError(f"unknown transport {name!r}")
