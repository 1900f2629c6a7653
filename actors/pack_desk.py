"""Packs of live memory: consumers ask, the trainer rank packs, and here is where they meet.

Only the trainer's process can read its parameters at memory speed, and its thread waits in `publish` anyway; so it
takes requests from this desk until the epoch is over. The rule to watch (I4): chunk `seq` goes to slot `seq % K` of
its consumer, and a consumer asks for `seq` only when its read of `seq - K` is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.protocol.errors import RegistrationError, SyncError
from weightsync.protocol.ledger import SyncLedger

PackRequest = tuple[int, int]
"""Consumer id, and the chunk's issue index `seq` at this rank."""
Slot = tuple[int, int]
"""Address in the trainer's process, bytes."""


@dataclass(frozen=True, eq=False)
class PackPlan:
    """What one consumer has packed at one rank: per chunk the runs in order, and how many slots they take turns in.

    `src_addr` are addresses in the trainer's process, `nbytes` their lengths; a chunk is its runs end to end. Equal
    `key`s mean the same plan.
    """

    key: str
    src_addr: tuple[npt.NDArray[np.int64], ...]
    nbytes: tuple[npt.NDArray[np.int64], ...]
    num_slots: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest chunk."""
        return max((int(lengths.sum()) for lengths in self.nbytes), default=0)

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots together."""
        return self.slot_bytes * min(self.num_slots, len(self.nbytes))


class PackDesk:
    """Requests and packed slots of one rank. Blocking is the ledger's.

    Args:
        ledger: of the rank's producer.
        budget_bytes: limit on all consumers' slots together; None for none.
    """

    def __init__(self, ledger: SyncLedger, budget_bytes: int | None) -> None:
        self._ledger = ledger
        self._budget_bytes = budget_bytes
        self._plans: dict[int, PackPlan] = {}
        self._asked: list[PackRequest] = []
        self._seen: set[PackRequest] = set()
        self._packed: dict[PackRequest, Slot] = {}

    @property
    def plans(self) -> dict[int, PackPlan]:
        """Per consumer what it has packed here."""
        with self._ledger.locked():
            return dict(self._plans)

    def reserve(self, consumer_id: int, plan: PackPlan) -> int | None:
        """Take a consumer's plan in place of the one before. If the budget does not allow it: the bytes needed."""
        with self._ledger.locked():
            others = sum(known.total_bytes for other, known in self._plans.items() if other != consumer_id)
            needed = others + plan.total_bytes
            if self._budget_bytes is not None and needed > self._budget_bytes:
                return needed
            self._plans[consumer_id] = plan
            return None

    def begin_epoch(self) -> None:
        """Forget the requests of the epoch before."""
        self._asked, self._seen, self._packed = [], set(), {}

    def request(self, consumer_id: int, seq: int, epoch: int) -> Slot:
        """Ask for a chunk and wait until it is packed.

        Raises:
            RegistrationError: the plan has no such chunk.
            SyncError: asked twice, or before the chunk whose slot it takes was packed.
            StaleEpochError: another epoch, or a consumer that is not live.
        """
        request = (consumer_id, seq)
        with self._ledger.locked():
            self._ledger.check_open(epoch, consumer_id)
            plan = self._plans.get(consumer_id)
            if plan is None or not 0 <= seq < len(plan.nbytes):
                raise RegistrationError(f"consumer {consumer_id} has no packed chunk {seq} reserved here; plan again")
            before = (consumer_id, seq - plan.num_slots)
            if request in self._seen or (before[1] >= 0 and before not in self._packed):
                raise SyncError(
                    f"consumer {consumer_id} asks for packed chunk {seq} twice, or before chunk {before[1]}, whose "
                    "slot it takes, was packed"
                )
            self._seen.add(request)
            self._asked.append(request)
            self._ledger.touch()
            self._ledger.wait_until(
                lambda: request in self._packed,
                f"the trainer to pack chunk {seq} of consumer {consumer_id}",
                consumer_id,
            )
            return self._packed[request]

    def exchange(self, epoch: int, packed: Mapping[PackRequest, Slot]) -> list[PackRequest]:
        """Hand over what was packed and wait for requests. Nothing: the epoch needs no more packs."""
        with self._ledger.locked():
            self._ledger.check_open(epoch)
            self._packed.update(packed)
            self._ledger.touch()
            self._ledger.wait_until(
                lambda: bool(self._asked) or self._ledger.all_released, "consumers to ask for packed chunks"
            )
            asked, self._asked = self._asked, []
            return asked
