"""How slices of mixed dtypes lie one after another in one buffer.

Every slice starts at a multiple of `PACK_ALIGNMENT`, so that a typed view of it is aligned for any dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightsync.protocol.dtypes import dtype_from_name

PACK_ALIGNMENT = 16
"""Bytes; covers the alignment of every torch dtype, complex128 included."""


def pack_offsets(items: Iterable[tuple[int, torch.dtype | str]]) -> tuple[list[int], int]:
    """Byte offsets of slices packed in order.

    Args:
        items: (number of elements, dtype or its name) per slice.

    Returns:
        The offsets, and the bytes the buffer needs: the end of the last slice.

    Raises:
        ValueError: a negative number of elements, or a name that is no dtype.
    """
    offsets: list[int] = []
    end = 0
    for numel, dtype in items:
        if numel < 0:
            raise ValueError(f"slice {len(offsets)} has {numel} elements")
        itemsize = (dtype_from_name(dtype) if isinstance(dtype, str) else dtype).itemsize
        start = _round_up(end, PACK_ALIGNMENT)
        offsets.append(start)
        end = start + numel * itemsize
    return offsets, end


def buffer_alloc_bytes(nbytes: int, presize: int = 0, granularity: int = 256 << 20) -> int:
    """Bytes to allocate for a buffer that must hold `nbytes`.

    Args:
        nbytes: bytes needed.
        presize: least size, for buffers that would otherwise grow again.
        granularity: the result is a multiple of this; 0 or 1 gives the exact size.

    Raises:
        ValueError: a negative size or granularity.
    """
    if nbytes < 0 or presize < 0:
        raise ValueError(f"sizes must not be negative, got nbytes={nbytes}, presize={presize}")
    if granularity < 0:
        raise ValueError(f"granularity must not be negative, got {granularity}")
    return _round_up(max(nbytes, presize), max(granularity, 1))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
