"""Live mode: runs read one-sidedly out of trainer memory, straight to where the parameter wants them.

Planned once per layout: recorded copies become runs per (gather group, producer), and one prepared read each.
A version then only posts those. Copies that cannot land in place (another dtype, transposed element by
element) are read densely into scratch of the source's dtype and scattered by torch. The thing to watch: a
free signal follows the last read of the group it frees, never precedes it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from weightsync.actors.destinations import Destinations
from weightsync.actors.transport import Peer, PreparedRead, ReadContext, Transport
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import UnsupportedLayoutError
from weightsync.protocol.messages import LayoutSnapshot, PullStats
from weightsync.protocol.segments import PullPlanner, bounce_copy
from weightsync.protocol.shards import Source, build_sources, merge_shard_tables

_NOTHING: Callable[[int], None] = lambda nbytes: None  # noqa: E731


@dataclass
class _Runs:
    """Runs of one (group, session), as arrays to be joined."""

    src: list[np.ndarray] = field(default_factory=list)
    dst: list[np.ndarray] = field(default_factory=list)
    nbytes: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class _Scatter:
    """What was read already (dense scratch, or the same weight elsewhere), and where else it goes."""

    result: Callable[[], torch.Tensor]
    copy: RecordedCopy


class LivePull:
    """A prepared live pull of one worker.

    Args:
        layout: the complete model.
        copies: distinct copies with canonical source names.
        destinations: where they land.
        transport: this worker's transport, connected to `peers`.
        peers: per session (= rank), where its memory is.
        consumer_id: consumers take turns among exact replicas of a shard.
    """

    def __init__(
        self,
        layout: LayoutSnapshot,
        copies: Sequence[RecordedCopy],
        destinations: Destinations,
        transport: Transport,
        peers: Sequence[Peer],
        consumer_id: int,
    ) -> None:
        self._layout = layout
        self._consumer_id = consumer_id
        self._planner = PullPlanner()
        self._destinations = destinations
        self._transport = transport
        self._peers = peers
        self._scatters: dict[int, list[_Scatter]] = defaultdict(list)
        self._scratch: list[torch.Tensor] = []
        self._reads = self._prepare(copies)
        self.bytes_total = sum(read.nbytes for reads in self._reads.values() for read in reads)
        self.bytes_needed = needed_bytes(copies, layout)

    @property
    def scratch_bytes(self) -> int:
        return sum(scratch.untyped_storage().nbytes() for scratch in self._scratch)

    def run(
        self,
        context: ReadContext,
        on_bytes: Callable[[int], None] = _NOTHING,
        on_wait: Callable[[str], None] = lambda what: None,
    ) -> PullStats:
        """Pull one version. Returns when every byte is in place and every owner has its free signals."""
        started = time.monotonic()
        phases = {"pull": 0.0, "scatter": 0.0, "free": 0.0}
        moved = 0
        for group in sorted(self._reads.keys() | self._scatters.keys()):
            on_wait(f"reads of group {group}")
            with timed(phases, "pull"):
                self._transport.read(self._reads.get(group, []), context, on_bytes)
            moved += sum(read.nbytes for read in self._reads.get(group, []))
            with timed(phases, "scatter"):
                self._scatter(group)
        on_wait("free signals to arrive")
        with timed(phases, "free"):
            self._free_all(context)
        return PullStats(moved, self.bytes_needed, time.monotonic() - started, phases)

    def close(self) -> None:
        """Give the prepared reads back."""
        self._transport.release(read for reads in self._reads.values() for read in reads)
        self._reads, self._scatters, self._scratch = {}, defaultdict(list), []

    # -- planning -------------------------------------------------------------------------------------

    def _prepare(self, copies: Sequence[RecordedCopy]) -> dict[int, list[PreparedRead]]:
        sources, agents, _ = build_sources(
            merge_shard_tables([list(producer.table) for producer in self._layout.producers], self._consumer_id)
        )
        session_of = {producer.agent_name: rank for rank, producer in enumerate(self._layout.producers)}
        sessions = [session_of[agent] for agent in agents]
        group_of = _group_of_names(self._layout)
        runs: dict[tuple[int, int], _Runs] = defaultdict(_Runs)
        first: dict[tuple[object, ...], RecordedCopy] = {}
        for copy in copies:
            group = group_of[copy.src_name]
            twin = first.setdefault((copy.src_name, copy.op_chain, copy.dest_dtype), copy)
            if twin is not copy:  # the same weight in two places (untied here): read once, copied here
                self._scatters[group].append(_Scatter(partial(self._destinations.view_of, twin), copy))
                continue
            for session, src, dst, nbytes in self._lower(copy, sources[copy.src_name], group):
                joined = runs[group, sessions[session]]
                joined.src.append(src)
                joined.dst.append(dst)
                joined.nbytes.append(nbytes)
        self._transport.register(self._scratch)
        reads: dict[int, list[PreparedRead]] = defaultdict(list)
        for (group, session), joined in sorted(runs.items()):
            reads[group].append(
                self._transport.prepare(
                    self._peers[session],
                    np.concatenate(joined.src),
                    np.concatenate(joined.dst),
                    np.concatenate(joined.nbytes),
                )
            )
        return dict(reads)

    def _lower(
        self, copy: RecordedCopy, source: Source, group: int
    ) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Runs of one copy with absolute destination addresses; scratch is made where it needs some."""
        try:
            runs, base = self._planner.lower(copy, source), self._destinations.address_of(copy)
        except UnsupportedLayoutError:
            bounce = bounce_copy(copy, source.global_shape, dtype_from_name(source.dtype))
            scratch = torch.zeros(bounce.scratch_elements, dtype=dtype_from_name(source.dtype))
            self._scratch.append(scratch)
            self._scatters[group].append(_Scatter(partial(bounce.view, scratch), copy))
            runs, base = self._planner.lower(bounce.copy, source), scratch.data_ptr()
        return [(r.session, r.src_addr, r.dst_byte.astype(np.uint64) + np.uint64(base), r.nbytes) for r in runs]

    # -- one version ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _scatter(self, group: int) -> None:
        for scatter in self._scatters.get(group, ()):
            self._destinations.view_of(scatter.copy).copy_(scatter.result())

    def _free_all(self, context: ReadContext) -> None:
        """One message per producer: live groups stay in the trainer anyway, so there is nothing to hurry."""
        import ray

        ray.get(
            [
                peer.actor.free_groups.remote(self._layout.rank_groups[peer.rank], context.consumer_id, context.epoch)
                for peer in self._peers
            ]
        )


def _group_of_names(layout: LayoutSnapshot) -> dict[str, int]:
    names = iter(layout.names)
    return {next(names): group for group, length in enumerate(layout.group_lens) for _ in range(length)}


def needed_bytes(copies: Sequence[RecordedCopy], layout: LayoutSnapshot) -> int:
    """Bytes of the model that these copies take, a slice that feeds several places counted once."""
    dtype_of = {meta.name: dtype_from_name(meta.dtype) for meta in layout.manifest}
    distinct = {(copy.src_name, copy.op_chain): copy for copy in copies}
    return sum(copy.numel * dtype_of[copy.src_name].itemsize for copy in distinct.values())


class timed:
    """Adds the seconds of a block to one phase."""

    def __init__(self, phases: dict[str, float], phase: str) -> None:
        self._phases, self._phase = phases, phase

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._phases[self._phase] += time.monotonic() - self._started
