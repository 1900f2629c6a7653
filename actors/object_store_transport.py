"""The fallback where NIXL cannot load: the producer actor packs runs, Ray's object store carries them.

Exact bytes like every transport, two extra copies and the producer's CPU. The thing to watch: source
addresses are offsets into the producer's mirror of its trainer's shard (see `shared_memory`), not pointers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

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

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise SyncError(
                    f"the object_store transport writes host memory only, and a destination is on {tensor.device}; "
                    "install `nixl`"
                )

    def metadata(self) -> bytes:
        return b""

    def connect(self, peer: Peer) -> None:
        del peer

    def prepare(self, peer: Peer, src_addr: np.ndarray, dst_addr: np.ndarray, nbytes: np.ndarray) -> PreparedRead:
        return PreparedRead(peer, int(nbytes.sum()), _Runs(src_addr, dst_addr, nbytes))

    def read(
        self,
        reads: Sequence[PreparedRead],
        context: ReadContext,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        asked = [
            read.peer.actor.read_runs.remote(
                read.handle.src_offset, read.handle.nbytes, context.consumer_id, context.epoch
            )
            for read in reads
        ]
        failed: list[PreparedRead] = []
        why = ""
        for read, ref in zip(reads, asked, strict=True):
            try:
                packed = ray.get(ref, timeout=context.stall_timeout_s)
            except ray.exceptions.RayError as error:
                why = why or (
                    f"epoch {context.epoch}: rank {read.peer.rank}'s producer did not answer "
                    f"({type(error).__name__}: {error})"
                )
                failed.append(read)
                continue
            _scatter(packed, read.handle)
            on_bytes(read.nbytes)
        if failed:
            raise ReadFailedError(why, failed)

    def fetch_slot(self, peer: Peer, reply: Any, into: torch.Tensor, context: ReadContext) -> None:
        del peer, context
        into[: len(reply)].numpy()[:] = reply

    def release(self, reads: Iterable[PreparedRead]) -> None:
        del reads

    def close(self) -> None:
        pass


def _scatter(packed: np.ndarray, runs: _Runs) -> None:
    base = packed.ctypes.data
    starts = np.concatenate([[0], np.cumsum(runs.nbytes)[:-1]])
    for dst, start, nbytes in zip(runs.dst_addr.tolist(), starts.tolist(), runs.nbytes.tolist(), strict=True):
        ctypes.memmove(dst, base + start, nbytes)
