"""NIXL: one-sided reads out of a peer's registered memory (UCX: RDMA, shared memory, or TCP).

The peer's Python takes no part: a NIXL progress thread outside the interpreter answers for it. It is paced: as
NIXL 1.5 makes it, it spins and takes a whole core per agent (measured: 1.00 CPU s/s idle against 0.03 with a
pause of 100 us, and 0.3 s instead of 0.02 s for a tiny sync on two cores).

The thing to watch: registration is by storage, never by view, and each storage once; metadata exported before
a registration does not cover it, so a peer that grew must be `connect`ed to again.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weightsync.actors.transport import Peer, PreparedRead, ReadContext, ReadFailedError, ReadHungError, Transport
from weightsync.protocol.errors import SyncError

_PROGRESS_PAUSE_US = 100
_patch_lock = threading.Lock()
_FIRST_POLL_S = 50e-6
_LONGEST_POLL_S = 2e-3


@dataclass(frozen=True)
class _NixlRead:
    """A transfer and the two descriptor lists it was made of; all three live and die together."""

    transfer: Any
    local: Any
    remote: Any

    def release(self) -> None:
        for handle in (self.transfer, self.local, self.remote):
            handle.release()


def _memory_kind(tensor: torch.Tensor) -> str:
    return "DRAM" if tensor.device.type == "cpu" else "VRAM"


class NixlTransport(Transport):
    """A NIXL agent of one member.

    Args:
        agent_name: unique in the cluster.
        serves: peers will read from this process; a pure reader drives its own transfers and needs no thread.

    Raises:
        ImportError: NIXL is not installed.
    """

    name = "nixl"
    reads_trainer_memory = True

    def __init__(self, agent_name: str, serves: bool) -> None:
        nixl = importlib.import_module("nixl")
        if "NIXL_LOG_LEVEL" not in os.environ:  # it logs to stdout, where scripts read our JSON
            logging.getLogger("nixl").setLevel(logging.WARNING)
        config = nixl.nixl_agent_config(enable_prog_thread=serves)
        with _paced_progress_thread():
            self._agent = nixl.nixl_agent(agent_name, config)
        self._registered: dict[tuple[int, int], Any] = {}
        self._peers: dict[int, str] = {}
        self._reads: dict[int, _NixlRead] = {}
        self._kind = "DRAM"
        self._closed = False

    @property
    def description(self) -> str:
        return "nixl (" + ", ".join(sorted(self._agent.backends)) + ")"

    @property
    def registered_bytes(self) -> int:
        """Bytes registered now, each storage once."""
        return sum(nbytes for _, nbytes in self._registered)

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes())
            if key[1] == 0 or key in self._registered:
                continue
            self._kind = _memory_kind(tensor)
            device_id = tensor.device.index or 0
            self._registered[key] = self._agent.register_memory([(key[0], key[1], device_id, "")], self._kind)

    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

    def connect(self, peer: Peer) -> None:
        name = self._agent.add_remote_agent(peer.metadata)
        self._peers[peer.session] = name.decode() if isinstance(name, bytes) else name

    def prepare(self, peer: Peer, src_addr: np.ndarray, dst_addr: np.ndarray, nbytes: np.ndarray) -> PreparedRead:
        if not len(src_addr) == len(dst_addr) == len(nbytes):
            raise ValueError(f"runs disagree in number: {len(src_addr)}, {len(dst_addr)}, {len(nbytes)}")
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(dst_addr, nbytes), self._kind)
        try:
            remote = self._agent.prep_xfer_dlist(self._peers[peer.session], _descriptors(src_addr, nbytes), self._kind)
        except Exception as error:
            raise SyncError(
                f"rank {peer.rank} did not register the memory this plan reads ({type(error).__name__}); "
                "its layout changed after it was published"
            ) from error
        index = np.arange(len(nbytes), dtype=np.int32)
        read = _NixlRead(self._agent.make_prepped_xfer("READ", local, index, remote, index), local, remote)
        self._reads[id(read)] = read
        return PreparedRead(peer, int(nbytes.sum()), read)

    def read(
        self,
        reads: Sequence[PreparedRead],
        context: ReadContext,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        failed: dict[int, str] = {}
        pending, step, pause_s = list(reads), self._agent.transfer, _FIRST_POLL_S
        moved_at = time.monotonic()
        while pending:
            running = [read for read in pending if self._advance(read, step, failed, on_bytes)]
            now = time.monotonic()
            if len(running) < len(pending):
                moved_at = now
            elif now - moved_at > context.stall_timeout_s:
                raise ReadHungError(f"{_described(running, context)}: nothing came for {context.stall_timeout_s:g} s")
            pending, step = running, self._agent.check_xfer_state
            if pending:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        if failed:
            lost = [read for read in reads if id(read) in failed]
            raise ReadFailedError(f"{_described(lost, context)} failed ({failed[id(lost[0])]})", lost)

    def fetch_slot(self, peer: Peer, reply: Any, into: torch.Tensor, context: ReadContext) -> None:
        addr, nbytes = reply
        read = self.prepare(
            peer,
            np.array([addr], dtype=np.uint64),
            np.array([into.data_ptr()], dtype=np.uint64),
            np.array([nbytes], dtype=np.int64),
        )
        try:
            self.read([read], context)
        finally:
            self.release([read])

    def release(self, reads: Iterable[PreparedRead]) -> None:
        for read in reads:
            if self._reads.pop(id(read.handle), None) is not None:
                read.handle.release()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for read in self._reads.values():
            read.release()
        for name in set(self._peers.values()):
            self._agent.remove_remote_agent(name)
        for registration in self._registered.values():
            self._agent.deregister_memory(registration)
        self._reads, self._peers, self._registered = {}, {}, {}

    def _advance(
        self,
        read: PreparedRead,
        step: Callable[[Any], str],
        failed: dict[int, str],
        on_bytes: Callable[[int], None],
    ) -> bool:
        """Post or poll one read; True while it is still running. Notes in `failed` why it failed."""
        try:
            state = step(read.handle.transfer)
        except Exception as error:
            failed[id(read)] = f"{type(error).__name__}: {error}"
            return False
        if state == "PROC":
            return True
        if state == "DONE":
            on_bytes(read.nbytes)
        else:
            failed[id(read)] = f"NIXL state {state}"
        return False


@contextmanager
def _paced_progress_thread() -> Iterator[None]:
    """Agents made inside get a progress thread that pauses; NIXL's Python API has no argument for it."""
    bindings: Any = importlib.import_module("nixl._bindings")
    original = bindings.nixlAgentConfig

    class Paced(original):  # type: ignore[misc,valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _PROGRESS_PAUSE_US if name == "pthrDelay" else value)

    with _patch_lock:
        bindings.nixlAgentConfig = Paced
        try:
            yield
        finally:
            bindings.nixlAgentConfig = original


def _described(reads: Sequence[PreparedRead], context: ReadContext) -> str:
    ranks = sorted({read.peer.rank for read in reads})
    return (
        f"epoch {context.epoch}: reading {sum(read.nbytes for read in reads)} bytes from "
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    )


def _descriptors(addr: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """NIXL's N x 3 form: address, bytes, device id."""
    table = np.zeros((len(addr), 3), dtype=np.uint64)
    table[:, 0] = addr
    table[:, 1] = nbytes
    return table
