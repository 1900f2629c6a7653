"""Serve slots: where a producer packs what consumers asked for, and who shares one packing.

Per slot-sharing group there is a ring of K slots; a request with issue index `seq` is packed into slot
`seq % K`. The rule to watch (I4): `seq` is the consumer's issue order for this producer, never the order in
which requests happen to run here, and a consumer issues `seq` only after its read of `seq - K` is over. That
alone makes rewriting a slot safe.

The same worker of several inference deployments shares one ring (`consumer_id % workers_per_replica`): the
requests of one `seq` meet, the last live one to arrive packs, and all read the same bytes. This file knows
slots and meetings; blocking is the ledger's, packing is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weightsync.protocol.errors import RegistrationError, SyncError
from weightsync.protocol.ledger import SyncLedger
from weightsync.protocol.packing import buffer_alloc_bytes

Layout = tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
"""Per packed slice: byte offset in the slot, shape, dtype."""


@dataclass
class Meeting:
    """Requests of one (ring, seq): who arrived, and what became of the packing."""

    arrived: set[int] = field(default_factory=set)
    packing: bool = False
    packed: torch.Tensor | None = None
    error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.packed is not None or self.error is not None


class ServeSlots:
    """Rings of serve slots of one producer.

    Args:
        num_slots: K, slots per ring.
        presize_bytes: least size of a slot.
        granularity_bytes: slots are rounded up to a multiple of this.
        workers_per_replica: width of slot sharing; 0 gives every consumer its own ring.
        device: where slots live.
        on_allocate: called with each new slot, to register it with a transport.
    """

    def __init__(
        self,
        num_slots: int,
        presize_bytes: int,
        granularity_bytes: int,
        workers_per_replica: int,
        device: torch.device,
        on_allocate: Callable[[torch.Tensor], None],
    ) -> None:
        self.rings: dict[int, list[torch.Tensor]] = {}
        self.packs_running = 0
        """Packs under way, whatever epoch they are of; changed under the ledger's lock."""
        self._num_slots = num_slots
        self._presize_bytes = presize_bytes
        self._granularity_bytes = granularity_bytes
        self._width = workers_per_replica
        self._device = device
        self._on_allocate = on_allocate
        self._digests: dict[int, dict[int, str]] = {}
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._views: dict[tuple[int, int, Layout], list[torch.Tensor]] = {}

    def ring_of(self, consumer_id: int) -> int:
        """The slot-sharing group of a consumer."""
        return consumer_id % self._width if self._width > 0 else consumer_id

    def reserve(self, consumer_id: int, nbytes: int, plan_digest: str | None) -> None:
        """Make the consumer's ring hold slots of `nbytes`; idempotent, grows only.

        Raises:
            RegistrationError: another consumer of the ring has a different plan; they would read each
                other's bytes.
        """
        if nbytes < 0:
            raise RegistrationError(f"consumer {consumer_id}: cannot reserve {nbytes} bytes")
        ring = self.ring_of(consumer_id)
        digests = self._digests.setdefault(ring, {})
        if plan_digest is not None:
            for other, digest in digests.items():
                if other != consumer_id and digest != plan_digest:
                    raise RegistrationError(
                        f"consumer {consumer_id} shares serve slots (ring {ring}) with consumer {other} but "
                        f"its plan differs ({plan_digest[:12]} against {digest[:12]}); deployments that share "
                        "slots must load the same model with the same parallelism"
                    )
            digests[consumer_id] = plan_digest
        self._ensure(ring, nbytes)

    def begin_epoch(self) -> None:
        """Forget the meetings of the epoch before; rings and cached views stay."""
        self._meetings.clear()

    def serve(
        self,
        ledger: SyncLedger,
        consumer_id: int,
        seq: int,
        pack: Callable[[Callable[[int, Layout], list[torch.Tensor]]], int],
    ) -> torch.Tensor:
        """Pack once for everybody who shares slot `seq`, and return the packed bytes.

        Args:
            pack: called with `views_for(nbytes, layout)`, which gives the destination views; it fills
                them and returns the number of bytes used.

        Returns:
            uint8 view of the slot, valid until the same ring's `seq + K` is packed.
        """
        ring = self.ring_of(consumer_id)
        with ledger.locked():
            epoch = ledger.epoch
            meeting = self._arrive(ring, seq, consumer_id)

        def my_turn() -> bool:
            return meeting.over or (not meeting.packing and self._sharers(ledger, ring) <= meeting.arrived)

        with ledger.locked():
            missing = sorted(self._sharers(ledger, ring) - meeting.arrived)
            ledger.wait_until(
                my_turn, f"consumers {missing} to ask for slot {seq} of ring {ring}", consumer_id, measured_as="slot"
            )
            mine = not meeting.over
            meeting.packing = meeting.packing or mine
            self.packs_running += mine
        if mine:
            try:
                self._pack(meeting, ring, seq, pack)
            finally:
                with ledger.locked():
                    self.packs_running -= 1
                    ledger.touch()
        ledger.check_open(epoch, consumer_id)
        if meeting.error is not None:
            raise meeting.error
        assert meeting.packed is not None
        return meeting.packed

    # -- inside ---------------------------------------------------------------------------------------

    def _sharers(self, ledger: SyncLedger, ring: int) -> set[int]:
        return {consumer for consumer in ledger.live if self.ring_of(consumer) == ring}

    def _arrive(self, ring: int, seq: int, consumer_id: int) -> Meeting:
        earlier = self._meetings.get((ring, seq - self._num_slots))
        if earlier is not None and not earlier.over:
            raise SyncError(
                f"consumer {consumer_id} asks for slot {seq} of ring {ring} while slot "
                f"{seq - self._num_slots}, which it would overwrite, is not served yet"
            )
        meeting = self._meetings.setdefault((ring, seq), Meeting())
        if consumer_id in meeting.arrived:
            raise SyncError(f"consumer {consumer_id} asks twice for slot {seq} of ring {ring} in one epoch")
        meeting.arrived.add(consumer_id)
        return meeting

    def _pack(
        self,
        meeting: Meeting,
        ring: int,
        seq: int,
        pack: Callable[[Callable[[int, Layout], list[torch.Tensor]]], int],
    ) -> None:
        slot = seq % self._num_slots

        def views_for(nbytes: int, layout: Layout) -> list[torch.Tensor]:
            self._ensure(ring, nbytes)
            return self._packed_views(ring, slot, layout)

        try:
            nbytes = pack(views_for)
        except BaseException as error:
            meeting.error = error
        else:
            meeting.packed = self.rings[ring][slot][:nbytes]

    def _ensure(self, ring: int, nbytes: int) -> None:
        wanted = buffer_alloc_bytes(max(nbytes, 1), self._presize_bytes, self._granularity_bytes)
        slots = self.rings.get(ring)
        if slots and slots[0].numel() >= nbytes:
            return
        self._views = {key: views for key, views in self._views.items() if key[0] != ring}
        self.rings[ring] = [torch.zeros(wanted, dtype=torch.uint8, device=self._device) for _ in range(self._num_slots)]
        for slot in self.rings[ring]:
            self._on_allocate(slot)

    def _packed_views(self, ring: int, slot: int, layout: Layout) -> list[torch.Tensor]:
        views = self._views.get((ring, slot, layout))
        if views is None:
            memory = self.rings[ring][slot]
            views = []
            for offset, shape, dtype in layout:
                nbytes = int(torch.Size(shape).numel()) * dtype.itemsize
                views.append(memory[offset : offset + nbytes].view(dtype).view(shape))
            self._views[(ring, slot, layout)] = views
        return views
