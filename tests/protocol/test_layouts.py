"""Every builder gives what the partition code of its framework gives, restated here with torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_oracles import numbered, shards_by_definition

from weightsync.protocol import affine
from weightsync.protocol.coverage import check_map
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError


def same(layout, expected):
    check_map(layout, "layout")
    got = shards_by_definition(layout)
    assert [tuple(g.shape) for g in got] == [tuple(e.shape) for e in expected]
    for rank, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), rank
        assert torch.equal(layout.extract(numbered(layout.logical_shape), rank), b)


def test_replicated():
    same(affine.replicated_map((3, 4), 3), [numbered((3, 4))] * 3)


@pytest.mark.parametrize(("sizes", "dim"), [([3, 2, 1], 0), ([4, 0, 2], 1), ([6], 1), ([5, 1], -1)])
def test_contiguous_split(sizes, dim):
    same(affine.contiguous_split_map((6, 6), sizes, dim), numbered((6, 6)).split(sizes, dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_sub_parameters_are_split_each_on_its_own(dim):
    q, k, v = numbered((12, 12)).split([6, 4, 2], dim)
    layout = affine.sub_param_map((12, 12), [6, 4, 2], [[3, 3], [1, 3], [2, 0]], dim)
    first = torch.cat([q.narrow(dim, 0, 3), k.narrow(dim, 0, 1), v], dim)
    second = torch.cat([q.narrow(dim, 3, 3), k.narrow(dim, 1, 3)], dim)
    same(layout, [first, second])


@pytest.mark.parametrize("widths", [[[8] * 4], [8] * 4, [[8] * 4, [16] * 4]])
def test_multi_query_attention_splits_queries_and_repeats_key_value(widths):
    layout = affine.segmented_map((48, 8), [(32, False), (16, True)], 0, widths)
    full = numbered((48, 8))
    same(layout, [torch.cat([full[8 * r : 8 * r + 8], full[32:]]) for r in range(4)])
    assert [p.locations for p in layout.pieces_by_rank[2]] == [(2,), (0, 1, 2, 3)]


def test_block_gather_joins_ids_that_follow_one_another():
    layout = affine.block_gather_map((12, 2), [[4, 5, 0], [1, 2, 3]], 2, 0)
    blocks = numbered((12, 2)).split(2)
    same(layout, [torch.cat([blocks[i] for i in ids]) for ids in ([4, 5, 0], [1, 2, 3])])
    assert [len(p) for p in layout.pieces_by_rank] == [2, 1]


def codegen_reference(full, tp):
    """CodeGen stores 4 groups of (query, value, key), each tp wide; ranks take 4/tp of a group or more."""
    rows = full.shape[0] // (12 * tp)
    blocks = full.split(rows)
    out = []
    for rank in range(tp):
        picked = []
        for e in range(4):
            b, w = divmod(4 * rank + e, tp)
            picked += [blocks[3 * tp * b + tp * q + w] for q in range(3)]
        out.append(torch.cat(picked))
    return out


@pytest.mark.parametrize(("tp", "runs"), [(2, 11), (4, 12), (8, 12)])
def test_codegen(tp, runs):
    block, ids = affine.codegen_block_ids(96, tp)
    layout = affine.block_gather_map((96, 2), ids, block, 0)
    same(layout, codegen_reference(numbered((96, 2)), tp))
    assert {len(p) for p in layout.pieces_by_rank} == {runs}
    assert sorted(i for own in ids for i in own) == list(range(12 * tp))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_yuan_o_proj_pairs_heads_of_both_halves(tp):
    heads = 16
    ids = affine.yuan_o_proj_block_ids(heads, tp)
    columns = numbered((3, heads * 2)).split(2, 1)
    expected = []
    for rank in range(tp):
        start = rank * heads // tp
        first = [start // 2 + i for i in range(heads // tp // 2)]
        expected.append(torch.cat([columns[i] for i in first + [i + heads // 2 for i in first]], 1))
    same(affine.block_gather_map((3, heads * 2), ids, 2, 1), expected)


def megatron_qkv(full, heads, groups, dim, tp):
    """[groups, heads per group + 2, dim]: the layout Megatron interleaves, cut by groups."""
    q, k, v = full.split([heads * dim, groups * dim, groups * dim])
    per = heads // groups
    mixed = [
        torch.cat([q[g * per * dim : (g + 1) * per * dim], k[g * dim : (g + 1) * dim], v[g * dim : (g + 1) * dim]])
        for g in range(groups)
    ]
    return [torch.cat(mixed[r * groups // tp : (r + 1) * groups // tp]) for r in range(tp)]


@pytest.mark.parametrize(("groups", "tp"), [(4, 1), (4, 2), (4, 4), (8, 2)])
def test_megatron_grouped_query_qkv(groups, tp):
    full = numbered(((8 + 2 * groups) * 3, 2))
    same(affine.fused_qkv_map(full.shape, 8, groups, 3, tp), megatron_qkv(full, 8, groups, 3, tp))


def test_engine_qkv_repeats_key_value_heads_when_there_are_fewer_than_ranks():
    full = numbered((12 * 3, 2))
    q, k, v = full.split([24, 6, 6])
    expected = [
        torch.cat([q[6 * r : 6 * r + 6], k[3 * (r // 2) : 3 * (r // 2) + 3], v[3 * (r // 2) : 3 * (r // 2) + 3]])
        for r in range(4)
    ]
    same(affine.fused_qkv_map(full.shape, 8, 2, 3, 4, interleaved=False), expected)


def test_gate_up():
    gate, up = numbered((16, 2)).chunk(2)
    plain = [torch.cat([g, u]) for g, u in zip(gate.chunk(4), up.chunk(4), strict=True)]
    same(affine.gate_up_map((16, 2), 4), plain)
    mixed = torch.stack([gate.reshape(4, 2, 2), up.reshape(4, 2, 2)], 1).reshape(16, 2)
    same(affine.gate_up_map((16, 2), 2, interleave=2), mixed.chunk(2))


@pytest.mark.parametrize("dim", [1, 2])
def test_expert_stack_over_expert_and_tensor_parallel(dim):
    full = numbered((8, 4, 6))
    expected = [part for experts in full.chunk(4) for part in experts.chunk(2, dim)]
    same(affine.expert_stack_map((8, 4, 6), 4, 2, dim), expected)


placements = st.one_of(st.just("R"), st.integers(0, 2).map(lambda d: ("S", d)))


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(*[st.integers(1, 9)] * 3),
    st.lists(st.tuples(st.integers(1, 4), placements), min_size=1, max_size=3),
)
def test_dtensor_shards_are_nested_torch_chunks(shape, axes):
    mesh = [n for n, _ in axes]
    layout = affine.dtensor_map(shape, mesh, [p for _, p in axes])
    expected = []
    for coordinate in torch.cartesian_prod(*[torch.arange(n) for n in mesh]).reshape(-1, len(mesh)).tolist():
        local = numbered(shape)
        for index, (n, placement) in zip(coordinate, axes, strict=True):
            if placement == "R":
                continue
            dim = placement[1]
            chunks = local.chunk(n, dim) if local.shape[dim] else []
            local = chunks[index] if index < len(chunks) else local.narrow(dim, 0, 0)
        expected.append(local)
    same(layout, expected)


def test_fsdp_over_tensor_parallel_cuts_from_right_to_left():
    """The table in torch's own description of strided shards: rows 0-1, 4-5, 2-3, 6-7 of 8."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    full = numbered((8, 3))
    layout = affine.dtensor_map((8, 3), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    same(layout, [full[0:2], full[4:6], full[2:4], full[6:8]])
    with pytest.raises(UnsupportedLayoutError, match="split factor 4, but 2 ranks"):
        affine.dtensor_map((8, 3), (2, 2), (_StridedShard(0, split_factor=4), Shard(0)))


def test_dtensor_takes_torch_placements():
    from torch.distributed.tensor import Partial, Replicate, Shard

    layout = affine.dtensor_map((5, 4), (2, 2), (Shard(0), Replicate()))
    assert layout == affine.dtensor_map((5, 4), (2, 2), ("S(0)", "R"))
    assert layout.pieces_by_rank[1][0].locations == (0, 1)
    with pytest.raises(UnsupportedLayoutError, match="Partial"):
        affine.dtensor_map((5, 4), (2,), (Partial(),))


@pytest.mark.parametrize(
    "build",
    [
        lambda: affine.replicated_map((2,), 0),
        lambda: affine.replicated_map((-2,), 1),
        lambda: affine.contiguous_split_map((8,), [4, 3], 0),
        lambda: affine.contiguous_split_map((8,), [9, -1], 0),
        lambda: affine.contiguous_split_map((8,), [4, 4], 1),
        lambda: affine.contiguous_split_map((8,), [], 0),
        lambda: affine.sub_param_map((8,), [4, 3], [[2, 2], [3, 0]], 0),
        lambda: affine.sub_param_map((8,), [4, 4], [[2, 2], [4]], 0),
        lambda: affine.segmented_map((8,), [(4, False), (4, True)], 0, [[2, 3]]),
        lambda: affine.segmented_map((9,), [(4, False), (4, True)], 0, [[2, 2]]),
        lambda: affine.block_gather_map((8,), [[0, 4]], 2, 0),
        lambda: affine.block_gather_map((8,), [[0, 0]], 2, 0),
        lambda: affine.block_gather_map((8,), [[0]], 3, 0),
        lambda: affine.codegen_block_ids(100, 4),
        lambda: affine.yuan_o_proj_block_ids(6, 2),
        lambda: affine.fused_qkv_map((10, 2), 8, 3, 1, 2),
        lambda: affine.gate_up_map((10,), 2),
        lambda: affine.expert_stack_map((6, 4), 4, 1, 1),
        lambda: affine.dtensor_map((6, 4), (2, 2), ("R",)),
        lambda: affine.dtensor_map((6, 4), (2,), (("S", 2),)),
    ],
)
def test_layouts_that_do_not_fit_their_tensor_are_refused(build):
    with pytest.raises(InvalidLayoutError):
        build()
