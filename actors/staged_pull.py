"""Staged mode: producers pack slices of gathered groups into serve slots; one read each, then scatter.

Planned once: `build_pull_plan` cuts the worker's copies into chunks, one per gather group and owner class.
Per version at most K chunks per producer are under way, because slot `seq % K` may be repacked as soon as its
next request is issued (I4). Every gather group is signalled exactly once at every owner of any of its names:
at the start if the worker pulls nothing from it, else after its last chunk (I6).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from weightsync.actors.attempt import Attempt
from weightsync.actors.destinations import Destinations
from weightsync.actors.digests import differing, mismatch
from weightsync.actors.live_pull import needed_bytes, timed
from weightsync.actors.producer_actor import SlotRequest, slot_regions
from weightsync.actors.transport import Peer, ReadContext, Transport
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.cost_model import Strategy
from weightsync.protocol.messages import LayoutSnapshot, PullStats
from weightsync.protocol.pull_plan import Chunk, build_pull_plan, plan_digest
from weightsync.protocol.routing import Router


@dataclass(frozen=True)
class _Issued:
    """A chunk whose packing was asked for."""

    chunk: Chunk
    reply: Any


class StagedPull:
    """A prepared staged pull of one worker; arguments as `LivePull`."""

    def __init__(
        self,
        layout: LayoutSnapshot,
        copies: Sequence[RecordedCopy],
        destinations: Destinations,
        transport: Transport,
        peers: Sequence[Peer],
        consumer_id: int,
        num_slots: int,
    ) -> None:
        self._destinations = destinations
        self._transport = transport
        self._num_slots = num_slots
        plan = _plan(layout, copies, consumer_id)
        self._pre_free = plan.pre_free
        self._chunks = plan.chunks
        self._recv = self._make_receive_slots()
        self._peers = self._reserve(peers, consumer_id)
        self.bytes_total = sum(_payload(chunk) for chunk in self._chunks)
        self.bytes_needed = needed_bytes(copies, layout)

    needs_producers = True

    def run(self, attempt: Attempt) -> PullStats:
        """Pull one version. Returns when every byte is in place and every owner has its free signals."""
        context, before = attempt.context, self._transport.counts.copy()
        phases = {"pull": 0.0, "scatter": 0.0, "verify": 0.0, "free": 0.0}
        signals = self._free(self._pre_free, context)
        for issued in self._in_order(context):
            chunk = issued.chunk
            attempt.waiting(f"rank {chunk.owner} to pack slot {chunk.seq}")
            slot = self._recv[chunk.owner][chunk.seq % self._num_slots]
            with timed(phases, "pull"):
                packed, digests = _answer(issued, attempt)
                self._transport.fetch_slot(self._peers[chunk.owner], packed, slot, context)
            with timed(phases, "verify"):
                self._check(chunk, slot, packed, digests, attempt)
            with timed(phases, "scatter"):
                self._scatter(chunk, slot)
            attempt.moved(_payload(chunk))
            signals += self._free(chunk.free, context)
        with timed(phases, "free"):
            attempt.waiting("free signals to arrive")
            ray.get(signals)
        return replace(
            attempt.stats(self.bytes_needed, phases),
            strategies={Strategy.PACKED.value: self.bytes_total},
            prepared=dict(self._transport.counts - before),
            carriers=self._transport.carriers(self._peers[owner] for owner in self._recv),
            extra_bytes=sum(slot.numel() for ring in self._recv.values() for slot in ring),
        )

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """Bytes of a pull by the rank that is planned to give them."""
        counted: Counter[int] = Counter()
        for chunk in self._chunks:
            counted[chunk.owner] += _payload(chunk)
        return dict(counted)

    def close(self) -> None:
        """Give the receive slots back."""
        self._transport.deregister(slot for ring in self._recv.values() for slot in ring)
        self._recv = {}

    # -- planning -------------------------------------------------------------------------------------

    def _make_receive_slots(self) -> dict[int, list[torch.Tensor]]:
        """Per owner K slots of the size of its largest chunk."""
        largest: dict[int, int] = defaultdict(int)
        for chunk in self._chunks:
            largest[chunk.owner] = max(largest[chunk.owner], chunk.pack_bytes)
        slots = {
            owner: [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self._num_slots)]
            for owner, nbytes in largest.items()
        }
        for ring in slots.values():
            self._transport.register(ring)
        return slots

    def _reserve(self, peers: Sequence[Peer], consumer_id: int) -> dict[int, Peer]:
        """Tell every owner the plan and the slot size; connect to the memory it reserved."""
        requests: dict[int, list[SlotRequest]] = defaultdict(list)
        for chunk in self._chunks:
            requests[chunk.owner].append(SlotRequest(tuple(chunk.keys), _pieces(chunk)))
        reserved = {
            owner: peers[owner].actor.reserve.remote(
                consumer_id,
                self._recv[owner][0].numel(),
                plan_digest([key for request in plan for key in request.specs]),
                plan,
            )
            for owner, plan in requests.items()
        }
        connected = {peer.rank: peer for peer in peers}
        for owner, reply in reserved.items():
            connected[owner] = Peer(owner, owner, ray.get(reply), peers[owner].actor)
            self._transport.connect(connected[owner])
        return connected

    # -- one version ----------------------------------------------------------------------------------

    def _in_order(self, context: ReadContext) -> Iterator[_Issued]:
        """Chunks in plan order, the next ones asked for ahead, at most K under way per owner."""
        waiting = deque(self._chunks)
        issued: deque[_Issued] = deque()
        under_way: dict[int, int] = defaultdict(int)
        try:
            while waiting or issued:
                while waiting and under_way[waiting[0].owner] < self._num_slots:
                    chunk = waiting.popleft()
                    under_way[chunk.owner] += 1
                    reply = self._peers[chunk.owner].actor.serve.remote(context.consumer_id, chunk.seq, context.epoch)
                    issued.append(_Issued(chunk, reply))
                head = issued.popleft()
                yield head
                under_way[head.chunk.owner] -= 1
        finally:
            for abandoned in issued:  # an error nobody asks for any more; Ray would log it
                abandoned.reply.future().add_done_callback(lambda reply: reply.exception())

    def _check(self, chunk: Chunk, slot: torch.Tensor, packed: Any, expected: Sequence[int], attempt: Attempt) -> None:
        """The slices that are due; wrong ones are fetched once more: their slot is not packed again yet.

        Raises:
            DigestMismatchError: they are wrong again.
        """
        if not expected:
            return
        landed = slot_regions(slot, _pieces(chunk))
        attempt.regions_verified += sum(digest >= 0 for digest in expected)
        wrong = differing(landed, expected)
        if wrong:
            attempt.regions_repeated += len(wrong)
            self._transport.fetch_slot(self._peers[chunk.owner], packed, slot, attempt.context)
            wrong = differing(landed, expected)
        if wrong:
            raise mismatch([chunk.keys[index][0] for index in wrong], chunk.owner, attempt.version)

    @torch.no_grad()
    def _scatter(self, chunk: Chunk, slot: torch.Tensor) -> None:
        for key, copy in chunk.scatters:
            offset, shape, dtype = chunk.pack_layout[key]
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            self._destinations.view_of(copy).copy_(slot[offset : offset + nbytes].view(dtype).view(shape))

    def _free(self, signals: Any, context: ReadContext) -> list[Any]:
        return [
            self._peers[owner].actor.free_groups.remote((group,), context.consumer_id, context.epoch)
            for group, owners in signals
            for owner in owners
        ]


def _answer(issued: _Issued, attempt: Attempt) -> Any:
    """What the producer says about a packed chunk."""
    try:
        return ray.get(issued.reply)
    except ray.exceptions.RayActorError:
        attempt.rank_failed(issued.chunk.owner)  # raises what the registry knows about it
        raise


def _plan(layout: LayoutSnapshot, copies: Sequence[RecordedCopy], consumer_id: int) -> Any:
    """The chunks of this worker; owner sets follow from which rank holds which name."""
    held = [set(producer.held_names) for producer in layout.producers]
    owner_sets: list[tuple[int, ...]] = []
    owner_class: dict[str, int] = {}
    for name in layout.names:
        owners = tuple(rank for rank, names in enumerate(held) if name in names)
        if owners not in owner_sets:
            owner_sets.append(owners)
        owner_class[name] = owner_sets.index(owners)
    router = Router(
        len(layout.producers),
        max(layout.num_consumers, consumer_id + 1),
        owner_sets=owner_sets,
        name_owner_class=owner_class,
        names=list(layout.names),
        group_lens=list(layout.group_lens),
    )
    copies_by_name: dict[str, list[RecordedCopy]] = defaultdict(list)
    for copy in copies:
        copies_by_name[copy.src_name].append(copy)
    return build_pull_plan(
        copies_by_name,
        names=list(layout.names),
        group_lens=list(layout.group_lens),
        name_meta={meta.name: (meta.dtype, meta.shape) for meta in layout.manifest},
        live_names=set(copies_by_name),
        router=router,
        consumer_id=consumer_id,
    )


def _pieces(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of each slice in the slot."""
    return tuple((offset, torch.Size(shape).numel() * dtype.itemsize) for offset, shape, dtype in chunk.pack_layout)


def _payload(chunk: Chunk) -> int:
    """Bytes of the chunk's slices, without the alignment between them."""
    return sum(nbytes for _, nbytes in _pieces(chunk))
