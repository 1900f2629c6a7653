"""The producer as a Ray actor: the plain `Producer`, plus what a process of its own needs.

Calls that may park have their own thread pools, so that they cannot starve the ones that would release them:

    serve     parked until a group is published or a shared slot is packed. Each consumer has at most K
              requests under way per producer (the slot-reuse rule), so max_consumers * K threads suffice.
    trainer   `wait_freed`, `end_sync`, `publish_live` and, beside it, `exchange_packs`, of one trainer: at most two
              parked at a time, plus one.
    watch     the registry's death watch: parked for the actor's life, one per registry, plus one for the
              registry that replaces it.
    control   everything else; short, never parks.

The thing to watch: a method that may block belongs in one of the first three pools.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch

from weightsync.actors.digests import Regions, Verify, chosen_regions, digests
from weightsync.actors.pack_desk import PackPlan, PackRequest, Slot
from weightsync.actors.packed_runs import check_offsets, pack_runs
from weightsync.actors.producer import Producer, Spec
from weightsync.actors.shared_memory import SegmentName, SharedSegment
from weightsync.actors.transport import Transport, create_transport
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import RegistrationError, SyncError
from weightsync.protocol.ledger import LedgerMeasures, LedgerSnapshot

if TYPE_CHECKING:
    from weightsync.actors.rdt_transport import RunsRequest

PackedTensor = tuple[str, int, tuple[int, ...], str]
"""A tensor in an exported segment: name, byte offset, shape, dtype name."""


@dataclass(frozen=True)
class SlotRequest:
    """One request of a consumer's plan: slices to pack, and the (offset, bytes) of each in the slot."""

    specs: tuple[Spec, ...]
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Wants:
    """What consumers want that only the trainer's own process can do, per consumer."""

    revision: int
    digests: dict[int, tuple[Regions, ...]]
    packs: dict[int, PackPlan]


@dataclass(frozen=True)
class ProducerOptions:
    """How a producer actor is set up."""

    agent_name: str
    transport: str
    served_names: tuple[str, ...]
    num_serve_buffers: int
    gather_lookahead: int
    stall_timeout_s: float
    verify: Verify = "off"
    staging_budget_bytes: int | None = None


def serve_pool_threads(max_consumers: int, num_serve_buffers: int) -> int:
    """Threads that parked `serve` and `read_runs` calls can need at once; see the module's docstring."""
    return max_consumers * num_serve_buffers


def concurrency_groups(max_consumers: int, num_serve_buffers: int) -> dict[str, int]:
    """Ray concurrency groups of a producer actor."""
    return {
        "serve": serve_pool_threads(max_consumers, num_serve_buffers),
        "trainer": 3,
        "watch": 2,
        "control": 4,
    }


class ProducerActor:
    """One trainer rank's producer, in a process of its own on the rank's node."""

    def __init__(self, options: ProducerOptions) -> None:
        self._options = options
        self._transport: Transport | None = None
        self._producer = Producer(
            num_serve_buffers=options.num_serve_buffers,
            gather_lookahead=options.gather_lookahead,
            served_names=options.served_names,
            stall_timeout_s=options.stall_timeout_s,
            on_slot=lambda slot: self._slot_transport().register([slot]),
            staging_budget_bytes=options.staging_budget_bytes,
        )
        self._segments: dict[str, SharedSegment] = {}
        self._packs: dict[tuple[int, str], torch.Tensor] = {}
        """Per consumer and read what `lend_runs` packs into."""
        self._plans: dict[int, Sequence[SlotRequest]] = {}
        self._digests_wanted: dict[int, tuple[Regions, ...]] = {}
        self._wants_revision = 0
        self._pack_metadata: tuple[int, bytes] = (0, b"")
        self._closed = threading.Event()
        self._lock = threading.Lock()

    # -- the trainer ----------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def map_segment(self, name: SegmentName) -> None:
        """Map memory the trainer exports; the trainer then unlinks its name."""
        segment = self._segments[name.path] = SharedSegment.attach(name)
        if self._options.transport == "rdt":  # it is lent from here; the others read it elsewhere, or copy it
            self._slot_transport().register([segment.memory])

    @ray.method(concurrency_group="trainer")
    def publish_live(self, groups: Sequence[int]) -> LedgerMeasures:
        """The rank's own memory is final: publish all its groups and wait until all are freed."""
        for group in groups:
            self._producer.publish_group(group, {})
        self._producer.end_sync()
        return self._producer.take_measures()

    @ray.method(concurrency_group="control")
    def publish_packed(self, group: int, segment: str, tensors: Sequence[PackedTensor]) -> None:
        """Publish a gathered group that lies in a mapped segment."""
        memory = self._segments[segment].memory
        self._producer.publish_group(group, {name: _unpack(memory, rest) for name, *rest in tensors})

    @ray.method(concurrency_group="control")
    def wants(self, known: int) -> Wants | None:
        """What consumers want of the trainer itself, or None if that is what it knows already."""
        with self._lock:
            if self._wants_revision == known:
                return None
            return Wants(self._wants_revision, dict(self._digests_wanted), self._producer.packs.plans)

    @ray.method(concurrency_group="control")
    def post_pack_metadata(self, revision: int, metadata: bytes) -> None:
        """How to reach the trainer's slots of packed chunks, from now on."""
        with self._lock:
            self._pack_metadata = (revision, metadata)

    @ray.method(concurrency_group="trainer")
    def exchange_packs(self, epoch: int, packed: Mapping[PackRequest, Slot]) -> list[PackRequest]:
        """The trainer has packed some chunks and waits for more to pack; none are left if there are none."""
        return self._producer.packs.exchange(epoch, packed)

    @ray.method(concurrency_group="control")
    def post_digests(self, epoch: int, digests: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """What the rank's memory holds, per consumer."""
        self._producer.post_digests(epoch, digests)

    @ray.method(concurrency_group="trainer")
    def wait_freed(self) -> list[int]:
        return self._producer.wait_freed()

    @ray.method(concurrency_group="trainer")
    def end_sync(self) -> tuple[list[int], LedgerMeasures]:
        """Wait until all groups are freed: (those no call returned yet, what was measured on the way)."""
        return self._producer.end_sync(), self._producer.take_measures()

    # -- the registry ---------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def begin_sync(self, epoch: int, live_consumers: Sequence[int]) -> None:
        self._producer.begin_sync(epoch, live_consumers)
        self._drop_packs(lambda consumer_id, _: consumer_id not in live_consumers)

    @ray.method(concurrency_group="control")
    def evict(self, consumer_id: int, epoch: int) -> bool:
        return self._producer.evict(consumer_id, epoch)

    @ray.method(concurrency_group="control")
    def fail(self, message: str) -> None:
        self._producer.fail(message)

    @ray.method(concurrency_group="control")
    def touch(self, epoch: int) -> None:
        """Consumers of this epoch move, though nothing of it is seen here."""
        self._producer.touch(epoch)

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Parked until the producer closes; its caller learns of this actor's death at once."""
        self._closed.wait()

    @ray.method(concurrency_group="control")
    def snapshot(self) -> LedgerSnapshot:
        return self._producer.snapshot()

    # -- consumers ------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def reserve(self, consumer_id: int, nbytes: int, digest: str, plan: Sequence[SlotRequest]) -> bytes:
        """Take a consumer's plan (one request per `seq`) and make its slots; returns transport metadata."""
        self._producer.reserve_serve_buffer(consumer_id, nbytes, digest)
        self._plans[consumer_id] = plan
        return self._slot_transport().metadata()

    @ray.method(concurrency_group="serve")
    def serve(self, consumer_id: int, seq: int, epoch: int) -> tuple[Any, list[int]]:
        """Pack request `seq` of the consumer's plan.

        Returns:
            ((address, bytes) of the slot, or the bytes themselves; digests of the slices that are checked).
        """
        plan = self._plans.get(consumer_id)
        if plan is None or not 0 <= seq < len(plan):
            raise RegistrationError(f"consumer {consumer_id} has no request {seq} reserved here; plan again")
        request = plan[seq]
        packed = self._producer.produce(request.specs, consumer_id=consumer_id, seq=seq, epoch=epoch)
        chosen = chosen_regions(len(request.pieces), epoch, self._options.verify)
        checked = digests([slot_regions(packed, request.pieces)], [chosen])[0] if chosen else []
        if self._slot_transport().fetches_slots:
            return (packed.data_ptr(), packed.numel()), checked
        return packed.numpy().copy(), checked

    @ray.method(concurrency_group="control")
    def expect_digests(self, consumer_id: int, regions: tuple[Regions, ...]) -> None:
        """A consumer will check these parts of the rank's own memory."""
        with self._lock:
            self._digests_wanted[consumer_id] = regions
            self._wants_revision += 1

    @ray.method(concurrency_group="control")
    def expect_packs(self, consumer_id: int, plan: PackPlan) -> int | None:
        """A consumer will have these chunks packed. If their slots exceed the budget: the bytes needed."""
        with self._lock:
            refused = self._producer.packs.reserve(consumer_id, plan)
            self._wants_revision += refused is None
            return refused

    @ray.method(concurrency_group="serve")
    def request_pack(self, consumer_id: int, seq: int, epoch: int, known: int) -> tuple[Slot, int, bytes | None]:
        """Wait until a chunk is packed: (where it lies, metadata revision, the metadata unless it is known)."""
        slot = self._producer.packs.request(consumer_id, seq, epoch)
        with self._lock:
            revision, metadata = self._pack_metadata
        return slot, revision, metadata if revision != known else None

    @ray.method(concurrency_group="serve")
    def digests(self, consumer_id: int, epoch: int) -> Sequence[Sequence[int]]:
        """Digests of what the consumer expects to check, as soon as the rank has computed them."""
        return self._producer.digests(consumer_id, epoch)

    @ray.method(concurrency_group="serve")
    def read_runs(self, src_offset: np.ndarray, nbytes: np.ndarray, consumer_id: int, epoch: int) -> np.ndarray:
        """Pack runs of the rank's mirrored shard (object_store transport).

        Raises:
            SyncError: a run outside the mirror, or no mirror.
        """
        memory = self._mirror(consumer_id, epoch).numpy()
        starts, lengths = src_offset.astype(np.int64), nbytes.astype(np.int64)
        check_offsets(starts, lengths, memory.size, f"consumer {consumer_id}")
        packed = np.empty(int(lengths.sum()), dtype=np.uint8)
        pack_runs(memory, starts, lengths, packed)
        return packed

    @ray.method(concurrency_group="serve")
    def lend_runs(self, request: RunsRequest, consumer_id: int, epoch: int) -> list[torch.Tensor]:
        """Runs of the rank's mirrored shard as registered tensors, short ones in one pack at the end (rdt transport).

        Raises:
            SyncError: a run outside the mirror, or no mirror.
        """
        memory = self._mirror(consumer_id, epoch)
        for offsets, lengths in (
            (request.lent_offset, request.lent_nbytes),
            (request.packed_offset, request.packed_nbytes),
        ):
            check_offsets(offsets, lengths, memory.numel(), f"consumer {consumer_id}")
        offsets, lengths = request.lent_offset.tolist(), request.lent_nbytes.tolist()
        lent = [memory[start : start + length] for start, length in zip(offsets, lengths, strict=True)]
        if len(request.packed_nbytes):
            pack = self._pack_memory(consumer_id, request)
            pack_runs(memory.numpy(), request.packed_offset, request.packed_nbytes, pack.numpy())
            lent.append(pack)
        return lent

    @ray.method(concurrency_group="serve")
    def lend_slot(self, addr: int, nbytes: int, consumer_id: int, epoch: int) -> torch.Tensor:
        """A packed serve slot as a registered tensor (rdt transport), as `serve` said where it lies.

        Raises:
            SyncError: no slot of this rank lies there.
        """
        self._producer.check_request(consumer_id, epoch)
        for slot in itertools.chain.from_iterable(list(self._producer.serve_rings.values())):
            if slot.data_ptr() == addr and nbytes <= slot.numel():
                return slot[:nbytes]
        raise SyncError(f"consumer {consumer_id} reads {nbytes} bytes at {addr:#x}, where no serve slot lies")

    @ray.method(concurrency_group="control")
    def forget_runs(self, read_id: str) -> None:
        """A consumer gave a prepared read back, and needs its pack no more (rdt transport)."""
        self._drop_packs(lambda _, known: known == read_id)

    @ray.method(concurrency_group="control")
    def free_groups(self, groups: Sequence[int], consumer_id: int, epoch: int) -> None:
        for group in groups:
            self._producer.free_group(group, consumer_id, epoch)

    @ray.method(concurrency_group="control")
    def close(self) -> None:
        """Wake everybody with an error, release memory and registrations. Idempotent."""
        self._producer.close()
        self._segments.clear()
        self._packs.clear()
        if self._transport is not None:
            self._transport.close()
        self._closed.set()

    def _mirror(self, consumer_id: int, epoch: int) -> torch.Tensor:
        """The rank's mirrored shard, for a consumer that may read it now."""
        self._producer.check_request(consumer_id, epoch)
        if len(self._segments) != 1:
            raise SyncError(f"this producer mirrors {len(self._segments)} segments; reading runs needs exactly one")
        return next(iter(self._segments.values())).memory

    def _pack_memory(self, consumer_id: int, request: RunsRequest) -> torch.Tensor:
        """Registered memory for the packed part of a read, the same each time."""
        key, nbytes = (consumer_id, request.read_id), int(request.packed_nbytes.sum())
        with self._lock:
            pack = self._packs.get(key)
        if pack is None:
            pack = torch.zeros(nbytes, dtype=torch.uint8)
            self._slot_transport().register([pack])
            with self._lock:
                self._packs[key] = pack
        if pack.numel() != nbytes:
            raise SyncError(f"consumer {consumer_id} asks for {nbytes} packed bytes where it had {pack.numel()}")
        return pack

    def _drop_packs(self, unwanted: Callable[[int, str], bool]) -> None:
        with self._lock:
            dropped = [self._packs.pop(key) for key in list(self._packs) if unwanted(*key)]
        if dropped:
            self._slot_transport().deregister(dropped)

    def _slot_transport(self) -> Transport:
        """The transport of what peers read here; a live producer needs one only for its mirror."""
        with self._lock:
            if self._transport is None:
                self._transport = create_transport(self._options.transport, self._options.agent_name, serves=True)
            return self._transport


def slot_regions(slot: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> Regions:
    """The slices in a slot, each of them a region of one run."""
    offsets = np.array([offset for offset, _ in pieces], dtype=np.int64)
    nbytes = np.array([nbytes for _, nbytes in pieces], dtype=np.int64)
    return Regions(offsets + slot.data_ptr(), nbytes, (1,) * len(pieces))


def _unpack(memory: torch.Tensor, packed: Sequence[Any]) -> torch.Tensor:
    offset, shape, dtype_name = packed
    dtype = dtype_from_name(dtype_name)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(tuple(shape))
