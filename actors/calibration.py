"""What reading from one node to another costs, measured on the memory that will be read.

A few reads of published weights into scratch, thrown away: whatever the trainer writes meanwhile does no harm. The
thing to watch: the first read of a link warms it up and says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import ray
import torch

from weightsync.actors.moves import measure_moves
from weightsync.actors.transport import Peer, PreparedRead, ReadContext, Transport
from weightsync.protocol.cost_model import LinkCosts, MoveCosts
from weightsync.protocol.messages import ProducerRegistration

_LARGE_BYTES = 16 << 20
_RUN_BYTES = 2048
_RUNS = 1024
_SMALLEST_BYTES = 1 << 20
"""Less than this tells nothing about a link."""
_REPEATS = 3
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ReadCosts:
    """What reads cost: bytes per second of a large one, seconds per separated run on top of its bytes."""

    bytes_per_s: float
    descriptor_s: float


def measure_link(
    transport: Transport, peer: Peer, producer: ProducerRegistration, device: torch.device
) -> LinkCosts | None:
    """Costs of the link to one rank, in a few hundred milliseconds at most.

    Args:
        transport: connected to `peer`.
        device: where this worker's weights are.

    Returns:
        None if the rank publishes too little to measure with, or reads fail: a sync will say why.
    """
    shards = [(shard.numel * tensor.elsize, shard.addr) for tensor in producer.table for shard in tensor.shards]
    nbytes, addr = max(shards, default=(0, 0))
    if nbytes < _SMALLEST_BYTES:
        return None
    size = min(nbytes, _LARGE_BYTES)
    scratch = torch.zeros(size, dtype=torch.uint8, device=device)
    transport.register([scratch])
    try:
        reads = measure_reads(transport, peer, addr, scratch)
        control_s = _fastest(lambda: ray.get(peer.actor.snapshot.remote(), timeout=_TIMEOUT_S))
    finally:
        transport.deregister([scratch])
    pack, scatter = producer.move_costs or MoveCosts(), measure_moves(device)
    return LinkCosts(
        reads.bytes_per_s,
        reads.descriptor_s,
        control_s,
        pack.bytes_per_s,
        pack.run_s,
        scatter.bytes_per_s,
        scatter.run_s,
        measured=True,
    )


def measure_reads(transport: Transport, peer: Peer, addr: int, scratch: torch.Tensor) -> ReadCosts:
    """Read as many bytes as `scratch` has, once in one run and once in many short ones; the fastest of three each.

    Args:
        transport: connected to `peer`.
        addr: of registered memory there, as large as `scratch`.
        scratch: uint8, registered here; it is overwritten.

    Raises:
        SyncError: a read is refused or fails.
        TimeoutError: one takes more than 10 s.
    """
    size = scratch.numel()
    count = min(_RUNS, size // (2 * _RUN_BYTES))
    starts = np.arange(count, dtype=np.uint64) * np.uint64(2 * _RUN_BYTES)
    reads: list[PreparedRead] = []
    try:
        for offsets, lengths in ((np.zeros(1, dtype=np.uint64), [size]), (starts, [_RUN_BYTES] * count)):
            source, target = offsets + np.uint64(addr), offsets + np.uint64(scratch.data_ptr())
            reads.append(transport.prepare(peer, source, target, np.array(lengths, dtype=np.int64)))
        large_s, small_s = (_fastest(lambda read=read: _read(transport, read)) for read in reads)  # type: ignore[misc]
    finally:
        transport.release(reads)
    bytes_per_s = size / large_s
    return ReadCosts(bytes_per_s, max((small_s - count * _RUN_BYTES / bytes_per_s) / count, 1e-8))


def _fastest(work: Callable[[], object]) -> float:
    work()
    return min(_seconds(work) for _ in range(_REPEATS))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _read(transport: Transport, read: PreparedRead) -> None:
    """Without the pauses of a sync, which are longer than what is measured."""
    over, deadline = transport.post(read, ReadContext(0, 0, _TIMEOUT_S)), time.monotonic() + _TIMEOUT_S
    while not over():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{read.nbytes} bytes from rank {read.peer.rank} took more than {_TIMEOUT_S:g} s")
