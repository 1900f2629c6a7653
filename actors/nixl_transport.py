"""NIXL: one-sided reads out of a peer's registered memory (UCX: RDMA, shared memory, or TCP).

The peer's Python takes no part: a NIXL progress thread outside the interpreter answers for it.

The thing to watch: registration is by storage, never by view, and each storage once; metadata exported before
a registration does not cover it, so a peer that grew must be `connect`ed to again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weightsync.actors import ucx_endpoints
from weightsync.actors.nixl_package import load_nixl, paced_progress_thread
from weightsync.actors.reads import read_all
from weightsync.actors.transport import HOST, Device, Peer, PreparedRead, ReadContext, ReadFailedError, Transport
from weightsync.protocol.errors import SyncError


@dataclass(frozen=True)
class _NixlRead:
    """A transfer and the two descriptor lists it was made of; all three live and die together."""

    transfer: Any
    local: Any
    remote: Any

    def release(self) -> None:
        for handle in (self.transfer, self.local, self.remote):
            handle.release()


@dataclass(frozen=True)
class _Registration:
    handle: Any
    device: Device


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
    fetches_slots = True

    def __init__(self, agent_name: str, serves: bool) -> None:
        nixl = load_nixl()
        config = nixl.nixl_agent_config(enable_prog_thread=serves)
        with paced_progress_thread():
            self._agent = nixl.nixl_agent(agent_name, config)
        super().__init__()
        self._registered: dict[tuple[int, int], _Registration] = {}
        self._peers: dict[int, str] = {}
        self._endpoints: dict[str, set[ucx_endpoints.Endpoint]] = {}
        """What connecting to each remote agent opened."""
        self._reads: dict[int, _NixlRead] = {}
        self._slot_reads: dict[tuple[int, int, int, int], PreparedRead] = {}
        """(session, address there, address here, bytes) -> the read of a serve slot; a connect forgets them."""
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
            device = Device.of(tensor)
            handle = self._agent.register_memory([(*key, device.index, "")], device.kind)
            self._registered[key] = _Registration(handle, device)
            self.counts["registrations"] += 1

    def deregister(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            registration = self._registered.pop((storage.data_ptr(), storage.nbytes()), None)
            if registration is not None:
                self._agent.deregister_memory(registration.handle)

    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

    def connect(self, peer: Peer) -> None:
        self._forget_slots(peer.session)  # they may have moved, and their old place may be somebody else's
        before = ucx_endpoints.endpoints(self._agent.name)
        added = self._agent.add_remote_agent(peer.metadata)
        name = added.decode() if isinstance(added, bytes) else added
        self._peers[peer.session] = name
        self._endpoints.setdefault(name, set()).update(ucx_endpoints.endpoints(self._agent.name) - before)
        self.counts["connections"] += 1

    def carrier(self, peer: Peer) -> str:
        """As UCX says of the endpoint that `connect` opened; see `ucx_endpoints`."""
        if set(self._agent.backends) != {"UCX"}:
            return ", ".join(sorted(self._agent.backends)).lower()
        opened = self._endpoints.get(self._peers.get(peer.session, ""), set())
        found = ucx_endpoints.transports(self._agent.name, opened)
        return ucx_endpoints.carrier(found, device_memory=peer.device.kind == "VRAM")

    def prepare(self, peer: Peer, src_addr: np.ndarray, dst_addr: np.ndarray, nbytes: np.ndarray) -> PreparedRead:
        if not len(src_addr) == len(dst_addr) == len(nbytes):
            raise ValueError(f"runs disagree in number: {len(src_addr)}, {len(dst_addr)}, {len(nbytes)}")
        here, there = self._device_of(dst_addr), peer.device
        try:
            local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(dst_addr, nbytes, here), here.kind)
        except Exception as error:
            raise SyncError(
                f"a read from rank {peer.rank} would write memory that was not registered ({type(error).__name__})"
            ) from error
        try:
            remote = self._agent.prep_xfer_dlist(
                self._peers[peer.session], _descriptors(src_addr, nbytes, there), there.kind
            )
        except Exception as error:
            raise SyncError(
                f"rank {peer.rank} did not register the memory this plan reads ({type(error).__name__}); "
                "its layout changed after it was published"
            ) from error
        index = np.arange(len(nbytes), dtype=np.int32)
        read = _NixlRead(self._agent.make_prepped_xfer("READ", local, index, remote, index), local, remote)
        self._reads[id(read)] = read
        self.counts["descriptor_lists"] += 1
        return PreparedRead(peer, int(nbytes.sum()), read)

    def post(self, read: PreparedRead, context: ReadContext) -> Callable[[], bool]:
        del context
        if self._over(self._agent.transfer, read):
            return lambda: True
        return lambda: self._over(self._agent.check_xfer_state, read)

    def fetch_slot(self, peer: Peer, reply: Any, into: torch.Tensor, context: ReadContext) -> None:
        addr, nbytes = reply
        key = (peer.session, addr, into.data_ptr(), nbytes)
        if key not in self._slot_reads:
            self._slot_reads[key] = self.prepare(
                peer,
                np.array([addr], dtype=np.uint64),
                np.array([into.data_ptr()], dtype=np.uint64),
                np.array([nbytes], dtype=np.int64),
            )
        read_all(self, [self._slot_reads[key]], context)

    def release(self, reads: Iterable[PreparedRead]) -> None:
        for read in reads:
            if self._reads.pop(id(read.handle), None) is not None:
                read.handle.release()

    def _forget_slots(self, session: int) -> None:
        gone = [key for key in self._slot_reads if key[0] == session]
        self.release(self._slot_reads.pop(key) for key in gone)

    def _device_of(self, addr: np.ndarray) -> Device:
        """Where destinations of ours lie; a descriptor list speaks of one memory only."""
        if len(known := {registration.device for registration in self._registered.values()}) < 2:
            return known.pop() if known else HOST
        starts = sorted(self._registered)
        at = np.searchsorted(np.array([start for start, _ in starts], dtype=np.uint64), addr, side="right") - 1
        devices = {self._registered[starts[index]].device for index in np.unique(at).tolist() if index >= 0}
        if len(devices) > 1:
            raise SyncError(f"one read cannot write to {' and '.join(sorted(map(str, devices)))}; split the chunk")
        return devices.pop() if devices else HOST

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for read in self._reads.values():
            read.release()
        for name in set(self._peers.values()):
            self._agent.remove_remote_agent(name)
        for registration in self._registered.values():
            self._agent.deregister_memory(registration.handle)
        self._reads, self._slot_reads, self._peers, self._registered, self._endpoints = {}, {}, {}, {}, {}

    @staticmethod
    def _over(step: Callable[[Any], str], read: PreparedRead) -> bool:
        """Post or poll a transfer."""
        try:
            state = step(read.handle.transfer)
        except Exception as error:
            raise ReadFailedError(f"{type(error).__name__}: {error}", [read]) from error
        if state not in ("PROC", "DONE"):
            raise ReadFailedError(f"NIXL state {state}", [read])
        return state == "DONE"


def _descriptors(addr: np.ndarray, nbytes: np.ndarray, device: Device) -> np.ndarray:
    """NIXL's N x 3 form: address, bytes, device id."""
    table = np.zeros((len(addr), 3), dtype=np.uint64)
    table[:, 0] = addr
    table[:, 1] = nbytes
    table[:, 2] = device.index
    return table
