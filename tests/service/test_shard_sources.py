"""Affine maps and flattened parameters, against reference code that cuts tensors as their trainers do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.pulls import assert_equal, pull_whole
from weightsync.actors.interfaces import LocalShard
from weightsync.protocol.affine import (
    AffineMap,
    block_gather_map,
    codegen_block_ids,
    expert_stack_map,
    fused_qkv_map,
    gate_up_map,
    segmented_map,
    sub_param_map,
    yuan_o_proj_block_ids,
)
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.messages import TensorMeta
from weightsync.service import (
    AffineSource,
    FlatRange,
    FlatSource,
    ShardSource,
    concatenated_ranges,
    cut_partitions,
    partitioned_ranges,
)

# -- affine maps ----------------------------------------------------------------------------------------


def codegen_shards(full: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """DeepSpeed's CodeGen split: four blocks of (query, value, key); each third over the ranks, rank by rank."""
    blocks = full.split(full.shape[0] // 4)
    thirds = [torch.split(block, block.shape[0] // 3) for block in blocks]
    pieces = [torch.cat([t.split(t.shape[0] // tp)[rank] for t in third]) for third in thirds for rank in range(tp)]
    each = len(pieces) // tp
    return [torch.cat(pieces[rank * each : (rank + 1) * each]) for rank in range(tp)]


def multi_query_shards(full: torch.Tensor, query_rows: int, tp: int) -> list[torch.Tensor]:
    """GPT-BigCode: query rows are split, the one key and value head is on every rank."""
    query, rest = full[:query_rows], full[query_rows:]
    return [torch.cat([part, rest]) for part in query.chunk(tp)]


def fused_qkv_shards(full: torch.Tensor, sizes: list[int], tp: int) -> list[torch.Tensor]:
    """[query | key | value], each split on its own."""
    return [torch.cat([part.chunk(tp)[rank] for part in full.split(sizes)]) for rank in range(tp)]


def yuan_shards(full: torch.Tensor, heads: int, tp: int) -> list[torch.Tensor]:
    """Columns of pairs of heads: a head of the first half goes with its partner of the second half."""
    columns = full.shape[1] // heads
    first, second = full.split(full.shape[1] // 2, dim=1)
    each = heads // tp // 2 * columns
    return [torch.cat([half[:, r * each : (r + 1) * each] for half in (first, second)], 1) for r in range(tp)]


FULL = torch.randn(96, 48)
LAYOUTS: dict[str, tuple[AffineMap, list[torch.Tensor]]] = {
    "codegen": (block_gather_map((96, 48), codegen_block_ids(96, 4)[1], 2, 0), codegen_shards(FULL, 4)),
    "multi_query": (segmented_map((96, 48), [(64, False), (32, True)], 0, [16] * 4), multi_query_shards(FULL, 64, 4)),
    "fused_qkv": (
        sub_param_map((96, 48), [48, 24, 24], [[12] * 4, [6] * 4, [6] * 4], 0),
        fused_qkv_shards(FULL, [48, 24, 24], 4),
    ),
    "yuan": (block_gather_map((96, 48), yuan_o_proj_block_ids(8, 4), 6, 1), yuan_shards(FULL, 8, 4)),
    "gate_up": (gate_up_map((96, 48), 4), fused_qkv_shards(FULL, [48, 48], 4)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_of_autotp_is_its_checkpoint(name: str) -> None:
    layout, shards = LAYOUTS[name]
    assert [tuple(shard.shape) for shard in shards] == list(layout.shard_shapes)
    ranks = [AffineSource({"w": layout}, rank, {"w": shard}) for rank, shard in enumerate(shards)]
    assert_equal(pull_whole(ranks), {"w": FULL})


@pytest.mark.parametrize(
    "layout",
    [
        expert_stack_map((4, 6, 8), 2, 2, 2),
        fused_qkv_map((32, 6), 8, 4, 2, 2),
        fused_qkv_map((24, 6), 8, 2, 2, 4),
        gate_up_map((32, 6), 2, interleave=4),
    ],
)
def test_any_map_places_what_it_extracts(layout: AffineMap) -> None:
    full = torch.randn(layout.logical_shape)
    flat = [layout.extract(full, rank).flatten() for rank in range(layout.num_ranks)]
    ranks = [AffineSource({"w": layout}, rank, {"w": shard}) for rank, shard in enumerate(flat)]
    assert_equal(pull_whole(ranks), {"w": full})


def test_an_alias_is_published_once() -> None:
    layout = gate_up_map((8, 4), 1)
    weight = torch.randn(8, 4)
    source = AffineSource({"w": layout}, 0, {"w": weight}, aliases={"v": "w"})
    assert {shard.name for shard in source.shards()} == {"w"}
    assert_equal(pull_whole([source]), {"w": weight, "v": weight})
    assert torch.equal(source.gather(["w"])["w"], weight)


@pytest.mark.parametrize(
    ("maps", "rank", "tensors", "error", "message"),
    [
        ({"w": gate_up_map((8, 4), 2)}, 0, {}, InvalidLayoutError, "'w'.* map or a tensor, but not both"),
        ({}, 0, {"w": torch.zeros(4)}, InvalidLayoutError, "not both"),
        ({"w": gate_up_map((8, 4), 2)}, 2, {"w": torch.zeros(4, 4)}, InvalidLayoutError, "'w': its map is of 2 ranks"),
        ({"w": gate_up_map((8, 4), 2)}, 0, {"w": torch.zeros(8, 4)}, InvalidLayoutError, "has shape .8, 4., its map"),
        ({"w": gate_up_map((8, 4), 2)}, 0, {"w": torch.zeros(4, 4).t()}, UnsupportedLayoutError, "not contiguous"),
    ],
)
def test_what_does_not_fit_its_map_is_refused_by_name(
    maps: Any, rank: int, tensors: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AffineSource(maps, rank, tensors)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (LocalShard("v", (0, 0), torch.zeros(2, 2)), "'v' is given, which is no canonical name"),
        (LocalShard("w", (3, 0), torch.zeros(2, 2)), "does not fit into .4, 2."),
        (LocalShard("w", (0,), torch.zeros(2, 2)), "does not fit"),
        (LocalShard("w", (0, 0), torch.zeros(2, 2, dtype=torch.int8)), "announced as float32, .* int8"),
    ],
)
def test_a_box_that_does_not_fit_is_refused_by_name(shard: LocalShard, message: str) -> None:
    with pytest.raises(InvalidLayoutError, match=message):
        ShardSource([TensorMeta("w", "float32", (4, 2))], [shard])


def test_a_rank_gathers_what_it_holds_whole_and_nothing_else() -> None:
    manifest = [TensorMeta("w", "float32", (4, 2)), TensorMeta("v", "float32", (4,))]
    full = torch.randn(4, 2)
    source = ShardSource(
        manifest,
        [LocalShard("w", (0, 0), full[:3]), LocalShard("w", (3, 0), full[3:]), LocalShard("v", (0,), torch.ones(3))],
    )
    assert source.held_names() == ("w",)
    assert_equal(source.gather(["w", "v"]), {"w": full})


# -- flattened parameters -------------------------------------------------------------------------------

shapes = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=4
)


def numbered(sizes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in sizes.items()}


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(1, 5))
def test_zero_3_partitions_are_the_parameters(sizes: dict[str, tuple[int, ...]], world: int) -> None:
    full = numbered(sizes)
    ranks = []
    for rank in range(world):
        buffer = []
        for tensor in full.values():  # each parameter: flattened, padded to a multiple of the ranks, cut evenly
            flat = tensor.flatten().tolist()
            flat += [math.nan] * (-len(flat) % world)
            each = len(flat) // world
            buffer += flat[rank * each : (rank + 1) * each]
        partitions = cut_partitions(sizes, world, torch.tensor(buffer))
        ranks.append(FlatSource(sizes, partitioned_ranges(sizes, rank, world, partitions)))
    assert_equal(pull_whole(ranks), full)


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(1, 5), st.sampled_from([1, 4]))
def test_an_evenly_cut_buffer_is_its_parameters(sizes: dict[str, tuple[int, ...]], world: int, alignment: int) -> None:
    full = numbered(sizes)
    flat: list[float] = []
    for tensor in full.values():
        flat += [math.nan] * (-len(flat) % alignment)
        flat += tensor.flatten().tolist()
    flat += [math.nan] * (-len(flat) % world)
    ranks = [
        FlatSource(sizes, concatenated_ranges(sizes, rank, world, part, alignment), torch.float32)
        for rank, part in enumerate(torch.tensor(flat).chunk(world))
    ]
    assert_equal(pull_whole(ranks), full)


def test_a_range_of_a_matrix_is_three_boxes() -> None:
    source = FlatSource({"w": (4, 5)}, [FlatRange("w", 3, torch.arange(14.0))])
    assert [(s.offset, tuple(s.tensor.shape)) for s in source.shards()] == [
        ((0, 3), (1, 2)),
        ((1, 0), (2, 5)),
        ((3, 0), (1, 2)),
    ]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: partitioned_ranges({"w": (3, 3)}, 0, 2, {}),
            "'w' of shape .3, 3. has 5 elements on each of 2.*missing",
        ),
        (lambda: partitioned_ranges({"w": (9,)}, 0, 2, {"w": torch.zeros(4)}), "its partition is .4,."),
        (lambda: partitioned_ranges({}, 2, 2, {}), "rank 2 is none of 2"),
        (lambda: cut_partitions({"w": (9,)}, 2, torch.zeros(4)), "does not hold the 5 elements"),
        (lambda: concatenated_ranges({"w": (9,)}, 0, 2, torch.zeros(4)), "do not hold the 9 elements of 1 param"),
        (lambda: FlatSource({"w": (9,)}, [FlatRange("w", 8, torch.zeros(2))]), "'w' .* from 8 on are no range"),
        (lambda: FlatSource({}, [FlatRange("w", 8, torch.zeros(2))]), "'w' is given, whose shape is not"),
        (lambda: FlatSource({"w": (9,)}, []), "pass dtype"),
    ],
)
def test_ranges_that_do_not_fit_are_refused_by_name(build: Any, message: str) -> None:
    with pytest.raises(InvalidLayoutError, match=message):
        build()
