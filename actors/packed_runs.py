"""Runs packed one after another: what a producer actor sends where a peer cannot read the trainer's own memory.

Both sides derive the offsets in the pack from the byte counts alone, in order and without gaps; nothing else says
which byte is whose. Addresses are checked before they are touched: the thing to watch is that a run lies in one
registered storage as a whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from weightsync.protocol.errors import SyncError

Int64 = npt.NDArray[np.int64]


def pack_starts(nbytes: Int64) -> Int64:
    """Byte offset of each run in the pack."""
    return np.cumsum(nbytes) - nbytes


def pack_runs(memory: npt.NDArray[np.uint8], offsets: Int64, nbytes: Int64, into: npt.NDArray[np.uint8]) -> None:
    """Copy runs of `memory` into the start of `into`."""
    for start, offset, length in zip(pack_starts(nbytes).tolist(), offsets.tolist(), nbytes.tolist(), strict=True):
        into[start : start + length] = memory[offset : offset + length]


def scatter_runs(packed: npt.NDArray[np.uint8], dst_addr: npt.NDArray[np.uint64], nbytes: Int64) -> None:
    """Copy a pack to host addresses, which the caller has checked."""
    base = packed.ctypes.data
    for start, addr, length in zip(pack_starts(nbytes).tolist(), dst_addr.tolist(), nbytes.tolist(), strict=True):
        ctypes.memmove(addr, base + start, length)


def check_offsets(offsets: Int64, nbytes: Int64, size: int, who: str) -> None:
    """Raises SyncError unless all runs lie inside `size` published bytes."""
    if len(offsets) != len(nbytes):
        raise SyncError(f"{who} asks for {len(offsets)} runs of {len(nbytes)} lengths")
    if len(offsets) and (offsets.min() < 0 or nbytes.min() < 0 or (offsets + nbytes).max() > size):
        raise SyncError(f"{who} reads outside the {size} bytes this rank published")


class RegisteredStorages:
    """Storages that a transport may write to, each once; keeps them alive as long as they are registered."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], torch.Tensor] = {}
        self._sorted: list[tuple[int, int]] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Remember the storages of these tensors; returns a tensor for each that is new."""
        new = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes())
            if key[1] and key not in self._storages:
                new[key] = tensor
        self._storages.update(new)
        self._sorted = sorted(self._storages)
        return list(new.values())

    def check(self, addr: npt.NDArray[np.uint64], nbytes: Int64) -> None:
        """Raises SyncError unless each run lies in one storage as a whole."""
        self._find(addr, nbytes)

    def views(self, addr: npt.NDArray[np.uint64], nbytes: Int64) -> list[torch.Tensor]:
        """The runs as uint8 tensors over the registered storages.

        Raises:
            SyncError: a run lies outside them.
        """
        found = []
        for index, at, length in zip(self._find(addr, nbytes).tolist(), addr.tolist(), nbytes.tolist(), strict=True):
            base, _ = self._sorted[index]
            tensor = self._storages[self._sorted[index]]
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found.append(view.set_(tensor.untyped_storage(), at - base, (length,), (1,)))  # type: ignore[call-overload]
        return found

    def remove(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Forget the storages of these tensors; returns a tensor for each that was registered."""
        keys = [(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors]
        known = [self._storages.pop(key) for key in keys if key in self._storages]
        self._sorted = sorted(self._storages)
        return known

    @property
    def tensors(self) -> list[torch.Tensor]:
        """One for each storage."""
        return list(self._storages.values())

    def _find(self, addr: npt.NDArray[np.uint64], nbytes: Int64) -> Int64:
        bases = np.array([base for base, _ in self._sorted], dtype=np.int64)
        sizes = np.array([size for _, size in self._sorted], dtype=np.int64)
        start = addr.astype(np.int64)
        index = np.searchsorted(bases, start, side="right") - 1
        inside = (index >= 0) & (nbytes >= 0)
        inside[inside] &= (start + nbytes)[inside] <= (bases + sizes)[index[inside]]
        if not inside.all():
            at = int(np.flatnonzero(~inside)[0])
            raise SyncError(
                f"a read of {int(nbytes[at])} bytes would write memory at {int(start[at]):#x} that was not registered "
                f"({int((~inside).sum())} of {len(start)} such runs)"
            )
        return index
