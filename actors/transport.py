"""How bytes get from a producer's memory into a consumer's: one interface, and the choice between ways.

A transport has two faces. The owner of memory `register`s it and hands out `metadata`; a reader `connect`s to
that, `prepare`s reads once per layout and `read`s them once per version. The thing to watch: source addresses
belong to the peer's address space and destination addresses to ours; both sides must have been registered,
and a transport refuses to touch anything that was not.

`nixl` reads the trainer's memory one-sidedly. `object_store` needs nothing but Ray: the producer actor packs
the runs out of a shared-memory mirror of the rank's shard, so it costs the trainer one copy of its shard.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from weightsync.protocol.errors import StallError, SyncError, TransportUnavailableError

TRANSPORT_NAMES = ("nixl", "object_store")


@dataclass(frozen=True)
class Peer:
    """Where a session's memory is reached: its transport metadata, and the producer actor behind it."""

    session: int
    rank: int
    metadata: bytes
    actor: Any


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

    @abstractmethod
    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the storages of these tensors readable by peers and usable as destinations."""

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs to `connect` to the memory registered so far."""

    @abstractmethod
    def connect(self, peer: Peer) -> None:
        """Learn (or refresh) how to reach a peer's memory."""

    @abstractmethod
    def prepare(self, peer: Peer, src_addr: np.ndarray, dst_addr: np.ndarray, nbytes: np.ndarray) -> PreparedRead:
        """Check and prepare runs (uint64 addresses, int64 byte counts, equal lengths) for repeated reads."""

    @abstractmethod
    def read(
        self,
        reads: Sequence[PreparedRead],
        context: ReadContext,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Execute prepared reads, all posted before any is waited for.

        Returns or raises when none is under way any more: a late write would hit what comes after it.

        Args:
            on_bytes: called with the bytes of each read that completed.

        Raises:
            ReadFailedError: a peer is gone or refuses; the message names its rank.
            ReadHungError: no read completed for the context's stall timeout.
        """

    @abstractmethod
    def fetch_slot(self, peer: Peer, reply: Any, into: torch.Tensor, context: ReadContext) -> None:
        """Bring a packed serve slot (a producer's reply to `serve`) into the start of `into` (uint8)."""

    @abstractmethod
    def release(self, reads: Iterable[PreparedRead]) -> None:
        """Give prepared reads back, after a change of layout."""

    @abstractmethod
    def close(self) -> None:
        """Release prepared reads, peers and registrations. Idempotent."""

    @property
    def description(self) -> str:
        """For status: the transport and what carries it."""
        return self.name


def nixl_problem() -> str | None:
    """Why NIXL cannot be used in this process, in one line with the remedy; None if it can."""
    if importlib.util.find_spec("nixl") is None:
        return "NIXL is not installed; run `pip install nixl`, or set WEIGHTSYNC_TRANSPORT=auto or object_store"
    try:
        importlib.import_module("nixl")
    except Exception as error:
        return (
            f"NIXL is installed but does not import ({type(error).__name__}: {error}); reinstall `nixl`, or set "
            "WEIGHTSYNC_TRANSPORT=auto or object_store"
        )
    return None


def choose_transport(wanted: str) -> tuple[str, str]:
    """Resolve a setting ("auto", "nixl", "object_store") to a transport name and the reason for it.

    Raises:
        TransportUnavailableError: NIXL is demanded and cannot be used; the message carries the remedy.
        ValueError: not a transport.
    """
    if wanted not in ("auto", *TRANSPORT_NAMES):
        raise ValueError(f"transport must be one of auto, {', '.join(TRANSPORT_NAMES)}; got {wanted!r}")
    if wanted == "object_store":
        return "object_store", "set by configuration"
    problem = nixl_problem()
    if problem is None:
        return "nixl", "NIXL imports here"
    if wanted == "nixl":
        raise TransportUnavailableError(problem)
    return "object_store", problem


def create_transport(name: str, agent_name: str, *, serves: bool) -> Transport:
    """Make a transport by name for one member.

    Args:
        agent_name: unique in the cluster.
        serves: peers will read memory that this member registers.
    """
    if name == "nixl":
        from weightsync.actors.nixl_transport import NixlTransport

        return NixlTransport(agent_name, serves)
    if name == "object_store":
        from weightsync.actors.object_store_transport import ObjectStoreTransport

        return ObjectStoreTransport()
    raise ValueError(f"unknown transport {name!r}")
