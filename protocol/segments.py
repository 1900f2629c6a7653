"""From a recorded copy to the runs that carry it out: which bytes of which shard go where.

    1. the op chain becomes a strided view of the logical tensor (`source_view`), geometry by torch
    2. view and destination are one piece of an affine map, the shards are the other map, and `plan_transfer`
       composes them, chooses holders, folds, and proves that every destination element is written once
    3. segments are lowered to runs; runs get their shards' sessions and addresses

Copies of equal geometry, such as those of identical layers, are planned once (`PullPlanner`). The thing to
watch: runs are bytes, everything before them elements. A copy that cannot land in place (another dtype, a
transpose) is refused here, and `bounce_copy` says how to read it densely and scatter it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from weightsync.protocol.boxes import dense_space, row_major_strides
from weightsync.protocol.copies import OpChain, RecordedCopy
from weightsync.protocol.coverage import PlanBudget
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import InvalidLayoutError, PlanError, UnsupportedLayoutError
from weightsync.protocol.holders import HolderPolicy
from weightsync.protocol.lowering import count_runs, join_runs
from weightsync.protocol.maps import AffineMap, AffinePiece
from weightsync.protocol.plan_cache import PlacedRuns, PlanCache
from weightsync.protocol.shards import Source, SourceShard
from weightsync.protocol.transfer import TransferPlan
from weightsync.protocol.views import describe_chain, replay

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

MIN_RUN_BYTES = 64
MANY_RUNS = 1024
"""A copy of more than MANY_RUNS runs, each under MIN_RUN_BYTES, is read densely and scattered instead: a
descriptor costs about as long as reading 16 KiB, a scatter runs at memory speed."""

_BUDGET = PlanBudget(max_boxes=1 << 16)
"""Boxes are Python objects; what falls into more of them takes seconds to plan and is no use to a transport."""


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


def falls_apart(runs: int, nbytes: int) -> bool:
    """Whether a copy is of so many runs, and so short ones, that it is cheaper to copy than to read run by run."""
    return runs > MANY_RUNS and nbytes < runs * MIN_RUN_BYTES


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


class PullPlanner:
    """Lowers recorded copies; remembers what it planned by geometry.

    Args:
        holder_policy: who serves a part that several shards hold; ranks are the shards in order.
    """

    def __init__(self, holder_policy: str | HolderPolicy = "lowest") -> None:
        self._policy = holder_policy
        self._plans = PlanCache()
        self._maps: dict[tuple[object, ...], tuple[AffineMap, AffineMap, int]] = {}

    @property
    def planned(self) -> int:
        """Distinct geometries planned so far."""
        return len(self._plans)

    def lower(self, copy: RecordedCopy, source: Source, *, refuse_small_runs: bool = True) -> list[Runs]:
        """Runs of one copy, per session, in destination order.

        Raises:
            InvalidLayoutError: no shard holds a part that the copy needs, or shapes disagree.
            UnsupportedLayoutError: the copy converts dtypes, is no strided view, or (unless allowed) falls into
                many tiny runs; read it through `bounce_copy`.
            PlanBudgetError: the copy is scattered over more boxes than planning may take.
        """
        key = (
            describe_chain("", copy.op_chain),  # text, because slices do not hash before Python 3.12
            copy.dest_shape,
            copy.dest_stride,
            copy.dest_dtype,
            source.global_shape,
            source.dtype,
            tuple((shard.offset, shard.shape, shard.strides) for shard in source.shards),
        )
        if key not in self._maps:
            self._maps[key] = _as_maps(copy, source)
        target, held, unit = self._maps[key]
        try:
            plan = self._plans.plan(target, held, holder_policy=self._policy, budget=_BUDGET, partial=True)
        except PlanError as error:
            where = f"{describe_chain(copy.src_name, copy.op_chain)} into {copy.param_name}"
            raise type(error)(f"{where}: {error}") from None
        if refuse_small_runs:
            _refuse_small_runs(plan, unit, copy)
        placed = self._plans.place(
            plan,
            unit,
            {index: shard.addr for index, shard in enumerate(source.shards)},
            dst_byte=copy.dest_offset * copy.dest_dtype.itemsize,
        )
        return _by_session(placed, source)


def lower_copy(copy: RecordedCopy, source: Source, *, refuse_small_runs: bool = True) -> list[Runs]:
    """`PullPlanner.lower` for a single copy."""
    return PullPlanner().lower(copy, source, refuse_small_runs=refuse_small_runs)


def bounce_copy(copy: RecordedCopy, source: Source) -> Bounce:
    """A dense detour for a copy that cannot land in place: exactly the needed elements, in the order they lie in.

    Raises:
        InvalidLayoutError: the chain does not fit the source.
    """
    view = source_view(copy.src_name, copy.op_chain, _as_it_lies(source))
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


def source_view(name: str, op_chain: OpChain, logical: torch.Tensor) -> SourceView:
    """The longest prefix of the chain that is one strided view of `logical`, a tensor on meta.

    `contiguous` moves no element in logical order, so it is passed over; a later `view` that needs it ends the
    prefix. `name` is whose chain it is, for messages.

    Raises:
        InvalidLayoutError: the chain does not fit the tensor.
    """
    current, skipped = logical, not logical.is_contiguous()
    prefix: list[OpChain] = []
    position = 0
    while position < len(op_chain):
        step = 2 if op_chain[position][0] in ("chunk", "unbind") else 1
        entries = op_chain[position : position + step]
        if entries[0][0] == "contiguous":
            skipped, position = skipped or not current.is_contiguous(), position + 1
            continue
        viewed = _as_view(current, entries, describe_chain(name, op_chain), skipped)
        if viewed is None:
            break
        current, position = viewed, position + step
        prefix.append(entries)
    rest = op_chain[position:] if position < len(op_chain) else ()
    return SourceView(
        dtype=current.dtype,
        offset=int(current.storage_offset()),
        shape=tuple(current.shape),
        strides=tuple(current.stride()),
        prefix=tuple(entry for entries in prefix for entry in entries),
        rest=(("contiguous", (), ()), *rest) if rest else (),
    )


# -- step 1 -------------------------------------------------------------------------------------------


def _as_it_lies(source: Source) -> torch.Tensor:
    """The logical tensor on meta, its dimensions in memory in the order that its largest shard has them in."""
    shape, dtype = source.global_shape, dtype_from_name(source.dtype)
    largest = max(source.shards, key=lambda shard: torch.Size(shard.shape).numel(), default=None)
    if largest is None or largest.strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    steps = largest.strides
    long = [dim for dim, size in enumerate(largest.shape) if size > 1]  # the stride of a single index means nothing
    order = list(range(len(shape)))
    for place, dim in zip(long, sorted(long, key=lambda dim: -steps[dim]), strict=True):
        order[place] = dim
    dense = torch.empty([shape[dim] for dim in order], dtype=dtype, device="meta")
    return dense.permute([order.index(dim) for dim in range(len(order))])


def _as_view(current: torch.Tensor, entries: OpChain, what: str, skipped_contiguous: bool) -> torch.Tensor | None:
    """The entries applied, if the result still views the same memory, else None."""
    try:
        result = replay(current, entries)
    except ValueError as error:
        if skipped_contiguous:  # `view` of what would have been contiguous by now
            return None
        raise InvalidLayoutError(f"{what}: {error}") from None
    same = result.untyped_storage()._cdata == current.untyped_storage()._cdata
    return result if same else None


# -- step 2 -------------------------------------------------------------------------------------------


def _as_maps(copy: RecordedCopy, source: Source) -> tuple[AffineMap, AffineMap, int]:
    """(the copy as a map of one piece, the shards as a map, bytes per element of both)."""
    logical_tensor = torch.empty(source.global_shape, dtype=dtype_from_name(source.dtype), device="meta")
    view = source_view(copy.src_name, copy.op_chain, logical_tensor)
    where = describe_chain(copy.src_name, copy.op_chain)
    if view.rest:
        raise UnsupportedLayoutError(f"{where} is no strided view")
    if view.dtype != copy.dest_dtype:
        raise UnsupportedLayoutError(
            f"{where} is {view.dtype} and {copy.param_name} is {copy.dest_dtype}; it cannot land in place"
        )
    if view.shape != copy.dest_shape:
        raise InvalidLayoutError(
            f"{where} has shape {view.shape} and its destination in {copy.param_name} {copy.dest_shape}"
        )
    unit = min(view.dtype.itemsize, source.elsize)  # a chain may view another dtype: count in the smaller one
    logical = _widened(source.global_shape, source.elsize // unit)
    shape, source_strides, dest_strides = view.shape, view.strides, copy.dest_stride
    factor = view.dtype.itemsize // unit
    if factor > 1:
        shape, source_strides, dest_strides = (
            (*shape, factor),
            (*(factor * stride for stride in source_strides), 1),
            (*(factor * stride for stride in dest_strides), 1),
        )
    pieces = (
        (AffinePiece(shape, view.offset * factor, source_strides, 0, dest_strides, (0,)),) if 0 not in shape else ()
    )
    target = AffineMap(logical, (dense_space(shape, dest_strides),), (pieces,))
    return target, _shards_as_map(source, logical, source.elsize // unit), unit


def _shards_as_map(source: Source, logical: tuple[int, ...], widening: int) -> AffineMap:
    """Rank i of the map is shard i of the source."""
    strides = row_major_strides(logical)
    holders: dict[object, list[int]] = {}
    for index, shard in enumerate(source.shards):
        holders.setdefault((shard.offset, shard.shape), []).append(index)
    spaces: list[tuple[int, ...]] = []
    pieces: list[tuple[AffinePiece, ...]] = []
    for shard in source.shards:
        shape, source_strides, steps = _loops(shard, strides, widening)
        space = shape if shard.strides is None else dense_space(shape, steps)
        offset = sum(o * stride for o, stride in zip(_widened(shard.offset, widening), strides, strict=True))
        piece = AffinePiece(shape, offset, source_strides, 0, steps, tuple(holders[shard.offset, shard.shape]))
        spaces.append(space)
        pieces.append(() if 0 in shape else (piece,))
    return AffineMap(logical, tuple(spaces), tuple(pieces))


def _loops(
    shard: SourceShard, strides: tuple[int, ...], widening: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(counts, strides in the logical tensor, strides in memory) of a shard, in elements `widening` times smaller."""
    if shard.strides is None:
        shape = _widened(shard.shape, widening)
        return shape, strides, row_major_strides(shape)
    if widening == 1:
        return shard.shape, strides, shard.strides
    inner = (*strides[:-1], strides[-1] * widening, 1)
    return (*shard.shape, widening), inner, (*(step * widening for step in shard.strides), 1)


def _widened(sizes: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Sizes or offsets counted in elements `factor` times smaller, which multiplies the innermost one."""
    return sizes if factor == 1 else (*sizes[:-1], sizes[-1] * factor)


# -- step 3 -------------------------------------------------------------------------------------------


def _refuse_small_runs(plan: TransferPlan, unit: int, copy: RecordedCopy) -> None:
    count = sum(count_runs(segment) for segment in plan.segments)
    if falls_apart(count, plan.moved_elements * unit):
        raise UnsupportedLayoutError(
            f"{describe_chain(copy.src_name, copy.op_chain)} into {copy.param_name} falls into {count} runs of "
            f"{plan.moved_elements * unit // count} bytes"
        )


def _by_session(placed: Sequence[PlacedRuns], source: Source) -> list[Runs]:
    """Runs of all shards of a session together."""
    parts: dict[int, list[PlacedRuns]] = {}
    for runs in placed:
        parts.setdefault(source.shards[runs.source_rank].session, []).append(runs)
    out = []
    for session, own in sorted(parts.items()):
        src, dst, nbytes = join_runs(
            np.concatenate([runs.src_addr for runs in own]).astype(np.int64),
            np.concatenate([runs.dst_byte for runs in own]),
            np.concatenate([runs.nbytes for runs in own]),
        )
        out.append(Runs(session, src.astype(np.uint64), dst, nbytes))
    return out
