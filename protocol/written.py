"""What a loader wrote of one parameter: which elements nothing filled, and which were changed after a copy.

Regions are strided views of the parameter's memory, compared as boxes, never element by element. The thing to
watch: offsets count from the parameter's first element, in elements of its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightsync.protocol.boxes import Box, boxes_of, dense_space, intersect
from weightsync.protocol.coverage import find_holes


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
