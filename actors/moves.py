"""Strided copies within one process's memory: what packs at a producer and scatters at a consumer.

Addresses become views of the tensors they lie in, so host and device memory are the same to this code. The thing to
watch: a prepared `Moves` holds views, so it is good as long as its memory lies where it lay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from weightsync.protocol.cost_model import MoveCosts
from weightsync.protocol.errors import SyncError
from weightsync.protocol.strided import StridedBlock, fold_runs

Int64 = npt.NDArray[np.int64]

_LANES = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_MEASURED_BYTES = 32 << 20


class Memory:
    """Tensors' storages by address.

    Args:
        tensors: whose storages may be touched.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._flat: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._flat:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                self._flat[storage.data_ptr()] = flat.set_(storage)  # type: ignore[call-overload]
        self._starts = np.array(sorted(self._flat), dtype=np.int64)

    def labels(self, addr: Int64) -> Int64:
        """Which storage each address lies in or after; -1 before all of them."""
        return np.searchsorted(self._starts, addr, side="right") - 1

    def containing(self, first: int, last: int) -> tuple[torch.Tensor, int]:
        """(all bytes of the storage that holds addresses first..last, its address).

        Raises:
            SyncError: no storage holds them.
        """
        at = int(np.searchsorted(self._starts, first, side="right")) - 1
        if at >= 0:
            start = int(self._starts[at])
            flat = self._flat[start]
            if last <= start + flat.numel():
                return flat, start
        raise SyncError(f"bytes {first:#x}..{last:#x} lie in no memory that was published or registered here")


class Moves:
    """Copies prepared for repetition.

    Args:
        src, dst: absolute addresses of runs.
        nbytes: their lengths.
        source, target: the memory they lie in.

    Raises:
        SyncError: a run reaches outside of it.
    """

    def __init__(self, src: Int64, dst: Int64, nbytes: Int64, source: Memory, target: Memory) -> None:
        self._pairs = [
            _views(block, source, target) for block in _fold_within_storages(src, dst, nbytes, source, target)
        ]

    @torch.no_grad()
    def run(self) -> None:
        """Copy everything. Returns when it is there, on a device too: who reads it next may know no stream."""
        for target, source in self._pairs:
            target.copy_(source)
        if self._pairs:
            await_device(self._pairs[0][0].device)


def _fold_within_storages(
    src: Int64, dst: Int64, nbytes: Int64, source: Memory, target: Memory
) -> Iterator[StridedBlock]:
    """Blocks of which each lies in one storage on either side: equal runs of two storages may repeat at a step too."""
    changes = (np.diff(source.labels(src)) != 0) | (np.diff(target.labels(dst)) != 0)
    for first, last in pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(src)]):
        yield from fold_runs(src[first:last], dst[first:last], nbytes[first:last])


def _views(block: StridedBlock, source: Memory, target: Memory) -> tuple[torch.Tensor, torch.Tensor]:
    src_flat, src_base = source.containing(*_extent(block.src, block.counts, block.src_steps, block.nbytes))
    dst_flat, dst_base = target.containing(*_extent(block.dst, block.counts, block.dst_steps, block.nbytes))
    src, dst = block.src - src_base, block.dst - dst_base
    divisor = math.gcd(block.nbytes, src, dst, *block.src_steps, *block.dst_steps, src_base, dst_base)
    size, lane = next((size, lane) for size, lane in _LANES if divisor % size == 0)
    shape = (*block.counts, block.nbytes // size)
    return (
        _view(dst_flat, lane, size, shape, block.dst_steps, dst),
        _view(src_flat, lane, size, shape, block.src_steps, src),
    )


def _view(
    flat: torch.Tensor, lane: torch.dtype, size: int, shape: tuple[int, ...], steps: tuple[int, ...], offset: int
) -> torch.Tensor:
    lanes = flat[: flat.numel() // size * size].view(lane)
    return lanes.as_strided(shape, (*(step // size for step in steps), 1), offset // size)


def _extent(at: int, counts: tuple[int, ...], steps: tuple[int, ...], nbytes: int) -> tuple[int, int]:
    """First address and end of a block's runs."""
    reach = [(count - 1) * step for count, step in zip(counts, steps, strict=True)]
    return at + sum(r for r in reach if r < 0), at + nbytes + sum(r for r in reach if r > 0)


def await_device(device: torch.device) -> None:
    """Wait for everything that this process has asked of a device; nothing to do for host memory."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_moves(device: torch.device) -> MoveCosts:
    """What strided copies cost here: short and long rows out of twice as wide ones, the faster of three each."""
    wide = torch.zeros(2 * _MEASURED_BYTES, dtype=torch.uint8, device=device)
    packed = torch.zeros(_MEASURED_BYTES, dtype=torch.uint8, device=device)
    seconds = {}
    for row in (512, 65536):
        source = wide.view(torch.int64).view(-1, 2 * row // 8)[:, : row // 8]
        target = packed.view(torch.int64).view(-1, row // 8)
        seconds[row] = min(_timed(target, source) for _ in range(3))
    rate = _MEASURED_BYTES / seconds[65536]
    per_run = (seconds[512] - seconds[65536]) / (_MEASURED_BYTES // 512)
    return MoveCosts(rate, max(per_run, 1e-9))


def _timed(target: torch.Tensor, source: torch.Tensor) -> float:
    started = time.perf_counter()
    target.copy_(source)
    await_device(target.device)
    return time.perf_counter() - started
