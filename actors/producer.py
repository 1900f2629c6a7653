"""The producer: what one trainer rank has published, served to whoever may read it.

A plain class, so that every rule of the sync protocol can be tested without Ray; `producer_actor` wraps it.
`tensors` given to `publish_group` must already be mapped into this process. The thing to watch: a free signal
lets the trainer drop memory, so nothing here ever frees on a consumer's behalf except its eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from weightsync.actors.pack_desk import PackDesk
from weightsync.actors.serve_slots import Layout, ServeSlots
from weightsync.protocol.errors import StaleEpochError, SyncAborted, SyncError, WrongProducerError
from weightsync.protocol.ledger import LedgerMeasures, LedgerSnapshot, SyncLedger
from weightsync.protocol.packing import pack_offsets
from weightsync.protocol.views import replay

Spec = tuple[str, tuple[Any, ...]]
"""One requested slice: a published name and the op chain of pure views to apply to it."""


class Producer:
    """Publish / serve / free state of one trainer rank.

    Args:
        num_serve_buffers: K, serve slots per slot-sharing group.
        buffer_presize_bytes: least bytes of a serve slot.
        gather_lookahead: L; at most L + 1 gathered groups are resident at the trainer.
        served_names: every name this rank will ever publish; None disables the guard.
        stall_timeout_s: seconds without progress after which every waiter gets a `StallError`.
        workers_per_replica: width of slot sharing between deployments; 0 disables it.
        device: where serve slots live.
        slot_granularity_bytes: serve slots are rounded up to a multiple of this.
        on_slot: called with each newly allocated slot (a transport registers it).
        staging_budget_bytes: limit on the slots of packed chunks of live memory; None for none.
    """

    def __init__(
        self,
        *,
        num_serve_buffers: int = 2,
        buffer_presize_bytes: int = 0,
        gather_lookahead: int = 1,
        served_names: Iterable[str] | None = None,
        stall_timeout_s: float = 300.0,
        workers_per_replica: int = 0,
        device: str | torch.device = "cpu",
        slot_granularity_bytes: int = 1,
        on_slot: Callable[[torch.Tensor], None] | None = None,
        staging_budget_bytes: int | None = None,
    ) -> None:
        if num_serve_buffers < 1:
            raise ValueError(f"num_serve_buffers must be at least 1, got {num_serve_buffers}")
        if gather_lookahead < 0:
            raise ValueError(f"gather_lookahead must not be negative, got {gather_lookahead}")
        self.gather_lookahead = gather_lookahead
        self._served_names = None if served_names is None else frozenset(served_names)
        self._tensors: dict[str, torch.Tensor] = {}
        self._names_of: dict[int, tuple[str, ...]] = {}
        self._gone: set[str] = set()
        self._digests: Mapping[int, Sequence[Sequence[int]]] | None = None
        self._ledger = SyncLedger(stall_timeout_s, on_release=self._drop_group)
        self._slots = ServeSlots(
            num_serve_buffers,
            buffer_presize_bytes,
            slot_granularity_bytes,
            workers_per_replica,
            torch.device(device),
            on_slot or (lambda slot: None),
        )
        self.packs = PackDesk(self._ledger, staging_budget_bytes)

    # -- the trainer's side ---------------------------------------------------------------------------

    def begin_sync(self, epoch: int, live_consumers: Collection[int]) -> None:
        """Open an epoch; everything of the one before is forgotten, packed layouts stay cached.

        Packs of the epoch before that are still under way are waited for: they write slots that this epoch will
        use, for readers that nobody waits for any more.

        Raises:
            ValueError: no live consumer.
            StaleEpochError: epochs must strictly increase.
            StallError: such a pack does not end.
        """
        with self._ledger.locked():
            self._ledger.check_begin(epoch, live_consumers)
            self._ledger.fail(StaleEpochError(f"epoch {self._ledger.epoch} was replaced by epoch {epoch}"))
            self._ledger.drain(lambda: self._slots.packs_running == 0, "packs of the epoch before to end")
            self._ledger.begin(epoch, live_consumers)
            self._slots.begin_epoch()
            self.packs.begin_epoch()
            self._tensors.clear()
            self._names_of.clear()
            self._gone.clear()
            self._digests = None

    def publish_group(self, group: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make a gather group serveable. Never blocks.

        Args:
            tensors: name -> tensor as mapped into this process; not to be written until released.

        Raises:
            WrongProducerError: a name outside `served_names`; nothing is published then.
            SyncError: no epoch is open, or the group or a name was published already.
        """
        if self._served_names is not None:
            unknown = sorted(set(tensors) - self._served_names)
            if unknown:
                raise WrongProducerError(f"group {group}: {unknown[:5]} are not among the names this rank serves")
        with self._ledger.locked():
            self._ledger.check_open()
            twice = sorted(name for name in tensors if name in self._tensors or name in self._gone)
            if twice:
                raise SyncError(f"epoch {self._ledger.epoch}: {twice[:5]} were published already")
            self._tensors.update(tensors)
            self._names_of[group] = tuple(tensors)
            try:
                self._ledger.publish(group)
            except SyncError:
                for name in tensors:
                    self._tensors.pop(name, None)
                raise

    def wait_freed(self) -> list[int]:
        """Block until groups were released; returns those not reported before (the trainer's credit)."""
        return self._ledger.wait_freed()

    def end_sync(self) -> list[int]:
        """Block until every published group is released; returns those not reported before."""
        return self._ledger.end()

    def fail(self, message: str) -> None:
        """Give the running epoch up; every waiter raises `SyncAborted` with this message."""
        self._ledger.fail(SyncAborted(message))

    def touch(self, epoch: int) -> None:
        """Somebody in this epoch makes progress that a one-sided read hides from here."""
        with self._ledger.locked():
            if epoch == self._ledger.epoch:
                self._ledger.touch()

    def post_digests(self, epoch: int, digests: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Per consumer, digests of what the trainer's memory holds in this epoch."""
        with self._ledger.locked():
            self._ledger.check_open(epoch)
            self._digests = digests
            self._ledger.touch()

    # -- the consumers' side --------------------------------------------------------------------------

    def free_group(self, group: int, consumer_id: int, epoch: int) -> bool:
        """A consumer has read all it needs of a group. False (and counted) if the signal is not credited."""
        return self._ledger.free(group, consumer_id, epoch)

    def produce(self, specs: Sequence[Spec], *, consumer_id: int, seq: int, epoch: int) -> torch.Tensor:
        """Pack slices into serve slot `seq % K`, waiting until their names are published.

        Args:
            specs: (name, op chain) pairs; packed in this order at 16-byte aligned offsets.
            consumer_id: fleet-wide id of the asking consumer.
            seq: the consumer's issue index for this producer in this epoch, from 0.
            epoch: the epoch the request belongs to.

        Returns:
            uint8 tensor of the packed bytes, a view of the slot.

        Raises:
            WrongProducerError: a name this producer never serves.
            StaleEpochError: another epoch, or a consumer that is not live.
            ValueError: an op outside the table of pure views, or a malformed spec.
            SyncError: a name whose group was released already, or a slot asked for out of order.
        """
        self._check_request(specs, seq)
        self._ledger.check_open(epoch, consumer_id)
        names = [name for name, _ in specs]
        self._ledger.wait_until(
            lambda: self._all_published(names),
            f"{names[0] if names else 'nothing'} to be published",
            consumer_id,
        )
        self._ledger.check_open(epoch, consumer_id)
        return self._slots.serve(self._ledger, consumer_id, seq, lambda views_for: self._pack(specs, views_for))

    def digests(self, consumer_id: int, epoch: int) -> Sequence[Sequence[int]]:
        """What `post_digests` says for a consumer, waiting for it.

        Raises:
            StaleEpochError: another epoch, or a consumer that is not live.
            SyncError: the trainer computed none for it.
        """
        self._ledger.check_open(epoch, consumer_id)
        self._ledger.wait_until(lambda: self._digests is not None, "digests to be computed", consumer_id)
        with self._ledger.locked():
            self._ledger.check_open(epoch, consumer_id)
            if self._digests is None or consumer_id not in self._digests:
                raise SyncError(f"epoch {epoch}: there are no digests for consumer {consumer_id}; plan again")
            return self._digests[consumer_id]

    def reserve_serve_buffer(self, consumer_id: int, nbytes: int, plan_digest: str | None = None) -> None:
        """Allocate (and register) the consumer's serve slots ahead of a sync. Idempotent."""
        with self._ledger.locked():
            self._slots.reserve(consumer_id, nbytes, plan_digest)

    def evict(self, consumer_id: int, epoch: int) -> bool:
        """Take a consumer out of the running epoch; its barriers and meetings recompute without it."""
        return self._ledger.evict(consumer_id, epoch)

    def check_request(self, consumer_id: int, epoch: int) -> None:
        """Raise unless this consumer is live in the running epoch and the epoch is `epoch`."""
        self._ledger.check_open(epoch, consumer_id)

    # -- lifecycle and state --------------------------------------------------------------------------

    def close(self) -> None:
        """Wake every waiter with an error and drop all memory."""
        self._ledger.fail(SyncAborted("the producer was closed"))
        with self._ledger.locked():
            self._tensors.clear()
            self._names_of.clear()
            self._slots.rings.clear()

    @property
    def inflight_groups(self) -> list[int]:
        return self._ledger.inflight_groups

    @property
    def cached_names(self) -> set[str]:
        with self._ledger.locked():
            return set(self._tensors)

    @property
    def freed_pending(self) -> list[int]:
        return self._ledger.freed_pending

    @property
    def error(self) -> BaseException | None:
        return self._ledger.error

    @property
    def serve_rings(self) -> dict[int, list[torch.Tensor]]:
        return self._slots.rings

    @property
    def rejected_signals(self) -> int:
        return self._ledger.rejected_signals

    def take_measures(self) -> LedgerMeasures:
        """What was waited for and refused since the last call."""
        return self._ledger.take_measures()

    def snapshot(self) -> LedgerSnapshot:
        """Who has freed what and who waits, for status."""
        return self._ledger.snapshot()

    # -- inside ---------------------------------------------------------------------------------------

    def _check_request(self, specs: Sequence[Spec], seq: int) -> None:
        if not isinstance(seq, int) or isinstance(seq, bool) or seq < 0:
            raise ValueError(f"seq must be the consumer's issue index (an integer from 0), got {seq!r}")
        for spec in specs:
            if not (isinstance(spec, tuple | list) and len(spec) == 2 and isinstance(spec[0], str)):
                raise ValueError(f"a spec is a pair (name, op chain), got {spec!r}")
            if self._served_names is not None and spec[0] not in self._served_names:
                raise WrongProducerError(f"{spec[0]!r} is not among the names this rank serves")

    def _all_published(self, names: Sequence[str]) -> bool:
        for name in names:
            if name in self._gone:
                raise SyncError(f"{name!r} was asked for after its group was freed by every consumer")
        return all(name in self._tensors for name in names)

    def _pack(self, specs: Sequence[Spec], views_for: Callable[[int, Layout], list[torch.Tensor]]) -> int:
        slices = [replay(self._tensors[name], chain) for name, chain in specs]
        offsets, nbytes = pack_offsets([(piece.numel(), piece.dtype) for piece in slices])
        layout = tuple((offset, tuple(piece.shape), piece.dtype) for offset, piece in zip(offsets, slices, strict=True))
        for destination, piece in zip(views_for(nbytes, layout), slices, strict=True):
            destination.copy_(piece)
        return nbytes

    def _drop_group(self, group: int) -> None:
        for name in self._names_of.pop(group, ()):
            self._tensors.pop(name, None)
            self._gone.add(name)
