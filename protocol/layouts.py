"""Builders of affine maps for the layouts that trainers and engines use.

Every builder states, per rank, which boxes of the logical tensor lie where in the shard, and `_assemble`
turns that into pieces and finds the ranks that hold the same box. The thing to watch: sizes and
offsets are along the split dimension in elements, and a shard is always C-contiguous with its boxes one after
another.

What the real partition code does is restated independently in the tests. `maps.py` holds the types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from weightsync.protocol.boxes import row_major_strides
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.maps import AffineMap, AffinePiece
from weightsync.protocol.placements import dtensor_box


@dataclass(frozen=True, slots=True)
class _Placed:
    """A box of the logical tensor and where its first element lies in the shard, both as coordinates."""

    start: tuple[int, ...]
    extent: tuple[int, ...]
    at: tuple[int, ...]


def replicated_map(shape: Sequence[int], ranks: int) -> AffineMap:
    """Every one of `ranks` ranks holds the whole tensor of `shape`."""
    shape = _shape(shape)
    if ranks < 1:
        raise InvalidLayoutError(f"a replicated tensor needs at least one rank, got {ranks}")
    zero = (0,) * len(shape)
    return _assemble(shape, [(shape, [_Placed(zero, shape, zero)])] * ranks)


def contiguous_split_map(shape: Sequence[int], sizes: Sequence[int], dim: int) -> AffineMap:
    """Rank r holds `sizes[r]` consecutive indices of `dim`; sizes may differ, or be 0, and sum to the extent.

    >>> contiguous_split_map((8, 4), [5, 3], 0).shard_shapes
    ((5, 4), (3, 4))
    """
    return sub_param_map(shape, [sum(sizes)], [list(sizes)], dim)


def sub_param_map(
    shape: Sequence[int], sub_sizes: Sequence[int], widths: Sequence[Sequence[int]], dim: int
) -> AffineMap:
    """A fused tensor: `dim` is parts of `sub_sizes`, and each part is split over the ranks on its own.

    Rank r holds `widths[i][r]` indices of part i; its shard has the parts in order. Raises
    InvalidLayoutError when parts do not sum to the extent, or widths to their part.
    """
    shape, dim = _shape(shape), _dim(shape, dim)
    ranks = _rank_count(widths, sub_sizes)
    if sum(sub_sizes) != shape[dim]:
        raise InvalidLayoutError(
            f"parts {list(sub_sizes)} sum to {sum(sub_sizes)}, dim {dim} of {shape} is {shape[dim]}"
        )
    spans: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    base = 0
    for part, (size, split) in enumerate(zip(sub_sizes, widths, strict=True)):
        if any(w < 0 for w in split) or sum(split) != size:
            raise InvalidLayoutError(
                f"part {part}: widths {list(split)} must be >= 0 and sum to {size}, got {sum(split)}"
            )
        at = base
        for rank, width in enumerate(split):
            spans[rank].append((at, width))
            at += width
        base += size
    return _spans_map(shape, spans, dim)


def segmented_map(
    shape: Sequence[int],
    segments: Sequence[tuple[int, bool]],
    dim: int,
    split_widths: Sequence[Sequence[int]] | Sequence[int],
) -> AffineMap:
    """`dim` is segments of (size, replicated): replicated ones lie whole on every rank, others are split.

    `split_widths` gives, for each segment that is split, the width on every rank; with one split segment
    the bare list of widths is accepted too. Multi-query attention is
    `[(query_rows, False), (key_value_rows, True)]`.
    """
    shape, dim = _shape(shape), _dim(shape, dim)
    split_count = sum(not replicated for _, replicated in segments)
    table: list[list[int]] = []
    flat: list[int] = []
    for entry in split_widths:
        if isinstance(entry, int):
            flat.append(entry)
        else:
            table.append([int(w) for w in entry])
    if flat and table:
        raise InvalidLayoutError(f"split_widths {list(split_widths)} mixes widths and lists of widths")
    if flat:
        # One list of widths serves every split segment of that total size.
        table = [flat] * split_count
    if len(table) == len(segments) != split_count:
        table = [w for w, (_, replicated) in zip(table, segments, strict=True) if not replicated]
    if len(table) != split_count or not table:
        raise InvalidLayoutError(f"{split_count} segments are split, widths are given for {len(table)}")
    if sum(size for size, _ in segments) != shape[dim]:
        raise InvalidLayoutError(f"segments {list(segments)} do not sum to {shape[dim]} (dim {dim} of {shape})")
    ranks = _rank_count(table, table)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    base, remaining = 0, iter(table)
    for index, (size, replicated) in enumerate(segments):
        widths = [size] * ranks if replicated else next(remaining)
        if any(w < 0 for w in widths) or (not replicated and sum(widths) != size):
            raise InvalidLayoutError(f"segment {index} of size {size}: widths {widths} must sum to it")
        at = base
        for rank, width in enumerate(widths):
            spans[rank].append((at, width))
            at += 0 if replicated else width
        base += size
    return _spans_map(shape, spans, dim)


def block_gather_map(
    shape: Sequence[int], ids_by_rank: Sequence[Sequence[int]], block_size: int, dim: int
) -> AffineMap:
    """Rank r holds the blocks `ids_by_rank[r]` of `dim`, in that order; block b starts at b * block_size.

    Ids that follow one another become one piece. Raises InvalidLayoutError for an id out of range, or
    twice on a rank, or a block size that does not divide the extent.
    """
    shape, dim = _shape(shape), _dim(shape, dim)
    if block_size < 1 or shape[dim] % block_size:
        raise InvalidLayoutError(f"block size {block_size} does not divide dim {dim} of {shape}")
    blocks = shape[dim] // block_size
    spans: list[list[tuple[int, int]]] = []
    for rank, ids in enumerate(ids_by_rank):
        bad = [b for b in ids if not 0 <= b < blocks]
        if bad or len(set(ids)) != len(ids):
            raise InvalidLayoutError(f"rank {rank}: block ids {list(ids)} must be distinct and in 0..{blocks - 1}")
        spans.append([(b * block_size, block_size) for b in ids])
    return _spans_map(shape, spans, dim, join=True)


def codegen_block_ids(rows: int, tp: int) -> tuple[int, list[list[int]]]:
    """CodeGen's fused QKV: (rows per block, block ids per rank in shard order), 12 blocks on every rank.

    The checkpoint is laid out for four-way interleaved heads; rank r takes, for its four sub-groups
    (b, w) = divmod(4r + e, tp), the query, value and key blocks 3*tp*b + tp*q + w.
    """
    if tp < 1 or rows % (12 * tp):
        raise InvalidLayoutError(f"CodeGen with {rows} rows cannot be cut into 12 blocks on each of {tp} ranks")
    ids: list[list[int]] = []
    for rank in range(tp):
        groups = [divmod(4 * rank + e, tp) for e in range(4)]
        ids.append([3 * tp * b + tp * q + w for b, w in groups for q in range(3)])
    return rows // (12 * tp), ids


def yuan_o_proj_block_ids(num_heads: int, tp: int) -> list[list[int]]:
    """Yuan's o_proj columns: rank r takes its head pairs' first halves, then the second halves.

    One block is one head's columns; ids are in shard order.
    """
    if tp < 1 or num_heads % (2 * tp):
        raise InvalidLayoutError(f"{num_heads} heads do not split into pairs over {tp} ranks")
    pairs, half = num_heads // tp // 2, num_heads // 2
    out = []
    for rank in range(tp):
        first = list(range(rank * pairs, (rank + 1) * pairs))
        out.append(first + [b + half for b in first])
    return out


def fused_qkv_map(
    shape: Sequence[int], num_heads: int, num_groups: int, head_dim: int, tp: int, *, interleaved: bool = True
) -> AffineMap:
    """Megatron's grouped-query QKV on a logical tensor [all query | all key | all value] along dim 0.

    Rank r holds `num_groups / tp` groups; interleaved (Megatron) a group is its query heads, its key head,
    its value head; otherwise (most engines) the shard is the rank's queries, keys, values. With fewer groups
    than ranks, key and value heads are replicated on `tp / num_groups` ranks each and nothing is interleaved
    across groups.
    """
    shape = _shape(shape)
    if num_groups < 1 or num_heads % num_groups or head_dim < 1 or tp < 1 or num_heads % tp:
        raise InvalidLayoutError(f"{num_heads} heads, {num_groups} groups and {tp} ranks do not divide evenly")
    rows = (num_heads + 2 * num_groups) * head_dim
    if not shape or shape[0] != rows:
        raise InvalidLayoutError(f"fused QKV needs {rows} rows, shape is {shape}")
    if max(num_groups, tp) % min(num_groups, tp):
        raise UnsupportedLayoutError(f"{num_groups} key/value groups over {tp} ranks is not a whole number each")
    key, value = num_heads * head_dim, (num_heads + num_groups) * head_dim
    per_group, own_heads = num_heads // num_groups, num_heads // tp
    spans: list[list[tuple[int, int]]] = []
    for rank in range(tp):
        if num_groups >= tp:
            groups = range(rank * num_groups // tp, (rank + 1) * num_groups // tp)
        else:
            groups = range(rank * num_groups // tp, rank * num_groups // tp + 1)
        queries = [(rank * own_heads * head_dim, own_heads * head_dim)]
        if interleaved and num_groups >= tp:
            spans.append(
                [
                    span
                    for g in groups
                    for span in (
                        (g * per_group * head_dim, per_group * head_dim),
                        (key + g * head_dim, head_dim),
                        (value + g * head_dim, head_dim),
                    )
                ]
            )
        else:
            spans.append(
                queries
                + [(key + g * head_dim, head_dim) for g in groups]
                + [(value + g * head_dim, head_dim) for g in groups]
            )
    return _spans_map(shape, spans, 0)


def gate_up_map(shape: Sequence[int], tp: int, *, interleave: int | None = None, dim: int = 0) -> AffineMap:
    """Fused gate and up: logical [gate | up] along `dim`; each rank holds its gate rows, then its up rows.

    With `interleave` = k the shard alternates k gate rows and k up rows instead.
    """
    shape, dim = _shape(shape), _dim(shape, dim)
    half = shape[dim] // 2
    if tp < 1 or shape[dim] % (2 * tp):
        raise InvalidLayoutError(f"gate/up of {shape[dim]} does not split over {tp} ranks")
    width = half // tp
    step = width if interleave is None else interleave
    if step < 1 or width % step:
        raise InvalidLayoutError(f"interleave of {step} does not divide {width} rows a rank")
    spans = [
        [span for at in range(r * width, (r + 1) * width, step) for span in ((at, step), (half + at, step))]
        for r in range(tp)
    ]
    return _spans_map(shape, spans, dim)


def expert_stack_map(shape: Sequence[int], ep: int, tp: int, dim: int) -> AffineMap:
    """Experts stacked on dim 0, split over `ep`; `dim` of each expert split over `tp`. Rank = e * tp + t."""
    shape, dim = _shape(shape), _dim(shape, dim)
    if dim == 0 or ep < 1 or tp < 1 or shape[0] % ep or shape[dim] % tp:
        raise InvalidLayoutError(f"expert stack {shape} does not split over ep={ep} and tp={tp} on dim {dim}")
    return _grid_map(shape, [(e, t) for e in range(ep) for t in range(tp)], {0: ep, dim: tp})


def dtensor_map(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any]) -> AffineMap:
    """A DTensor's local shards; ranks number the mesh row-major, one placement a mesh dimension.

    `dtensor_box` says which placements there are, how they split, and what is refused.
    """
    shape = _shape(shape)
    shards = []
    for coordinate in product(*(range(int(n)) for n in mesh_shape)):
        start, extent = dtensor_box(shape, mesh_shape, placements, coordinate)
        shards.append((extent, [_Placed(start, extent, (0,) * len(shape))]))
    return _assemble(shape, shards)


# -- inside --------------------------------------------------------------------------------------------


def _grid_map(shape: tuple[int, ...], positions: Sequence[tuple[int, ...]], splits: dict[int, int]) -> AffineMap:
    shards = []
    for position in positions:
        start, extent = [0] * len(shape), list(shape)
        for index, (dim, parts) in zip(position, splits.items(), strict=True):
            extent[dim] = shape[dim] // parts
            start[dim] = index * extent[dim]
        shards.append((tuple(extent), [_Placed(tuple(start), tuple(extent), (0,) * len(shape))]))
    return _assemble(shape, shards)


def _spans_map(
    shape: tuple[int, ...], spans: Sequence[Sequence[tuple[int, int]]], dim: int, *, join: bool = False
) -> AffineMap:
    """Each rank's shard is its (start, width) spans of `dim`, one after another.

    Touching spans become one piece only with `join`: a replicated span beside an own one keeps its holders.
    """
    shards = []
    for own in spans:
        joined: list[tuple[int, int]] = []
        for start, width in own:
            if not width:
                continue
            if join and joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + width)
            else:
                joined.append((start, width))
        placed, at = [], 0
        for start, width in joined:
            placed.append(
                _Placed(
                    _with(shape, dim, start, 0),
                    (*shape[:dim], width, *shape[dim + 1 :]),
                    _with(shape, dim, at, 0),
                )
            )
            at += width
        shards.append(((*shape[:dim], at, *shape[dim + 1 :]), placed))
    return _assemble(shape, shards)


def _assemble(shape: tuple[int, ...], shards: Iterable[tuple[tuple[int, ...], Sequence[_Placed]]]) -> AffineMap:
    shards = list(shards)
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, (_, placed) in enumerate(shards):
        for box in placed:
            holders.setdefault((box.start, box.extent), []).append(rank)
    ranks_of = {key: tuple(ranks) for key, ranks in holders.items()}
    unit = row_major_strides(shape)
    pieces = []
    for own_shape, placed in shards:
        own_unit = row_major_strides(own_shape)
        pieces.append(
            tuple(
                AffinePiece(
                    box.extent,
                    sum(a * s for a, s in zip(box.start, unit, strict=True)),
                    unit,
                    sum(a * s for a, s in zip(box.at, own_unit, strict=True)),
                    own_unit,
                    ranks_of[box.start, box.extent],
                )
                for box in placed
                if 0 not in box.extent
            )
        )
    return AffineMap(shape, tuple(s for s, _ in shards), tuple(pieces))


def _with(shape: tuple[int, ...], dim: int, value: int, other: int) -> tuple[int, ...]:
    return tuple(value if d == dim else other for d in range(len(shape)))


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    out = tuple(int(n) for n in shape)
    if any(n < 0 for n in out):
        raise InvalidLayoutError(f"shape {out} has a negative size")
    return out


def _dim(shape: Sequence[int], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise InvalidLayoutError(f"dim {dim} does not exist in shape {tuple(shape)}")
    return dim % len(shape)


def _rank_count(widths: Sequence[Sequence[int]], parts: Sequence[object]) -> int:
    counts = {len(w) for w in widths}
    if len(widths) != len(parts) or len(counts) != 1 or counts == {0}:
        raise InvalidLayoutError(f"widths must give {len(parts)} rows of one width a rank, got {widths}")
    return counts.pop()
