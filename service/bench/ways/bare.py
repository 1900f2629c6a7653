"""The limits: bare NIXL READs, and a copy within one process.

Reads are posted by the worker on an agent of its own and polled without pause; the trainer's agent only answers.
Descriptor lists are prepared once, from the layout and not from any plan of weightsync's.
"""

from __future__ import annotations

import importlib
import secrets
from typing import Any

import numpy as np
import torch
import xxhash

from weightsync.actors.transport import Transport, create_transport
from weightsync.service.bench.layout import Layout, runs_between
from weightsync.service.bench.members import Member, addresses
from weightsync.service.bench.results import REFERENCE
from weightsync.service.bench.stage import Cast, seconds
from weightsync.service.bench.values import fill
from weightsync.service.bench.ways.base import Needs, Way

_Runs = tuple[np.ndarray, np.ndarray, np.ndarray]


class BareRuns(Way):
    """READs of the very runs that the layout asks for."""

    def open(self, cast: Cast) -> None:
        served = cast.each(cast.trainers, _serve)
        cast.by_worker(_prepare_runs, [[served]] * len(cast.workers))

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {REFERENCE: seconds(lambda: cast.each(cast.workers, _read))}

    def close(self, cast: Cast) -> None:
        cast.each(cast.workers, _release)
        cast.each(cast.trainers, _unserve)


class BareOneRun(Way):
    """READs of as many bytes, one run from each trainer, out of buffers of its own: what the link could do at most."""

    def needs(self, layout: Layout) -> Needs:
        return Needs(memory=2 * layout.wanted_nbytes)

    def open(self, cast: Cast) -> None:
        wanted = [sum(box.nbytes for box in cast.layout.wanted(i).values()) for i in range(len(cast.workers))]
        shares = [nbytes // len(cast.trainers) for nbytes in wanted]
        served = cast.each(cast.trainers, _serve_buffer, max(shares))
        cast.by_worker(_prepare_one_run, [(served, share) for share in shares])
        self._shares = shares

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {"bare NIXL READ, one run": seconds(lambda: cast.each(cast.workers, _read))}

    def set_version(self, cast: Cast, version: int) -> None:
        cast.each(cast.trainers, _change_buffer)

    def wrong(self, cast: Cast, version: int) -> list[str]:
        sent = [cast.each(cast.trainers, _digest_sent, share) for share in self._shares]
        received = cast.each(cast.workers, _digests_received)
        return [f"worker {i}: wrong bytes" for i in range(len(received)) if sent[i] != received[i]]

    def close(self, cast: Cast) -> None:
        cast.each(cast.workers, _release)
        cast.each(cast.trainers, _unserve)


class Memcpy(Way):
    """Each worker copies as many bytes from memory of its own: what its core could do at most."""

    def needs(self, layout: Layout) -> Needs:
        return Needs(memory=layout.wanted_nbytes)

    def open(self, cast: Cast) -> None:
        cast.each(cast.workers, _make_twin)

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {"memcpy": seconds(lambda: cast.each(cast.workers, _copy_twin))}

    def set_version(self, cast: Cast, version: int) -> None:
        cast.each(cast.workers, _fill_twin, version)

    def close(self, cast: Cast) -> None:
        cast.each(cast.workers, _drop_twin)


# -- in the trainer ---------------------------------------------------------------------------------------


def _serve(member: Member) -> tuple[bytes, dict[str, int]]:
    """Make the shards readable; (agent metadata, addresses)."""
    agent: Transport = create_transport("nixl", f"bench-{secrets.token_hex(4)}", serves=True)
    agent.register(member.tensors.values())
    member.kept["agent"] = agent
    return agent.metadata(), addresses(member)


def _serve_buffer(member: Member, nbytes: int) -> tuple[bytes, int]:
    agent: Transport = create_transport("nixl", f"bench-{secrets.token_hex(4)}", serves=True)
    generator = torch.Generator().manual_seed(member.index)
    buffer = torch.randint(-(1 << 62), 1 << 62, (-(-nbytes // 8),), dtype=torch.int64, generator=generator)
    agent.register([buffer])
    member.kept.update(agent=agent, buffer=buffer)
    return agent.metadata(), buffer.data_ptr()


def _change_buffer(member: Member) -> None:
    member.kept["buffer"].add_(0x0101_0101_0101_0101)


def _digest_sent(member: Member, nbytes: int) -> int:
    return _digest(member.kept["buffer"].view(torch.uint8)[:nbytes])


def _unserve(member: Member) -> None:
    member.kept.pop("agent").close()
    member.kept.clear()


# -- in the worker ----------------------------------------------------------------------------------------


class _Reader:
    """A NIXL agent with prepared READs, one per trainer."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        nixl: Any = importlib.import_module("nixl")
        self._agent = nixl.nixl_agent(f"bench-{secrets.token_hex(4)}", nixl.nixl_agent_config(enable_prog_thread=False))
        self._registered = [
            self._agent.register_memory([(t.data_ptr(), t.nbytes, 0, "")], "DRAM") for t in tensors if t.nbytes
        ]
        self._peers: list[str] = []
        self._lists: list[Any] = []
        self._transfers: list[Any] = []

    def prepare(self, metadata: bytes, runs: _Runs) -> None:
        name = self._agent.add_remote_agent(metadata)
        self._peers.append(name.decode() if isinstance(name, bytes) else name)
        src, dst, nbytes = runs
        if not len(nbytes):
            return
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(dst, nbytes), "DRAM")
        remote = self._agent.prep_xfer_dlist(self._peers[-1], _descriptors(src, nbytes), "DRAM")
        index = np.arange(len(nbytes), dtype=np.int32)
        self._lists += [local, remote]
        self._transfers.append(self._agent.make_prepped_xfer("READ", local, index, remote, index))

    def read(self) -> None:
        pending, step = self._transfers, self._agent.transfer
        while pending:
            states = [(transfer, step(transfer)) for transfer in pending]
            if any(state not in ("PROC", "DONE") for _, state in states):
                raise RuntimeError(f"NIXL states {[state for _, state in states]}")
            pending, step = [t for t, state in states if state == "PROC"], self._agent.check_xfer_state

    def close(self) -> None:
        for handle in (*self._transfers, *self._lists):
            handle.release()
        for peer in self._peers:
            self._agent.remove_remote_agent(peer)
        for registration in self._registered:
            self._agent.deregister_memory(registration)


def _prepare_runs(member: Member, served: list[tuple[bytes, dict[str, int]]]) -> None:
    reader = _Reader(list(member.tensors.values()))
    for rank, (metadata, source) in enumerate(served):
        reader.prepare(metadata, runs_between(member.layout, rank, member.index, source, addresses(member)))
    member.kept["reader"] = reader


def _prepare_one_run(member: Member, served: list[tuple[bytes, int]], share: int) -> None:
    buffer = torch.full((len(served) * share,), 0, dtype=torch.uint8)
    reader = _Reader([buffer])
    for rank, (metadata, source) in enumerate(served):
        runs = (np.array([source]), np.array([buffer.data_ptr() + rank * share]), np.array([share]))
        reader.prepare(metadata, runs)
    member.kept.update(reader=reader, parts=list(buffer.split(share)))


def _read(member: Member) -> None:
    member.kept["reader"].read()


def _digests_received(member: Member) -> list[int]:
    return [_digest(part) for part in member.kept["parts"]]


def _release(member: Member) -> None:
    member.kept.pop("reader").close()
    member.kept.clear()


def _make_twin(member: Member) -> None:
    member.kept["twin"] = {name: torch.full_like(tensor, 0) for name, tensor in member.tensors.items()}


def _fill_twin(member: Member, version: int) -> None:
    fill(member.layout, member.boxes, member.kept["twin"], version)


def _copy_twin(member: Member) -> None:
    for name, tensor in member.tensors.items():
        tensor.copy_(member.kept["twin"][name])


def _drop_twin(member: Member) -> None:
    member.kept.clear()


def _digest(tensor: torch.Tensor) -> int:
    array: Any = tensor.numpy()
    return xxhash.xxh3_64_intdigest(array)


def _descriptors(addr: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """NIXL's N x 3 form: address, bytes, device id."""
    table = np.zeros((len(addr), 3), dtype=np.uint64)
    table[:, 0], table[:, 1] = addr, nbytes
    return table
