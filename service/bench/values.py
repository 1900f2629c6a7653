"""Which bytes are right: every element is a function of its tensor, row, column and version.

Element (row, column) of a tensor holds the 16 bits a[row] + b[column] + 257 * version, where a and b are random
and follow from the tensor's name. So a rank fills its shard and a worker checks its slice without either seeing the
other's memory, every element changes with every version, and a run that lands in a wrong place is noticed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch

from weightsync.service.bench.layout import Box, Layout, TensorSpec

_CHUNK_ELEMENTS = 1 << 17
"""What is compared at once stays in the cache."""
_STEP = 257
"""Versions differ in both bytes of every element."""


def allocate(layout: Layout, boxes: Mapping[str, Box]) -> dict[str, torch.Tensor]:
    """A tensor of its own for each box, all zeros and touched."""
    return {
        name: torch.full(layout.tensors[name].shape_of(box), 0, dtype=torch.bfloat16) for name, box in boxes.items()
    }


def fill(layout: Layout, boxes: Mapping[str, Box], tensors: Mapping[str, torch.Tensor], version: int) -> None:
    """Write the right values of a version."""
    for name, box in boxes.items():
        rows, columns = _pattern(layout.tensors[name], box, version)
        bits = tensors[name].view(torch.int16).view(box.rows, box.columns)
        torch.add(rows[:, None], columns[None, :], out=bits)


def differing(layout: Layout, boxes: Mapping[str, Box], tensors: Mapping[str, torch.Tensor], version: int) -> list[str]:
    """Names of the tensors that do not hold the right values of a version, bit for bit."""
    return [name for name, box in boxes.items() if not _right(layout.tensors[name], box, tensors[name], version)]


def _right(spec: TensorSpec, box: Box, tensor: torch.Tensor, version: int) -> bool:
    rows, columns = _pattern(spec, box, version)
    bits = tensor.view(torch.int16).view(box.rows, box.columns)
    return all(
        torch.equal(bits[top:bottom, left:right], rows[top:bottom, None] + columns[None, left:right])
        for top, bottom, left, right in _chunks(box)
    )


def _pattern(spec: TensorSpec, box: Box, version: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows and columns of a box add up to."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
    rows = torch.randint(-(1 << 15), 1 << 15, (spec.rows,), dtype=torch.int16, generator=generator)
    columns = torch.randint(-(1 << 15), 1 << 15, (spec.columns,), dtype=torch.int16, generator=generator)
    shift = (_STEP * version + (1 << 15)) % (1 << 16) - (1 << 15)
    return (
        rows[box.row : box.row + box.rows],
        columns[box.column : box.column + box.columns] + torch.tensor(shift, dtype=torch.int16),
    )


def _chunks(box: Box) -> Iterator[tuple[int, int, int, int]]:
    """(top, bottom, left, right) of parts of at most about `_CHUNK_ELEMENTS`."""
    width = min(box.columns, _CHUNK_ELEMENTS)
    height = max(1, _CHUNK_ELEMENTS // width)
    for top in range(0, box.rows, height):
        for left in range(0, box.columns, width):
            yield top, min(top + height, box.rows), left, min(left + width, box.columns)
