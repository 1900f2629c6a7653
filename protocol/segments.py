"""From a recorded copy to the runs that carry it out: which bytes of which shard go where.

    1. the op chain becomes a strided view of the logical tensor (`source_view`), geometry by torch
    2. view and destination are joined into strided lines of bytes contiguous on both sides
    3. lines are cut by the shards' boxes; each byte is taken from the first shard that holds it
    4. runs that continue on both sides are joined

All of it in numpy, per line and never per element, so that a column slice of thousands of rows costs no Python
objects. The thing to watch: from step 2 on everything is bytes. A copy that cannot land in place (another
dtype, a transpose) is refused here, and `bounce_copy` says how to read it densely and scatter it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from weightsync.protocol.copies import OpChain, RecordedCopy
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.shards import Source, SourceShard
from weightsync.protocol.views import describe_chain, replay

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

MIN_RUN_BYTES = 64
MANY_RUNS = 1024
"""A copy of more than MANY_RUNS runs, each under MIN_RUN_BYTES, is read densely and scattered instead: a
descriptor costs about as long as reading 16 KiB, a scatter runs at memory speed."""


@dataclass(frozen=True)
class PullSegment:
    """One contiguous run: `nbytes` at `src_addr` of a session to byte `dst_byte` of a parameter."""

    session: int
    src_addr: int
    param_name: str
    dst_byte: int
    nbytes: int


@dataclass(frozen=True)
class Runs:
    """Runs of one session, equal lengths; `dst_byte` counts from the parameter's first byte."""

    session: int
    src_addr: UInt64
    dst_byte: Int64
    nbytes: Int64


@dataclass(frozen=True)
class SourceView:
    """A chain's result as a strided view of the contiguous logical tensor; offset and strides in elements of
    `dtype`. `rest` is what could not be expressed that way and must be replayed on the data."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    prefix: OpChain
    rest: OpChain


@dataclass(frozen=True)
class Bounce:
    """How to read a copy densely: run `copy` into `scratch_elements` of the source's dtype, then `view` it."""

    copy: RecordedCopy
    scratch_elements: int
    order: tuple[int, ...]
    rest: OpChain

    def view(self, scratch: torch.Tensor) -> torch.Tensor:
        """The loader's result over flat scratch, to be copied into the destination."""
        dense = scratch.view(self.copy.dest_shape)
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return replay(dense.permute(inverse), self.rest)


def plan_pull(
    copy: RecordedCopy,
    *,
    global_shape: tuple[int, ...],
    src_dtype: torch.dtype | str,
    elsize: int,
    shards: Sequence[SourceShard],
) -> list[PullSegment]:
    """Maximal contiguous runs of one copy; as `lower_copy`, one object per run.

    Raises:
        InvalidLayoutError, UnsupportedLayoutError: as `lower_copy`, but small runs are not refused.
    """
    name = src_dtype if isinstance(src_dtype, str) else str(src_dtype).removeprefix("torch.")
    source = Source(copy.src_name, tuple(global_shape), name, elsize, tuple(shards))
    return [
        PullSegment(runs.session, src, copy.param_name, dst, nbytes)
        for runs in lower_copy(copy, source, refuse_small_runs=False)
        for src, dst, nbytes in zip(runs.src_addr.tolist(), runs.dst_byte.tolist(), runs.nbytes.tolist(), strict=True)
    ]


def lower_copy(copy: RecordedCopy, source: Source, *, refuse_small_runs: bool = True) -> list[Runs]:
    """Runs of one copy, per session, in source address order.

    Raises:
        InvalidLayoutError: no shard holds a part that the copy needs, or shapes disagree.
        UnsupportedLayoutError: the copy converts dtypes, is no strided view, or (unless allowed) falls into many
            tiny runs; read it through `bounce_copy`.
    """
    view = source_view(copy, source.global_shape, dtype_from_name(source.dtype))
    if view.rest:
        raise UnsupportedLayoutError(f"{describe_chain(copy.src_name, copy.op_chain)} is no strided view")
    if view.dtype != copy.dest_dtype:
        raise UnsupportedLayoutError(
            f"{describe_chain(copy.src_name, copy.op_chain)} is {view.dtype} and {copy.param_name} is "
            f"{copy.dest_dtype}; it cannot land in place"
        )
    if view.shape != copy.dest_shape:
        raise InvalidLayoutError(
            f"{describe_chain(copy.src_name, copy.op_chain)} has shape {view.shape} and its destination in "
            f"{copy.param_name} {copy.dest_shape}"
        )
    starts, targets, length = _lines(view, copy, refuse_small_runs)
    return _cut_by_shards(starts, targets, length, source, copy)


def bounce_copy(copy: RecordedCopy, src_shape: tuple[int, ...], src_dtype: torch.dtype) -> Bounce:
    """A dense detour for a copy that cannot land in place: exactly the needed elements, in source order.

    Raises:
        InvalidLayoutError: the chain does not fit the source.
    """
    view = source_view(copy, src_shape, src_dtype)
    order = tuple(sorted(range(len(view.shape)), key=lambda dim: (-view.strides[dim], dim)))
    shape = tuple(view.shape[dim] for dim in order)
    dense = torch.empty(shape, device="meta")
    chain = (*view.prefix, ("permute", (order,), ())) if order else view.prefix
    detour = replace(
        copy,
        op_chain=chain,
        dest_offset=0,
        dest_shape=shape,
        dest_stride=tuple(dense.stride()),
        dest_dtype=view.dtype,
    )
    return Bounce(detour, dense.numel(), order, view.rest)


def source_view(copy: RecordedCopy, src_shape: tuple[int, ...], src_dtype: torch.dtype) -> SourceView:
    """The longest prefix of the chain that is one strided view of the logical tensor.

    `contiguous` moves no element in logical order, so it is passed over; a later `view` that needs it ends the
    prefix.

    Raises:
        InvalidLayoutError: the chain does not fit the source.
    """
    base = torch.empty(tuple(src_shape), dtype=src_dtype, device="meta")
    current, skipped = base, False
    prefix: list[OpChain] = []
    position = 0
    while position < len(copy.op_chain):
        step = 2 if copy.op_chain[position][0] in ("chunk", "unbind") else 1
        entries = copy.op_chain[position : position + step]
        if entries[0][0] == "contiguous":
            skipped, position = skipped or not current.is_contiguous(), position + 1
            continue
        viewed = _as_view(current, entries, copy, skipped)
        if viewed is None:
            break
        current, position = viewed, position + step
        prefix.append(entries)
    rest = copy.op_chain[position:] if position < len(copy.op_chain) else ()
    return SourceView(
        dtype=current.dtype,
        offset=int(current.storage_offset()),
        shape=tuple(current.shape),
        strides=tuple(current.stride()),
        prefix=tuple(entry for entries in prefix for entry in entries),
        rest=(("contiguous", (), ()), *rest) if rest else (),
    )


# -- step 1 -------------------------------------------------------------------------------------------


def _as_view(
    current: torch.Tensor, entries: OpChain, copy: RecordedCopy, skipped_contiguous: bool
) -> torch.Tensor | None:
    """The entries applied, if the result still views the same memory, else None."""
    try:
        result = replay(current, entries)
    except ValueError as error:
        if skipped_contiguous:  # `view` of what would have been contiguous by now
            return None
        raise InvalidLayoutError(f"{describe_chain(copy.src_name, copy.op_chain)}: {error}") from None
    same = result.untyped_storage()._cdata == current.untyped_storage()._cdata
    return result if same else None


# -- step 2 -------------------------------------------------------------------------------------------


def _lines(view: SourceView, copy: RecordedCopy, refuse_small_runs: bool) -> tuple[Int64, Int64, int]:
    """Byte starts in the logical tensor, byte starts in the parameter, and the one length of all lines."""
    itemsize = view.dtype.itemsize
    dims = [
        (size, stride * itemsize, dest * itemsize)
        for size, stride, dest in zip(view.shape, view.strides, copy.dest_stride, strict=True)
        if size != 1
    ]
    outer, length = _coalesce(dims, itemsize)
    count = 1
    for size, _, _ in outer:
        count *= size
    if refuse_small_runs and count > MANY_RUNS and length < MIN_RUN_BYTES:
        raise UnsupportedLayoutError(
            f"{describe_chain(copy.src_name, copy.op_chain)} into {copy.param_name} falls into {count} runs of "
            f"{length} bytes"
        )
    starts = np.array([view.offset * itemsize], dtype=np.int64)
    targets = np.array([copy.dest_offset * itemsize], dtype=np.int64)
    for size, src_stride, dst_stride in outer:
        steps = np.arange(size, dtype=np.int64)
        starts = (starts[:, None] + steps * src_stride).ravel()
        targets = (targets[:, None] + steps * dst_stride).ravel()
    return starts, targets, length


def _coalesce(dims: list[tuple[int, int, int]], itemsize: int) -> tuple[list[tuple[int, int, int]], int]:
    """Fold trailing dimensions that are contiguous on both sides into the line length."""
    outer, length = list(dims), itemsize
    while outer and outer[-1][1] == length and outer[-1][2] == length:
        length *= outer.pop()[0]
    if any(size == 0 for size, _, _ in dims):
        return [(0, 0, 0)], 0
    return outer, length


# -- step 3 -------------------------------------------------------------------------------------------


def _cut_by_shards(starts: Int64, targets: Int64, length: int, source: Source, copy: RecordedCopy) -> list[Runs]:
    lengths = np.full(len(starts), length, dtype=np.int64)
    taken: dict[int, list[tuple[Int64, Int64, Int64]]] = {}
    for shard in source.shards:
        if not len(starts):
            break
        grab = _Grab(source, shard)
        inside, outside = grab.split(starts, targets, lengths)
        if len(inside[0]):
            src = grab.addresses(inside[0])
            taken.setdefault(shard.session, []).append((src, inside[1], inside[2]))
        starts, targets, lengths = outside
    if len(starts):
        first = np.unravel_index(int(starts.min()) // source.elsize, source.global_shape or (1,))
        raise InvalidLayoutError(
            f"{copy.src_name!r}: no shard holds element {tuple(int(i) for i in first)} of {source.global_shape} "
            f"({int(lengths.sum())} bytes are missing), which {copy.param_name} needs"
        )
    return [_joined(session, pieces) for session, pieces in sorted(taken.items())]


class _Grab:
    """One shard's box in byte space: what of a line lies in it, and where in its memory.

    Let d be the innermost dimension the box does not span. The logical tensor is then blocks of
    `block` bytes (dimensions d and below); the box holds [low, high) of those blocks whose leading
    coordinates it contains, one after the other.
    """

    def __init__(self, source: Source, shard: SourceShard) -> None:
        shape, offset, extent = source.global_shape, shard.offset, shard.shape
        cut = max((dim for dim in range(len(shape)) if extent[dim] != shape[dim]), default=0)
        below = source.elsize
        for size in shape[cut + 1 :]:
            below *= size
        size_at_cut, low, extent_at_cut = (shape[cut], offset[cut], extent[cut]) if shape else (1, 0, 1)
        self.block = size_at_cut * below
        self.low, self.high = low * below, (low + extent_at_cut) * below
        self._outer = list(zip(shape[:cut], offset[:cut], extent[:cut], strict=True))
        self._addr = shard.addr

    def split(
        self, starts: Int64, targets: Int64, lengths: Int64
    ) -> tuple[tuple[Int64, Int64, Int64], tuple[Int64, Int64, Int64]]:
        """Pieces inside the box, and pieces outside it."""
        whole = self.block > 0 and self.low == 0 and self.high == self.block and not self._outer
        if whole:
            return (starts, targets, lengths), (starts[:0], targets[:0], lengths[:0])
        starts, targets, lengths = _split_at_blocks(starts, targets, lengths, self.block)
        within = starts % self.block
        begin = np.clip(self.low - within, 0, lengths)
        end = np.clip(self.high - within, 0, lengths)
        mine = self._contains(starts // self.block)
        begin = np.where(mine, begin, lengths)
        end = np.where(mine, end, lengths)
        end = np.maximum(begin, end)
        inside = _pieces([(starts + begin, targets + begin, end - begin)])
        outside = _pieces([(starts, targets, begin), (starts + end, targets + end, lengths - end)])
        return inside, outside

    def addresses(self, starts: Int64) -> Int64:
        """Addresses of bytes inside the box."""
        index, coordinates = starts // self.block, []
        for size, offset, extent in reversed(self._outer):
            index, coordinate = index // size, index % size
            coordinates.append((coordinate - offset, extent))
        local = np.zeros(len(starts), dtype=np.int64)
        for coordinate, extent in reversed(coordinates):
            local = local * extent + coordinate
        return self._addr + local * (self.high - self.low) + (starts % self.block - self.low)

    def _contains(self, blocks: Int64) -> npt.NDArray[np.bool_]:
        mine = np.ones(len(blocks), dtype=bool)
        for size, offset, extent in reversed(self._outer):
            blocks, coordinate = blocks // size, blocks % size
            mine &= (coordinate >= offset) & (coordinate < offset + extent)
        return mine


def _split_at_blocks(starts: Int64, targets: Int64, lengths: Int64, block: int) -> tuple[Int64, Int64, Int64]:
    """Cut lines where they cross a multiple of `block`."""
    first, last = starts // block, (starts + lengths - 1) // block
    pieces = last - first + 1
    if (pieces == 1).all():
        return starts, targets, lengths
    line = np.repeat(np.arange(len(starts)), pieces)
    nth = np.arange(len(line)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(starts[line], (first[line] + nth) * block)
    end = np.minimum(starts[line] + lengths[line], (first[line] + nth + 1) * block)
    return begin, targets[line] + (begin - starts[line]), end - begin


def _pieces(parts: Iterable[tuple[Int64, Int64, Int64]]) -> tuple[Int64, Int64, Int64]:
    """Parts joined, empty pieces dropped."""
    kept = [(s[n > 0], t[n > 0], n[n > 0]) for s, t, n in parts]
    return (
        np.concatenate([s for s, _, _ in kept]),
        np.concatenate([t for _, t, _ in kept]),
        np.concatenate([n for _, _, n in kept]),
    )


# -- step 4 -------------------------------------------------------------------------------------------


def _joined(session: int, pieces: list[tuple[Int64, Int64, Int64]]) -> Runs:
    """Pieces of one session in address order; those that continue on both sides are one run."""
    src = np.concatenate([s for s, _, _ in pieces])
    dst = np.concatenate([t for _, t, _ in pieces])
    nbytes = np.concatenate([n for _, _, n in pieces])
    order = np.argsort(src, kind="stable")
    src, dst, nbytes = src[order], dst[order], nbytes[order]
    continues = (src[:-1] + nbytes[:-1] == src[1:]) & (dst[:-1] + nbytes[:-1] == dst[1:])
    heads = np.flatnonzero(np.concatenate([[True], ~continues]))
    return Runs(session, src[heads].astype(np.uint64), dst[heads], np.add.reduceat(nbytes, heads))
