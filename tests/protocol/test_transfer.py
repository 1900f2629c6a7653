"""Composed plans move every needed element exactly once, in as few strided copies as the layouts allow."""

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_oracles import check_plan, shards_by_definition

from weightsync.protocol.affine import (
    AffineMap,
    AffinePiece,
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
from weightsync.protocol.coverage import PlanBudget
from weightsync.protocol.errors import InvalidHolderPolicyError, InvalidLayoutError, PlanBudgetError
from weightsync.protocol.execute import execute_plan
from weightsync.protocol.transfer import plan_transfer


def multi_query(tp):
    return segmented_map((48, 8), [(32, False), (16, True)], 0, [[32 // tp] * tp])


def codegen(tp, rows=384):
    block, ids = codegen_block_ids(rows, tp)
    return block_gather_map((rows, 2), ids, block, 0)


def yuan(tp):
    return block_gather_map((3, 64), yuan_o_proj_block_ids(16, tp), 4, 1)


@pytest.mark.parametrize(
    ("policy", "copies", "elements"),
    [
        ("lowest", 7, {0: 640, 1: 128}),
        ("highest", 7, {0: 128, 1: 640}),
        (lambda request: request.target_rank % 2, 7, {0: 384, 1: 384}),
        (lambda request: 1 - request.target_rank // 2, 8, {0: 384, 1: 384}),
        ("adjacency+balance", 6, {0: 384, 1: 384}),
    ],
)
def test_multi_query_copies_depend_on_the_holder_only(policy, copies, elements):
    plan = plan_transfer(multi_query(4), multi_query(2), holder_policy=policy)
    check_plan(plan, multi_query(4), multi_query(2))
    assert len(plan.segments) == copies
    assert plan.moved_elements == 768
    assert plan.statistics.raw_copies == 8
    assert plan.statistics.elements_by_source == elements


def test_adjacency_joins_key_value_to_each_targets_queries():
    assert len(plan_transfer(multi_query(4), multi_query(2), holder_policy="adjacency").segments) == 6


def test_rows_to_columns():
    source, target = contiguous_split_map((8, 8), [4, 4], 0), contiguous_split_map((8, 8), [2] * 4, 1)
    plan = plan_transfer(target, source)
    check_plan(plan, target, source)
    assert [s.shape for s in plan.segments] == [(4, 2)] * 8


@pytest.mark.parametrize(("source", "target", "copies"), [(4, 8, 40), (2, 4, 20), (8, 4, 40), (4, 4, 4)])
def test_codegen_stacks_to_the_specified_copies(source, target, copies):
    plan = plan_transfer(codegen(target), codegen(source))
    check_plan(plan, codegen(target), codegen(source))
    assert len(plan.segments) == copies


def test_yuan_o_proj_stacks_to_four_copies():
    plan = plan_transfer(yuan(2), yuan(4))
    check_plan(plan, yuan(2), yuan(4))
    assert len(plan.segments) == 4


def test_a_missing_row_shard_is_refused_with_the_hole():
    whole = contiguous_split_map((8, 4), [4, 4], 0)
    half = AffineMap((8, 4), whole.shard_shapes[:1], whole.pieces_by_rank[:1])
    with pytest.raises(InvalidLayoutError, match=r"target rank 0 needs region \(4, 0\)..\(8, 4\)"):
        plan_transfer(replicated_map((8, 4), 1), half)
    # what the hole does not touch is still planned
    top = AffineMap((8, 4), [(4, 4)], [[AffinePiece((4, 4), 0, (4, 1), 0, (4, 1), (0,))]])
    assert plan_transfer(top, half).moved_elements == 16


def test_a_hole_that_overlapping_shards_hide_by_volume_is_refused():
    rows = [AffinePiece((4, 4), 8 * r, (4, 1), 0, (4, 1), (r,)) for r in range(2)]  # rows 0-4 and 2-6 of 8
    source = AffineMap((8, 4), [(4, 4)] * 2, [[p] for p in rows])
    with pytest.raises(InvalidLayoutError, match=r"needs region \(6, 0\)..\(8, 4\)"):
        plan_transfer(replicated_map((8, 4), 1), source)


def replica_beside_rows(shape, rows):
    """Rank 0 holds everything, the following ranks their rows."""
    split = contiguous_split_map(shape, rows, 0)
    whole = replicated_map(shape, 1).pieces_by_rank[0][0]
    own = [[dataclasses.replace(p, locations=(r + 1,)) for p in ps] for r, ps in enumerate(split.pieces_by_rank)]
    return AffineMap(shape, (shape, *split.shard_shapes), [[whole], *own])


@pytest.mark.parametrize("policy", ["lowest", "highest", "rotate", "adjacency", "balance", "adjacency+balance"])
def test_a_replica_beside_row_shards_is_read_once(policy):
    source = replica_beside_rows((8, 4), [3, 5])
    for target in (replicated_map((8, 4), 2), contiguous_split_map((8, 4), [1, 3], 1)):
        check_plan(plan_transfer(target, source, holder_policy=policy), target, source)


def test_one_whole_replica_serves_in_one_copy_when_chosen():
    plan = plan_transfer(replicated_map((8, 4), 1), replica_beside_rows((8, 4), [3, 5]), holder_policy="lowest")
    assert [(s.source_rank, s.numel) for s in plan.segments] == [(0, 32)]


LAYOUTS = [
    contiguous_split_map((24, 12), [7, 0, 17], 0),
    contiguous_split_map((24, 12), [3] * 4, 1),
    replicated_map((24, 12), 3),
    sub_param_map((24, 12), [16, 4, 4], [[8, 8], [2, 2], [3, 1]], 0),
    segmented_map((24, 12), [(16, False), (8, True)], 0, [[4] * 4]),
    block_gather_map((24, 12), [[3, 0, 7], [1, 2, 4], [6, 5]], 3, 0),
    block_gather_map((24, 12), codegen_block_ids(24, 2)[1], 1, 0),
    fused_qkv_map((24, 12), 8, 2, 2, 2),
    fused_qkv_map((24, 12), 8, 2, 2, 4, interleaved=False),
    gate_up_map((24, 12), 3, interleave=2),
    dtensor_map((24, 12), (2, 3), ("S(0)", "S(0)")),
    dtensor_map((24, 12), (3, 2), ("S(1)", "R")),
    dtensor_map((24, 12), (2, 5), ("S(0)", "S(1)")),
    replica_beside_rows((24, 12), [5, 5, 14]),
    # a transposed shard, as an engine that stores weights input-major keeps it
    AffineMap((24, 12), [(12, 24)], [[AffinePiece((12, 24), 0, (1, 12), 0, (24, 1), (0,))]]),
    # rows in strides: rank r holds rows r, r+2, ...
    AffineMap(
        (24, 12),
        [(12, 12)] * 2,
        [[AffinePiece((12, 12), 12 * r, (24, 1), 0, (12, 1), (r,))] for r in range(2)],
    ),
    # a flat optimiser-like split that ignores rows
    AffineMap(
        (24, 12),
        [(100,), (188,)],
        [[AffinePiece((100,), 0, (1,), 0, (1,), (0,))], [AffinePiece((188,), 100, (1,), 0, (1,), (1,))]],
    ),
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["lowest", "highest", "rotate", "adjacency", "balance", "adjacency+balance", "balance+lowest"]),
)
def test_any_layout_to_any_other_is_executed_element_for_element(target, source, policy):
    plan = plan_transfer(target, source, holder_policy=policy)
    check_plan(plan, target, source)
    assert len(plan.segments) <= plan.raw_copies


def test_expert_stacks_change_both_parallel_sizes():
    source, target = expert_stack_map((8, 4, 6), 4, 1, 1), expert_stack_map((8, 4, 6), 2, 2, 2)
    check_plan(plan_transfer(target, source), target, source)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_gathers_of_rows(data):
    def layout():
        ranks = data.draw(st.integers(1, 4))
        order = data.draw(st.permutations(range(8)))
        cuts = sorted(data.draw(st.lists(st.integers(0, 8), min_size=ranks - 1, max_size=ranks - 1)))
        ids = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 8], strict=True)]
        return block_gather_map((16, 3), ids, 2, 0)

    target, source = layout(), layout()
    check_plan(plan_transfer(target, source), target, source)


def test_scalars_and_empty_tensors():
    plan = plan_transfer(replicated_map((), 2), replicated_map((), 1))
    check_plan(plan, replicated_map((), 2), replicated_map((), 1))
    assert plan.moved_elements == 2
    assert plan_transfer(replicated_map((0, 4), 2), replicated_map((0, 4), 1)).segments == ()


@pytest.mark.parametrize("field", ["source_offset", "target_offset"])
def test_one_wrong_address_is_noticed(field):
    """The comparison of these tests fails when one address of a plan is off by one element."""
    source, target = codegen(2), codegen(4)
    plan = plan_transfer(target, source)
    for index in range(0, len(plan.segments), 3):
        segments = list(plan.segments)
        moved = getattr(segments[index], field) + 1
        segments[index] = dataclasses.replace(segments[index], **{field: moved})
        broken = dataclasses.replace(plan, segments=tuple(segments))
        with pytest.raises((AssertionError, IndexError, RuntimeError)):
            check_plan(broken, target, source)


def test_maps_of_different_tensors_are_refused():
    with pytest.raises(InvalidLayoutError, match=r"\(8, 4\).*\(4, 8\)"):
        plan_transfer(replicated_map((8, 4), 1), replicated_map((4, 8), 1))


@pytest.mark.parametrize("locations", [(0,), (0, 1, 2)])
def test_wrong_holders_are_refused(locations):
    whole = replicated_map((4, 4), 2)
    shapes = [*whole.shard_shapes, (2, 4)]
    bottom = AffinePiece((2, 4), 8, (4, 1), 0, (4, 1), (2,))
    liar = dataclasses.replace(whole.pieces_by_rank[0][0], locations=locations)
    source = AffineMap((4, 4), shapes, [[liar], whole.pieces_by_rank[1], [bottom]])
    with pytest.raises(InvalidLayoutError, match=r"region \(0, 0\)..\(4, 4\)"):
        plan_transfer(whole, source)


def test_budgets_refuse_whole_plans():
    source, target = contiguous_split_map((8, 8), [4, 4], 0), contiguous_split_map((8, 8), [2] * 4, 1)
    with pytest.raises(PlanBudgetError, match=r"6 pieces, the budget is 5.*max_pieces"):
        plan_transfer(target, source, budget=PlanBudget(max_pieces=5))
    with pytest.raises(PlanBudgetError, match="8 segments, the budget is 7"):
        plan_transfer(target, source, budget=PlanBudget(max_segments=7))
    with pytest.raises(PlanBudgetError, match="boxes"):
        plan_transfer(LAYOUTS[15], LAYOUTS[0], budget=PlanBudget(max_boxes=3))
    assert len(plan_transfer(target, source, budget=PlanBudget(6, 8, 6)).segments) == 8


@pytest.mark.parametrize("policy", ["nearest", "adjacency+", "locality", 7, lambda r: 99, lambda r: None])
def test_bad_policies_are_refused(policy):
    with pytest.raises(InvalidHolderPolicyError):
        plan_transfer(replicated_map((4,), 1), replicated_map((4,), 2), holder_policy=policy)


def test_a_plan_survives_pickling():
    plan = plan_transfer(multi_query(4), multi_query(2))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_executor_refuses_what_was_not_proved():
    plan = plan_transfer(multi_query(4), multi_query(2))
    own = shards_by_definition(multi_query(2))
    targets = [torch.zeros(24, 8, dtype=torch.int32) for _ in range(4)]
    with pytest.raises(InvalidLayoutError, match="proof"):
        execute_plan(dataclasses.replace(plan, segments=plan.segments[1:]), own, targets)
    with pytest.raises(InvalidLayoutError, match="1 source shards for 2"):
        execute_plan(plan, own[:1], targets)
    with pytest.raises(InvalidLayoutError, match="target rank 0"):
        execute_plan(plan, own, [t.t() for t in targets])
    with pytest.raises(InvalidLayoutError, match="several dtypes"):
        execute_plan(plan, own, [t.float() for t in targets])
