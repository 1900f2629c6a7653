"""Layouts by name, as `weightsync plan` takes them: `KIND[:ARGUMENTS]/RANKS`.

The names are for people; programs build `weightsync.protocol.affine` maps directly. The thing to watch: a name
says nothing about a shape, so whether they fit together shows when the map is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightsync.protocol.affine import (
    AffineMap,
    block_gather_map,
    codegen_block_ids,
    contiguous_split_map,
    dtensor_map,
    expert_stack_map,
    fused_qkv_map,
    gate_up_map,
    replicated_map,
    segmented_map,
    sub_param_map,
    yuan_o_proj_block_ids,
)
from weightsync.protocol.errors import InvalidLayoutError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Kind:
    example: str
    meaning: str
    build: Callable[[Shape, Sequence[int], int], AffineMap]
    arguments: tuple[int, int]
    """Fewest and most numbers after the colon."""


def layout_by_name(name: str) -> Callable[[Shape], AffineMap]:
    """The layout of that name, to be applied to shapes.

    >>> layout_by_name("split:0/2")((4, 3)).shard_shapes
    ((2, 3), (2, 3))

    Raises:
        InvalidLayoutError: no such kind, or wrong arguments; the message lists the kinds.
    """
    if name.startswith("dtensor:"):
        return _dtensor(name)
    match = re.fullmatch(r"([a-z_]+)(?::([\d,]+))?/(\d+)(?:x(\d+))?", name)
    kind = _KINDS.get(match[1]) if match else None
    if match is None or kind is None:
        raise InvalidLayoutError(f"{name!r} is no layout; use one of {describe_kinds()}")
    numbers = [int(n) for n in (match[2] or "").split(",") if n]
    if match[4]:
        numbers.append(int(match[4]))
    if not kind.arguments[0] <= len(numbers) <= kind.arguments[1] or int(match[3]) < 1:
        raise InvalidLayoutError(f"{name!r} is not like {kind.example!r} ({kind.meaning})")
    return lambda shape: kind.build(shape, numbers, int(match[3]))


def describe_kinds() -> str:
    """Every kind by example."""
    return "; ".join([*(f"{kind.example} ({kind.meaning})" for kind in _KINDS.values()), _DTENSOR])


def _even(size: int, ranks: int) -> list[int]:
    """Chunks as torch.chunk makes them: the last ones may be shorter or empty."""
    chunk = -(-size // ranks)
    return [max(0, min(chunk, size - rank * chunk)) for rank in range(ranks)]


def _split(shape: Shape, numbers: Sequence[int], ranks: int) -> AffineMap:
    dim = numbers[0]
    if dim >= len(shape):
        return replicated_map(shape, ranks)  # a bias is whole where its matrix is split by columns
    return contiguous_split_map(shape, _even(shape[dim], ranks), dim)


def _fused(shape: Shape, numbers: Sequence[int], ranks: int) -> AffineMap:
    return sub_param_map(shape, numbers, [_even(size, ranks) for size in numbers], 0)


def _multi_query(shape: Shape, numbers: Sequence[int], ranks: int) -> AffineMap:
    query, key_value = numbers
    return segmented_map(shape, [(query, False), (key_value, True)], 0, [_even(query, ranks)])


def _codegen(shape: Shape, numbers: Sequence[int], ranks: int) -> AffineMap:
    rows, ids = codegen_block_ids(shape[0], ranks)
    return block_gather_map(shape, ids, rows, 0)


def _yuan(shape: Shape, numbers: Sequence[int], ranks: int) -> AffineMap:
    if shape[-1] % numbers[0]:
        raise InvalidLayoutError(f"{numbers[0]} heads do not divide {shape[-1]} columns")
    return block_gather_map(shape, yuan_o_proj_block_ids(numbers[0], ranks), shape[-1] // numbers[0], len(shape) - 1)


_KINDS = {
    "replicated": _Kind("replicated/2", "whole on every rank", lambda s, n, r: replicated_map(s, r), (0, 0)),
    "split": _Kind("split:0/8", "dimension 0 in chunks", _split, (1, 1)),
    "fused": _Kind("fused:64,16,16/2", "parts of these sizes, each split", _fused, (1, 64)),
    "qkv": _Kind(
        "qkv:32,8,128/4",
        "engine's fused QKV: heads, groups, head size",
        lambda s, n, r: fused_qkv_map(s, n[0], n[1], n[2], r, interleaved=False),
        (3, 3),
    ),
    "megatron_qkv": _Kind(
        "megatron_qkv:32,8,128/4",
        "the same, interleaved by group",
        lambda s, n, r: fused_qkv_map(s, n[0], n[1], n[2], r),
        (3, 3),
    ),
    "gate_up": _Kind("gate_up/4", "fused gate and up", lambda s, n, r: gate_up_map(s, r), (0, 0)),
    "multi_query": _Kind("multi_query:32,16/4", "query rows split, key/value rows replicated", _multi_query, (2, 2)),
    "experts": _Kind(
        "experts:1/4x2",
        "experts over 4, dimension 1 of each over 2",
        lambda s, n, r: expert_stack_map(s, r, n[1], n[0]),
        (2, 2),
    ),
    "codegen": _Kind("codegen/4", "CodeGen's interleaved QKV", _codegen, (0, 0)),
    "yuan": _Kind("yuan:8/2", "Yuan's o_proj of 8 heads", _yuan, (1, 1)),
}

_DTENSOR = "dtensor:S(0),R/2x4 (placements on a mesh)"


def _dtensor(name: str) -> Callable[[Shape], AffineMap]:
    match = re.fullmatch(r"dtensor:((?:R|S\(\d+\))(?:,(?:R|S\(\d+\)))*)/(\d+(?:x\d+)*)", name)
    if match is None:
        raise InvalidLayoutError(f"{name!r} is not like {_DTENSOR}")
    placements, mesh = match[1].split(","), [int(n) for n in match[2].split("x")]
    return lambda shape: dtensor_map(shape, mesh, placements)
