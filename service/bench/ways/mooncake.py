"""Mooncake's transfer engine, over TCP as its wheel without CUDA can: the very same runs, in batches.

Its threads stay in the process, so its members live for one turn only.
"""

from __future__ import annotations

import numpy as np

from weightsync.service.bench.layout import Layout, runs_between
from weightsync.service.bench.members import Member, addresses
from weightsync.service.bench.stage import Cast, seconds
from weightsync.service.bench.ways.base import Needs, Way, missing_package

_BATCH = 512
"""Runs in one call."""


class Mooncake(Way):
    own_members = True

    def refusal(self, layout: Layout) -> str | None:
        return missing_package("mooncake.engine", "Mooncake (mooncake-transfer-engine-non-cuda)")

    def needs(self, layout: Layout) -> Needs:
        return Needs(memory=layout.nbytes + layout.wanted_nbytes)

    def open(self, cast: Cast) -> None:
        served = cast.each(cast.trainers, _serve)
        cast.each(cast.workers, _prepare, served)

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {"Mooncake (TCP)": seconds(lambda: cast.each(cast.workers, _read))}


def _engine(member: Member) -> str:
    """Start an engine and register the member's tensors; where it answers."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the transfer engine does not initialise")
    for tensor in member.tensors.values():
        if engine.register_memory(tensor.data_ptr(), tensor.nbytes):
            raise RuntimeError("the transfer engine does not register memory")
    member.kept["engine"] = engine
    return f"127.0.0.1:{engine.get_rpc_port()}"


def _serve(member: Member) -> tuple[str, dict[str, int]]:
    return _engine(member), addresses(member)


def _prepare(member: Member, served: list[tuple[str, dict[str, int]]]) -> None:
    _engine(member)
    batches = member.kept["batches"] = []
    for rank, (host, source) in enumerate(served):
        src, dst, nbytes = runs_between(member.layout, rank, member.index, source, addresses(member))
        for part in np.array_split(np.arange(len(nbytes)), max(1, -(-len(nbytes) // _BATCH))):
            batch = (host, dst[part].tolist(), src[part].tolist(), nbytes[part].tolist())
            batches.append(batch)


def _read(member: Member) -> None:
    engine = member.kept["engine"]
    for host, dst, src, nbytes in member.kept["batches"]:
        if nbytes and engine.batch_transfer_sync_read(host, dst, src, nbytes):
            raise RuntimeError(f"Mooncake failed to read {len(nbytes)} runs from {host}")
