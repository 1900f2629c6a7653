"""Memory a trainer rank exports to its producer actor: a ring of gathered groups, or a mirror of its shard.

`ExportRing` holds at most L + 1 gathered groups (I5): a group is packed into a free slot at 16-byte offsets and
the slot is free again only when the group was freed everywhere, in whatever order groups free. `ShardMirror`
is for transports that cannot reach into the trainer process. The thing to watch: both are shared memory whose
names are unlinked once the producer has mapped them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from weightsync.actors.interfaces import LocalShard
from weightsync.actors.producer_actor import PackedTensor
from weightsync.actors.shared_memory import SharedSegment
from weightsync.protocol.dtypes import dtype_from_name, dtype_name
from weightsync.protocol.errors import SyncError
from weightsync.protocol.messages import TensorMeta
from weightsync.protocol.packing import pack_offsets


class ExportRing:
    """Slots for gathered groups.

    Args:
        label: part of the segments' names.
        groups: per gather group the tensors this rank will gather; sizes the slots.
        num_slots: L + 1.
    """

    def __init__(self, label: str, groups: Sequence[Sequence[TensorMeta]], num_slots: int) -> None:
        slot_bytes = max((_group_bytes(group) for group in groups), default=0)
        self.segments: list[SharedSegment] = []
        try:
            for slot in range(num_slots):
                self.segments.append(SharedSegment.create(f"{label}-slot{slot}", slot_bytes))
        except BaseException:
            self.close()
            raise
        self._slot_of: dict[int, int] = {}

    @property
    def has_free_slot(self) -> bool:
        return len(self._slot_of) < len(self.segments)

    @property
    def resident_groups(self) -> list[int]:
        return sorted(self._slot_of)

    def reset(self) -> None:
        """Forget what an abandoned attempt left in slots."""
        self._slot_of.clear()

    @torch.no_grad()
    def fill(self, group: int, tensors: Mapping[str, torch.Tensor]) -> tuple[str, list[PackedTensor]]:
        """Pack a gathered group into a free slot; returns the segment's path and what lies where.

        Raises:
            SyncError: no slot is free (the caller must have credit), or the group is larger than announced.
        """
        free = [slot for slot in range(len(self.segments)) if slot not in self._slot_of.values()]
        if not free:
            raise SyncError(f"group {group}: all {len(self.segments)} export slots hold unfreed groups")
        segment = self.segments[free[0]]
        offsets, nbytes = pack_offsets([(t.numel(), t.dtype) for t in tensors.values()])
        if nbytes > segment.name.nbytes:
            raise SyncError(f"group {group} takes {nbytes} bytes and was announced with {segment.name.nbytes}")
        packed = []
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True):
            end = offset + tensor.numel() * tensor.element_size()
            segment.memory[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            packed.append((name, offset, tuple(tensor.shape), dtype_name(tensor.dtype)))
        self._slot_of[group] = free[0]
        return segment.name.path, packed

    def release(self, groups: Iterable[int]) -> None:
        """The producer says these groups were freed by everybody."""
        for group in groups:
            self._slot_of.pop(group, None)

    def close(self) -> None:
        for segment in self.segments:
            segment.unlink()
        self.segments = []


class ShardMirror:
    """A copy of a rank's shards in shared memory, refreshed at each publish.

    `offsets` are byte offsets of the shards, in the order given.
    """

    def __init__(self, label: str, shards: Sequence[LocalShard]) -> None:
        self.offsets, nbytes = pack_offsets([(s.tensor.numel(), s.tensor.dtype) for s in shards])
        self.segment = SharedSegment.create(f"{label}-mirror", nbytes)

    @torch.no_grad()
    def refresh(self, shards: Sequence[LocalShard]) -> None:
        """Copy the shards' present values."""
        for shard, offset in zip(shards, self.offsets, strict=True):
            tensor = shard.tensor
            end = offset + tensor.numel() * tensor.element_size()
            self.segment.memory[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def close(self) -> None:
        self.segment.unlink()


def _group_bytes(group: Sequence[TensorMeta]) -> int:
    return pack_offsets([(torch.Size(meta.shape).numel(), dtype_from_name(meta.dtype)) for meta in group])[1]
