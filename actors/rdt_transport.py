"""Ray Direct Transport: Ray hands the descriptors over and drives NIXL, we say what is read and where it lands.

The producer actor lends runs of its mirror as tensors, and a reader receives each straight into the registered memory
it is for. A tensor costs Ray about 80 us (measured: 4,096 of them, 0.3 s), whatever its size, so shorter runs are
packed into one by the producer and scattered here. Unlike `nixl` the producer's Python takes part in every read.

The thing to watch: Ray keeps one NIXL agent per process, which is neither thread-safe nor ours. Members of one process
take turns with it, it stays when a transport is closed, and a fetch that hangs holds the others up. Only the producer
must be made with `enable_tensor_transport`; a reader may be any process that Ray knows.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.experimental.rdt import deregister_nixl_memory, register_nixl_memory, set_target_for_ref
from ray.experimental.rdt.util import get_tensor_transport_manager

from weightsync.actors import ucx_endpoints
from weightsync.actors.nixl_package import load_nixl, paced_progress_thread
from weightsync.actors.packed_runs import Int64, RegisteredStorages, pack_starts
from weightsync.actors.reads import Pause
from weightsync.actors.transport import Peer, PreparedRead, ReadContext, ReadFailedError, ReadHungError, Transport
from weightsync.protocol.errors import TransportUnavailableError

LEND_FROM_BYTES = 256 << 10
"""Shorter runs are packed: copying this many bytes twice takes about as long as Ray takes for one tensor more."""
_RAY_NAME = "nixl"
_agent_lock = threading.RLock()
_carriers: dict[str, str] = {}
"""Per actor what carries its bytes to this process; like the agent, whose endpoints tell it, one for all members."""


@dataclass(frozen=True)
class RunsRequest:
    """What a reader asks a producer for: offsets and bytes in its mirror, those to lend and those to pack.

    `read_id` names the memory that the packed ones go to; one read of it is under way at a time.
    """

    read_id: str
    lent_offset: Int64
    lent_nbytes: Int64
    packed_offset: Int64
    packed_nbytes: Int64


@dataclass(frozen=True)
class _RdtRead:
    """A request, and where its tensors land: the lent ones in place, the last one, if any, is scattered."""

    request: RunsRequest
    targets: list[torch.Tensor]
    scattered: list[torch.Tensor]

    def scatter(self) -> None:
        starts = pack_starts(self.request.packed_nbytes).tolist()
        for start, destination in zip(starts, self.scattered, strict=True):
            destination.copy_(self.targets[-1][start : start + destination.numel()])


class RdtTransport(Transport):
    """Views and packs of a producer's mirror through Ray Direct Transport."""

    name = "rdt"
    reads_trainer_memory = False
    fetches_slots = True

    def __init__(self) -> None:
        super().__init__()
        self._registered = RegisteredStorages()
        self._reads: dict[int, PreparedRead] = {}

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in self._registered.add(tensors):
            with _agent_lock:
                _ray_agent()
                register_nixl_memory(tensor)

    def deregister(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in self._registered.remove(tensors):
            with _agent_lock:
                deregister_nixl_memory(tensor)

    def metadata(self) -> bytes:
        return b""

    def connect(self, peer: Peer) -> None:
        """Ray connects with the first read."""

    def prepare(self, peer: Peer, src_addr: np.ndarray, dst_addr: np.ndarray, nbytes: np.ndarray) -> PreparedRead:
        wanted = nbytes > 0
        offset, dst_addr, lengths = src_addr[wanted].astype(np.int64), dst_addr[wanted], nbytes[wanted]
        lent = lengths >= LEND_FROM_BYTES
        request = RunsRequest(secrets.token_hex(8), offset[lent], lengths[lent], offset[~lent], lengths[~lent])
        targets = self._registered.views(dst_addr[lent], lengths[lent])
        scattered = self._registered.views(dst_addr[~lent], lengths[~lent])
        if scattered:
            pack = torch.empty(int(lengths[~lent].sum()), dtype=torch.uint8, device=scattered[0].device)
            self.register([pack])
            targets.append(pack)
        read = PreparedRead(peer, int(nbytes.sum()), _RdtRead(request, targets, scattered))
        self._reads[id(read.handle)] = read
        return read

    def post(self, read: PreparedRead, context: ReadContext) -> Callable[[], bool]:
        if not read.handle.targets:
            return lambda: True
        call = _Asked(read.peer, "lend_runs", (read.handle.request, context.consumer_id, context.epoch))

        def over() -> bool:
            if not call.answered:
                return False
            why = self._fetch(call, read.handle.targets, context)
            if why is not None:
                raise ReadFailedError(f"rank {read.peer.rank}'s producer: {why}", [read])
            read.handle.scatter()
            return True

        return over

    def fetch_slot(self, peer: Peer, reply: Any, into: torch.Tensor, context: ReadContext) -> None:
        addr, nbytes = reply
        if not nbytes:
            return
        call = _Asked(peer, "lend_slot", (addr, nbytes, context.consumer_id, context.epoch))
        deadline, pause = time.monotonic() + context.stall_timeout_s, Pause()
        while not call.answered and time.monotonic() < deadline:
            pause.after(moved=False)
        why = self._fetch(call, [into[:nbytes]], context) if call.answered else "no answer in time"
        if why is not None:
            raise ReadFailedError(f"epoch {context.epoch}: rank {peer.rank}'s producer: {why}", ())

    def release(self, reads: Iterable[PreparedRead]) -> None:
        for read in reads:
            if self._reads.pop(id(read.handle), None) is None or not read.handle.scattered:
                continue
            self.deregister([read.handle.targets[-1]])
            forgotten = read.peer.actor.forget_runs.remote(read.handle.request.read_id)
            forgotten.future().add_done_callback(lambda reply: reply.exception())  # its actor may be gone already

    def carrier(self, peer: Peer) -> str:
        """As UCX says of the endpoint that the first read opened; see `ucx_endpoints`. Before that, unknown."""
        return _carriers.get(_actor_id(peer), "unknown")

    def close(self) -> None:
        self.release(list(self._reads.values()))
        self.deregister(self._registered.tensors)

    def _fetch(self, call: _Asked, targets: list[torch.Tensor], context: ReadContext) -> str | None:
        """Bring what the producer answered into `targets`; says why if it cannot be, and nothing is under way.

        Raises:
            ReadHungError: it neither comes nor fails.
        """
        if call.refused is not None:
            return call.refused
        with _agent_lock:
            agent = _ray_agent()
            before = ucx_endpoints.endpoints(agent.name) if _actor_id(call.peer) not in _carriers else None
            try:
                set_target_for_ref(call.ref, targets)
                ray.get(call.ref, timeout=context.stall_timeout_s)
            except (ray.exceptions.GetTimeoutError, ray.exceptions.ObjectFetchTimedOutError) as error:
                raise ReadHungError(
                    f"epoch {context.epoch}: reading from rank {call.peer.rank}: nothing came for "
                    f"{context.stall_timeout_s:g} s"
                ) from error
            except ray.exceptions.RayTaskError as error:
                return str(error.cause)
            except ray.exceptions.RayError as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if before is not None:
                opened = ucx_endpoints.endpoints(agent.name) - before
                names = ucx_endpoints.transports(agent.name, opened)
                _carriers[_actor_id(call.peer)] = ucx_endpoints.carrier(names, device_memory=targets[0].is_cuda)
        return None


class _Asked:
    """A call to a producer for tensors, under way.

    Ray first asks the actor whether it can, and waits for that without a limit; a stopped process would hold us for
    ever, so the call has a thread of its own, which is left behind if it does not come back.
    """

    def __init__(self, peer: Peer, method: str, arguments: tuple[Any, ...]) -> None:
        self.peer = peer
        self.ref: Any = None
        self.refused: str | None = None
        self.sent = threading.Event()
        threading.Thread(target=self._send, args=(method, arguments), name="weightsync-rdt-call", daemon=True).start()

    def _send(self, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self.ref = getattr(self.peer.actor, method).options(tensor_transport=_RAY_NAME).remote(*arguments)
        except Exception as error:
            self.refused = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        self.sent.set()

    @property
    def answered(self) -> bool:
        """It was answered, or refused."""
        if not self.sent.is_set():
            return False
        return self.refused is not None or bool(ray.wait([self.ref], timeout=0)[0])


def _actor_id(peer: Peer) -> str:
    return peer.actor._actor_id.hex()


def _ray_agent() -> Any:
    """Ray's NIXL agent of this process, made on first use.

    Raises:
        TransportUnavailableError: it cannot be made.
    """
    try:
        with paced_progress_thread():
            load_nixl()
            manager: Any = get_tensor_transport_manager(_RAY_NAME.upper())
            return manager.get_nixl_agent()
    except Exception as error:
        raise TransportUnavailableError(
            f"Ray Direct Transport cannot make its NIXL agent ({type(error).__name__}: {error}); set "
            "WEIGHTSYNC_TRANSPORT=nixl or object_store"
        ) from error
