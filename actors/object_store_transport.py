"""The fallback where NIXL cannot load: the producer actor packs runs, Ray's object store carries them.

Exact bytes like every transport, two extra copies and the producer's CPU. The thing to watch: source
addresses are offsets into the producer's mirror of its trainer's shard (see `shared_memory`), not pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from weightsync.actors.packed_runs import RegisteredStorages, scatter_runs
from weightsync.actors.transport import Peer, PreparedRead, ReadContext, ReadFailedError, Transport
from weightsync.protocol.errors import SyncError


@dataclass(frozen=True)
class _Runs:
    src_offset: np.ndarray
    dst_addr: np.ndarray
    nbytes: np.ndarray


class ObjectStoreTransport(Transport):
    """Packed runs through Ray's object store."""

    name = "object_store"
    reads_trainer_memory = False
    fetches_slots = False

    def __init__(self) -> None:
        super().__init__()
        self._registered = RegisteredStorages()

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise SyncError(
                    f"the object_store transport writes host memory only, and a destination is on {tensor.device}; "
                    "install `nixl`"
                )
        self._registered.add(tensors)

    def deregister(self, tensors: Iterable[torch.Tensor]) -> None:
        self._registered.remove(tensors)

    def metadata(self) -> bytes:
        return b""

    def connect(self, peer: Peer) -> None:
        del peer

    def prepare(self, peer: Peer, src_addr: np.ndarray, dst_addr: np.ndarray, nbytes: np.ndarray) -> PreparedRead:
        self._registered.check(dst_addr, nbytes)
        return PreparedRead(peer, int(nbytes.sum()), _Runs(src_addr, dst_addr, nbytes))

    def post(self, read: PreparedRead, context: ReadContext) -> Callable[[], bool]:
        reply = read.peer.actor.read_runs.remote(
            read.handle.src_offset, read.handle.nbytes, context.consumer_id, context.epoch
        )

        def over() -> bool:
            if not ray.wait([reply], timeout=0)[0]:
                return False
            try:
                packed = ray.get(reply)
            except ray.exceptions.RayError as error:
                why = f"rank {read.peer.rank}'s producer did not answer ({type(error).__name__}: {error})"
                raise ReadFailedError(why, [read]) from error
            scatter_runs(packed, read.handle.dst_addr, read.handle.nbytes)
            return True

        return over

    def fetch_slot(self, peer: Peer, reply: Any, into: torch.Tensor, context: ReadContext) -> None:
        del peer, context
        into[: len(reply)].numpy()[:] = reply

    def release(self, reads: Iterable[PreparedRead]) -> None:
        del reads

    def carrier(self, peer: Peer) -> str:
        del peer
        return "object store"

    def close(self) -> None:
        self._registered.remove(self._registered.tensors)
