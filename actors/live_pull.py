"""Live mode: bytes read one-sidedly out of trainer memory, by the way that is fastest for each chunk.

Planned once per layout: `Landings` says which runs, `chunks` cuts them and picks strategies, and everything a version
needs is prepared. A version then only posts. If a rank is lost while others hold what it held, its chunks are replaced
by direct ones from them and the sync goes on; so are, once, regions whose bytes have the wrong digest. The thing to
watch: a free signal follows the last read of the group it frees, never precedes it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from weightsync.actors.attempt import Attempt
from weightsync.actors.chunks import ChunkDraft, Cutting, cut, direct_draft, slot_bytes
from weightsync.actors.destinations import Destinations
from weightsync.actors.digests import Regions, differing, mismatch
from weightsync.actors.landings import Landings, RankRuns
from weightsync.actors.moves import Memory, Moves, await_device
from weightsync.actors.options import RegistryOptions
from weightsync.actors.pack_desk import PackPlan
from weightsync.actors.pipeline import Chunk, Failure, Pipeline, in_turns
from weightsync.actors.reads import Reads, read_all
from weightsync.actors.transport import Peer, PreparedRead, Transport
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.cost_model import LinkCosts, Strategy
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import InvalidLayoutError, PlanBudgetError, SyncError
from weightsync.protocol.messages import LayoutSnapshot, PullStats
from weightsync.protocol.shards import PublishedTensor

log = logging.getLogger("weightsync.consumer")

_PIECES_IN_FLIGHT = 4
"""A direct chunk is at most this part of what may be under way, so that the limit is used and not exceeded."""


class LivePull:
    """A prepared live pull of one worker.

    Args:
        layout: the complete model.
        copies: distinct copies with canonical source names.
        destinations: where they land.
        transport: this worker's transport, connected to `peers`.
        peers: per rank, where its memory is.
        consumer_id: consumers take turns among exact replicas of a shard.
        options: strategy, limits and checks of the service.
        costs: per rank, of the link to it.

    Raises:
        PlanBudgetError: slots or scratch exceed the budget; says what is needed.
    """

    def __init__(
        self,
        layout: LayoutSnapshot,
        copies: Sequence[RecordedCopy],
        destinations: Destinations,
        transport: Transport,
        peers: Sequence[Peer],
        consumer_id: int,
        options: RegistryOptions,
        costs: Mapping[int, LinkCosts],
    ) -> None:
        self._layout = layout
        self._verify = options.verify
        self._options = options
        self._destinations = destinations
        self._transport = transport
        self._peers = list(peers)
        self._consumer_id = consumer_id
        self._lost: set[int] = set()
        """Ranks this worker could not read from; until the layout changes it does not try again."""
        self._landings = Landings(layout, copies, destinations, consumer_id)
        transport.register(self._landings.scratch)
        self._slots: dict[int, list[torch.Tensor]] = {}
        self._pack_revisions: dict[int, int] = {}
        self._chunks: dict[int, list[Chunk]] = defaultdict(list)
        drafts = self._draft(costs)
        self._prepare_chunks(drafts)
        self._scatterer = ThreadPoolExecutor(1, "weightsync-scatter")
        if self._verify != "off":
            self._expect_digests(consumer_id)
        self.predicted_s = sum(draft.predicted_s for draft in drafts)
        self.bytes_total = sum(int(draft.runs.nbytes.sum()) for draft in drafts)
        self.bytes_needed = needed_bytes(copies, layout)

    @property
    def _ranks(self) -> list[int]:
        """Ranks that this worker reads from."""
        return sorted({chunk.rank for chunks in self._chunks.values() for chunk in chunks})

    @property
    def extra_bytes(self) -> int:
        """Memory of this worker beside its parameters and their shadow: bounce slots and scratch."""
        slots = sum(slot.numel() for ring in self._slots.values() for slot in ring)
        return slots + sum(scratch.nbytes for scratch in self._landings.scratch)

    @property
    def needs_producers(self) -> bool:
        """Whether a pull asks more than one-sided reads of what was registered."""
        packs = any(chunk.strategy is Strategy.PACKED for chunks in self._chunks.values() for chunk in chunks)
        return packs or self._verify != "off" or not self._transport.reads_trainer_memory

    def run(self, attempt: Attempt) -> PullStats:
        """Pull one version. Returns when every byte is in place and every owner has its free signals."""
        phases = {"pull": 0.0, "scatter": 0.0, "verify": 0.0, "free": 0.0}
        before = self._transport.counts.copy()
        with timed(phases, "pull"):
            phases["scatter"] = self._bring(attempt)
        phases["pull"] = max(0.0, phases["pull"] - phases["scatter"])
        if self._verify != "off":
            with timed(phases, "verify"):
                self._check_digests(attempt)
        if not attempt.one_sided:
            attempt.waiting("free signals to arrive")
            with timed(phases, "free"):
                self._free_all(attempt)
        return replace(
            attempt.stats(self.bytes_needed, phases),
            bytes_gaps=sum(chunk.draft.gap_bytes for chunks in self._chunks.values() for chunk in chunks),
            strategies=self._bytes_by_strategy(),
            predicted_s=self.predicted_s,
            prepared=dict(self._transport.counts - before),
            carriers=self._transport.carriers(self._peers[rank] for rank in self._ranks),
            extra_bytes=self.extra_bytes,
        )

    def close(self) -> None:
        """Give prepared reads, slots and scratch back."""
        self._scatterer.shutdown()
        self._transport.release(c.read for chunks in self._chunks.values() for c in chunks if c.read is not None)
        self._chunks.clear()
        self._transport.deregister(slot for ring in self._slots.values() for slot in ring)
        self._transport.deregister(self._landings.scratch)
        self._slots.clear()

    # -- planning -------------------------------------------------------------------------------------

    def _draft(self, costs: Mapping[int, LinkCosts]) -> list[ChunkDraft]:
        """Every chunk, with ranks that refuse to pack (for want of memory) served otherwise."""
        budget, scratch = self._options.staging_budget_bytes, sum(s.nbytes for s in self._landings.scratch)
        if budget is not None and scratch > budget:
            raise PlanBudgetError(
                f"weights that change dtype or are transposed on their way need {scratch} bytes of scratch on this "
                f"worker, and staging_budget_bytes is {budget}; raise it, or publish in the worker's dtype"
            )
        limit = self._options.max_inflight_bytes
        cutting = Cutting(
            strategy=self._options.strategy if self._transport.reads_trainer_memory else Strategy.DIRECT,
            chunk_bytes=self._options.chunk_bytes,
            direct_bytes=-(-limit // _PIECES_IN_FLIGHT),
            num_slots=self._options.num_serve_buffers,
            consumers=self._layout.num_consumers,
            budget_bytes=None if budget is None else budget - scratch,
        )
        extents = {producer.rank: _extents(producer.table) for producer in self._layout.producers}
        drafts = cut(self._landings.runs, costs, extents, cutting)
        refused = self._reserve_packs(drafts)
        if not refused:
            return drafts
        if self._options.strategy == Strategy.PACKED:
            needed = "; ".join(f"rank {rank} would need {nbytes} bytes" for rank, nbytes in refused.items())
            raise PlanBudgetError(f"{needed} for packed chunks, and staging_budget_bytes is {budget}; raise it")
        dearer = {rank: c.without_packing() if rank in refused else c for rank, c in costs.items()}
        drafts = cut(self._landings.runs, dearer, extents, cutting)
        self._reserve_packs(drafts)
        return drafts

    def _reserve_packs(self, drafts: Sequence[ChunkDraft]) -> dict[int, int]:
        """Tell every rank what it will pack; returns those that cannot, and the bytes it would take."""
        if not self._transport.reads_trainer_memory:
            return {}
        told = {}
        for rank, peer in enumerate(self._peers):
            own = [draft.runs for draft in drafts if draft.rank == rank and draft.strategy is Strategy.PACKED]
            plan = PackPlan(
                secrets.token_hex(8),
                tuple(runs.src_addr for runs in own),
                tuple(runs.nbytes for runs in own),
                self._options.num_serve_buffers,
            )
            told[rank] = peer.actor.expect_packs.remote(self._consumer_id, plan)
        answers = {rank: ray.get(reply) for rank, reply in told.items()}
        return {rank: needed for rank, needed in answers.items() if needed is not None}

    def _prepare_chunks(self, drafts: Sequence[ChunkDraft]) -> None:
        """Slots, reads and scatters of all chunks."""
        num_slots = self._options.num_serve_buffers
        chunks = [
            Chunk(draft.group, draft.rank, draft.strategy, draft, int(draft.runs.nbytes.sum())) for draft in drafts
        ]
        in_turns(chunks, num_slots)
        device = next(iter(self._destinations.buffers.values())).device
        for rank, nbytes in slot_bytes(drafts).items():
            used = 1 + max(chunk.slot for chunk in chunks if chunk.rank == rank)
            self._slots[rank] = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(used)]
            self._transport.register(self._slots[rank])
        source = Memory(slot for ring in self._slots.values() for slot in ring)
        target = Memory([*self._destinations.buffers.values(), *self._landings.scratch])
        for chunk in chunks:
            self._prepare(chunk, source, target)
            self._chunks[chunk.group].append(chunk)

    def _prepare(self, chunk: Chunk, source: Memory, target: Memory) -> None:
        draft = chunk.draft
        if chunk.strategy is Strategy.DIRECT:
            chunk.read = self._read_of(chunk.rank, draft.runs.src_addr, draft.runs.dst_addr, draft.runs.nbytes)
            return
        base = self._slots[chunk.rank][chunk.slot].data_ptr()
        if chunk.strategy is Strategy.SPAN:
            chunk.read = self._read_of(chunk.rank, draft.read_addr, base + draft.read_offset, draft.read_nbytes)
        chunk.moves = Moves(base + draft.run_offset, draft.runs.dst_addr, draft.runs.nbytes, source, target)

    def _read_of(self, rank: int, src: Any, dst: Any, nbytes: Any) -> PreparedRead:
        return self._transport.prepare(self._peers[rank], src.astype(np.uint64), dst.astype(np.uint64), nbytes)

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """Bytes of a pull by the rank that is planned to give them."""
        counted: Counter[int] = Counter()
        for chunks in self._chunks.values():
            for chunk in chunks:
                counted[chunk.rank] += chunk.nbytes
        return dict(counted)

    def _bytes_by_strategy(self) -> dict[str, int]:
        counted: Counter[str] = Counter()
        for chunks in self._chunks.values():
            for chunk in chunks:
                counted[chunk.strategy.value] += chunk.nbytes
        return dict(counted)

    # -- reading --------------------------------------------------------------------------------------

    def _bring(self, attempt: Attempt) -> float:
        """Every byte; what a lost rank was to give comes from whoever else holds it. Returns seconds of scattering."""
        pending = [
            found for chunks in list(self._chunks.values()) for c in chunks for found in self._reachable(c, None)
        ]
        scatter_s, scattered = 0.0, set[int]()
        while True:
            attempt.waiting(f"reads of {len(pending)} chunks")
            reads = Reads(self._transport, attempt.context, self._options.max_inflight_bytes)
            pipeline = Pipeline(reads, attempt, self._ask(attempt), self._found, self._scatterer)
            outstanding = Counter(chunk.group for chunk in pending)

            def done(chunk: Chunk, outstanding: Counter[int] = outstanding) -> None:
                outstanding[chunk.group] -= 1
                if not outstanding[chunk.group]:
                    self._scatter(chunk.group)
                    scattered.add(chunk.group)

            failures = pipeline.run(pending, done)
            scatter_s += pipeline.scatter_s
            if not failures:
                break
            for rank in sorted({failure.chunk.rank for failure in failures}):
                attempt.rank_failed(rank)
                self._lost.add(rank)
            pending = [found for failure in failures for found in self._reachable(failure.chunk, failure)]
        for group in sorted(self._landings.scatters.keys() - scattered):
            self._scatter(group)
        return scatter_s

    def _reachable(self, chunk: Chunk, failure: Failure | None) -> list[Chunk]:
        """The chunk itself, or, if its rank is lost, those that take its place from now on.

        Raises:
            SyncError: nobody else holds it.
        """
        if chunk.rank not in self._lost:
            return [chunk]
        try:
            found = self._landings.elsewhere(chunk.group, self._lost, chunk.draft.runs)
        except InvalidLayoutError as hole:
            why = (
                f"reading from rank {chunk.rank} failed ({failure.error})" if failure else f"rank {chunk.rank} is lost"
            )
            self._lost.clear()  # they may answer next time
            raise SyncError(f"{why}; {hole}") from hole
        replacements = [self._direct(chunk.group, rank, runs) for rank, runs in found.items()]
        own = self._chunks[chunk.group]
        self._chunks[chunk.group] = [kept for kept in own if kept is not chunk] + replacements
        if chunk.read is not None:
            self._transport.release([chunk.read])
        return replacements

    def _direct(self, group: int, rank: int, runs: RankRuns) -> Chunk:
        read = self._read_of(rank, runs.src_addr, runs.dst_addr, runs.nbytes)
        return Chunk(group, rank, Strategy.DIRECT, direct_draft(group, rank, runs), int(runs.nbytes.sum()), read)

    def _ask(self, attempt: Attempt) -> Any:
        context = attempt.context

        def ask(chunk: Chunk) -> Any:
            known = self._pack_revisions.get(chunk.rank, 0)
            return self._peers[chunk.rank].actor.request_pack.remote(
                context.consumer_id, chunk.seq, context.epoch, known
            )

        return ask

    def _found(self, chunk: Chunk, answer: Any) -> PreparedRead:
        """The read of a packed chunk; prepared anew only if the trainer's slots have moved."""
        (addr, nbytes), revision, metadata = answer
        if metadata is not None and self._pack_revisions.get(chunk.rank) != revision:
            self._peers[chunk.rank] = replace(self._peers[chunk.rank], metadata=metadata)
            self._transport.connect(self._peers[chunk.rank])
            self._pack_revisions[chunk.rank] = revision
        at = (addr, nbytes, revision)
        if chunk.read is not None and chunk.packed_at == at:
            return chunk.read
        if chunk.read is not None:
            self._transport.release([chunk.read])
        base = self._slots[chunk.rank][chunk.slot].data_ptr()
        chunk.read = self._read_of(chunk.rank, *(np.array([value], dtype=np.int64) for value in (addr, base, nbytes)))
        chunk.packed_at = at
        return chunk.read

    # -- digests --------------------------------------------------------------------------------------

    def _groups_of(self, rank: int) -> list[int]:
        return [group for group, holder in self._landings.runs if holder == rank]

    def _expect_digests(self, consumer_id: int) -> None:
        """Tell every producer which of its bytes will be checked, region by region."""
        told = []
        for rank in sorted({rank for _, rank in self._landings.runs}):
            wanted = [self._landings.runs[group, rank] for group in self._groups_of(rank)]
            regions = tuple(Regions(runs.src_addr, runs.nbytes, _counts(runs)) for runs in wanted)
            told.append(self._peers[rank].actor.expect_digests.remote(consumer_id, regions))
        ray.get(told)

    def _check_digests(self, attempt: Attempt) -> None:
        """Every region that is due in this epoch.

        Raises:
            DigestMismatchError: the bytes of a region are wrong, and were again when it was read once more.
        """
        context = attempt.context
        for rank in sorted({rank for _, rank in self._landings.runs}):
            attempt.waiting(f"digests of rank {rank}")
            reply = self._peers[rank].actor.digests.remote(context.consumer_id, context.epoch)
            try:
                expected = ray.get(reply)
            except ray.exceptions.RayActorError as error:
                _check_gone(rank, error, attempt)
                log.warning("epoch %d: what rank %d gave before it died is not verified", context.epoch, rank)
                continue
            for group, own in zip(self._groups_of(rank), expected, strict=True):
                self._check_group(group, rank, own, attempt)

    def _check_group(self, group: int, rank: int, expected: Sequence[int], attempt: Attempt) -> None:
        runs = self._landings.runs[group, rank]
        landed = Regions(runs.dst_addr, runs.nbytes, _counts(runs))
        attempt.regions_verified += sum(digest >= 0 for digest in expected)
        wrong = differing(landed, expected)
        if not wrong:
            return
        attempt.regions_repeated += len(wrong)
        self._read_again(group, rank, attempt)
        wrong = differing(landed, expected)
        if wrong:
            raise mismatch([runs.names[index][0] for index in wrong], rank, attempt.version)

    def _read_again(self, group: int, rank: int, attempt: Attempt) -> None:
        """A rank's part of a group once more, from other holders if there are any."""
        runs = self._landings.runs[group, rank]
        try:
            found = self._landings.elsewhere(group, {*self._lost, rank}, runs)
        except InvalidLayoutError:
            found = {rank: runs}
        reads = [self._read_of(holder, part.src_addr, part.dst_addr, part.nbytes) for holder, part in found.items()]
        try:
            read_all(self._transport, reads, attempt.context, attempt.moved)
        finally:
            self._transport.release(reads)
        self._scatter(group)

    # -- after the reads ------------------------------------------------------------------------------

    @torch.no_grad()
    def _scatter(self, group: int) -> None:
        for scatter in self._landings.scatters.get(group, ()):
            target = self._destinations.view_of(scatter.copy)
            target.copy_(scatter.result())
            await_device(target.device)

    def _free_all(self, attempt: Attempt) -> None:
        """One message per producer: live groups stay in the trainer anyway, so there is nothing to hurry."""
        context = attempt.context
        signals = {
            peer.rank: peer.actor.free_groups.remote(
                self._layout.rank_groups[peer.rank], context.consumer_id, context.epoch
            )
            for peer in self._peers
        }
        for rank, signal in signals.items():
            try:
                ray.get(signal)
            except ray.exceptions.RayActorError as error:
                _check_gone(rank, error, attempt)


def _check_gone(rank: int, error: ray.exceptions.RayActorError, attempt: Attempt) -> None:
    """Its producer does not answer: that is nothing to wait for if the epoch goes on without the rank.

    Raises:
        SyncError: it does not, or the rank is a member still.
    """
    if not attempt.rank_failed(rank):
        raise SyncError(f"rank {rank}'s producer does not answer ({error})") from error


def _counts(runs: RankRuns) -> tuple[int, ...]:
    return tuple(count for _, count in runs.names)


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


def _extents(table: Sequence[PublishedTensor]) -> Any:
    """Ascending first addresses of everything a rank published."""
    return np.array(sorted(shard.addr for tensor in table for shard in tensor.shards), dtype=np.int64)
