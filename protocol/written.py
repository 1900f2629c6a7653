"""What a loader wrote of one parameter: which elements nothing filled, and which were changed after a copy.

Regions are strided views of the parameter's memory, compared as boxes, never element by element. The thing to
watch: offsets count from the parameter's first element, in elements of its dtype. Across parameters, whose memory
may be shared, `find_shared_bytes` compares addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.protocol.boxes import Box, boxes_of, dense_space, intersect, span_of
from weightsync.protocol.coverage import find_holes
from weightsync.protocol.folding import Segment
from weightsync.protocol.lowering import lower_segment


@dataclass(frozen=True, slots=True)
class Region:
    """A strided part of a parameter."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, view: torch.Tensor, parameter: torch.Tensor) -> Region:
        """Where `view` lies in `parameter`, of whose storage it is."""
        return cls(int(view.storage_offset() - parameter.storage_offset()), tuple(view.shape), tuple(view.stride()))


class WrittenParameter:
    """One parameter's shape and strides, and questions about regions of it."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._whole = Region(0, tuple(parameter.shape), tuple(parameter.stride()))
        self._space = dense_space(self._whole.shape, self._whole.strides)

    def hole(self, written: Sequence[Region]) -> str | None:
        """The first box none of the regions covers, as `start..end` in row-major coordinates, or None."""
        boxes = [box for region in written for box in self._boxes(region)]
        for wanted in self._boxes(self._whole):
            holes = find_holes(wanted, boxes)
            if holes:
                return f"{holes[0].start}..{holes[0].end} of {self._space}"
        return None

    def overlap(self, left: Region, right: Region) -> bool:
        """Whether two regions share an element."""
        right_boxes = self._boxes(right)
        return any(intersect(a, b) is not None for a in self._boxes(left) for b in right_boxes)

    def _boxes(self, region: Region) -> list[Box]:
        return boxes_of(
            self._space, region.shape, region.offset, region.strides, 0, region.strides, what="a loader's write"
        )


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A strided region at an address; strides in elements of `itemsize` bytes."""

    addr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the one after the last."""
        return self.addr, self.addr + span_of(self.shape, self.strides) * self.itemsize


def find_shared_bytes(regions: Sequence[MemoryRegion]) -> tuple[int, int] | None:
    """Indices of two regions that have a byte in common, or None.

    Regions that lie one behind the other are told apart by their spans; only interleaved ones are enumerated, run by
    run.
    """
    for cluster in _interleaved(regions):
        starts, lengths = zip(*(_runs(regions[index]) for index in cluster), strict=True)
        owner = np.repeat(cluster, [len(s) for s in starts])
        start = np.concatenate(starts)
        end = start + np.repeat(lengths, [len(s) for s in starts])
        order = np.argsort(start, kind="stable")
        hits = np.flatnonzero(start[order][1:] < end[order][:-1])
        if len(hits):
            return int(owner[order][hits[0]]), int(owner[order][hits[0] + 1])
    return None


def _interleaved(regions: Sequence[MemoryRegion]) -> Iterator[list[int]]:
    """Groups of two or more regions whose spans overlap, directly or through others."""
    reached = -1
    cluster: list[int] = []
    for index in sorted(range(len(regions)), key=lambda i: regions[i].span):
        start, end = regions[index].span
        if start == end:
            continue
        if start >= reached:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(index)
        reached = max(reached, end)
    if len(cluster) > 1:
        yield cluster


def _runs(region: MemoryRegion) -> tuple[np.ndarray, int]:
    """(addresses of contiguous runs, bytes of each)."""
    strides = tuple(stride * region.itemsize for stride in region.strides)
    shape, strides = (*region.shape, region.itemsize), (*strides, 1)
    _, starts, nbytes = lower_segment(Segment(0, 0, strides, 0, region.addr, strides, shape), 1)
    return starts, nbytes
