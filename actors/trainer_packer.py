"""The trainer's side of packed chunks: slots next to its parameters, and the copies that fill them.

Everything is prepared when a consumer's plan arrives; packing a chunk is then a few strided copies. The thing to watch:
slots are registered memory whose addresses consumers keep, so a change of them must reach the transport's metadata, and
`revision` counts those changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.actors.moves import Memory, Moves
from weightsync.actors.pack_desk import PackPlan, PackRequest, Slot
from weightsync.actors.transport import Transport


@dataclass(frozen=True)
class _Prepared:
    """One consumer's slots and, per chunk, its copies and bytes."""

    plan: PackPlan
    slots: list[torch.Tensor]
    chunks: list[tuple[Moves, Slot]]


class TrainerPacker:
    """Packs of one rank.

    Args:
        transport: makes slots readable by consumers.
        shards: everything this rank publishes; nothing else is ever packed.
    """

    def __init__(self, transport: Transport, shards: Sequence[torch.Tensor]) -> None:
        self._transport = transport
        self._memory = Memory(shards)
        self._device = shards[0].device if shards else torch.device("cpu")
        self._prepared: dict[int, _Prepared] = {}
        self.revision = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.numel() for prepared in self._prepared.values() for slot in prepared.slots)

    def expect(self, plans: Mapping[int, PackPlan], live: Collection[int]) -> None:
        """Be ready for what the live consumers ask for; slots of others are given back.

        Raises:
            SyncError: a plan reaches outside of what this rank publishes.
        """
        wanted = {consumer: plan for consumer, plan in plans.items() if consumer in live and plan.nbytes}
        for consumer, prepared in list(self._prepared.items()):
            if consumer not in wanted or wanted[consumer].key != prepared.plan.key:
                self._transport.deregister(prepared.slots)
                del self._prepared[consumer]
                self.revision += 1
        for consumer, plan in wanted.items():
            if consumer not in self._prepared:
                self._prepared[consumer] = self._prepare(plan)
                self.revision += 1

    def serves(self, live: Collection[int]) -> bool:
        """Whether any of these consumers will ask."""
        return any(consumer in live for consumer in self._prepared)

    def pack(self, requests: Sequence[PackRequest]) -> dict[PackRequest, Slot]:
        """Fill the slots of these requests."""
        packed = {}
        for consumer, seq in requests:
            moves, slot = self._prepared[consumer].chunks[seq]
            moves.run()
            packed[consumer, seq] = slot
        return packed

    def close(self) -> None:
        """Give all slots back."""
        self.expect({}, ())

    def _prepare(self, plan: PackPlan) -> _Prepared:
        count = min(plan.num_slots, len(plan.nbytes))
        slots = [torch.zeros(plan.slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        here, chunks = Memory(slots), []
        for seq, (src, nbytes) in enumerate(zip(plan.src_addr, plan.nbytes, strict=True)):
            base = slots[seq % plan.num_slots].data_ptr()
            starts = base + np.cumsum(nbytes) - nbytes
            chunks.append((Moves(src, starts, nbytes, self._memory, here), (base, int(nbytes.sum()))))
        self._transport.register(slots)
        return _Prepared(plan, slots, chunks)
