"""Holder policies choose among the holders by a stated objective, over the whole plan."""

import pytest

from weightsync.protocol.affine import contiguous_split_map, replicated_map, sub_param_map
from weightsync.protocol.errors import InvalidHolderPolicyError
from weightsync.protocol.holders import (
    CallablePolicy,
    HolderRequest,
    Locality,
    choose_holders,
    resolve_policy,
)
from weightsync.protocol.transfer import plan_transfer


def request(target_rank, candidates, *, numel=8, offset=0, target_offset=0):
    offers = dict.fromkeys(candidates, (offset, (1,)))
    return HolderRequest(target_rank, (numel,), target_offset, (1,), tuple(candidates), offers)


def served(policy, targets=8, sources=4):
    plan = plan_transfer(
        contiguous_split_map((targets, 4), [1] * targets, 0),
        replicated_map((targets, 4), sources),
        holder_policy=policy,
    )
    return [plan.statistics.elements_by_source.get(rank, 0) for rank in range(sources)]


def test_lowest_highest_and_rotate():
    assert served("lowest") == [32, 0, 0, 0]
    assert served("highest") == [0, 0, 0, 32]
    assert served("rotate") == [8, 8, 8, 8]


def test_balance_evens_what_each_source_serves():
    assert served("balance") == [8, 8, 8, 8]
    chosen = resolve_policy("balance").choose([request(0, [0, 1], numel=n) for n in (1, 2, 3, 6)])
    assert chosen[3] != chosen[2] == chosen[1] == chosen[0]


def test_balance_counts_what_is_forced():
    assert resolve_policy("balance").choose([request(0, [0, 1]), request(1, [0], numel=2)]) == [1, 0]


def test_adjacency_takes_the_holder_whose_read_continues():
    forced = request(0, [1], numel=4)
    free = request(0, [0, 1, 2], offset=4, target_offset=4)
    assert resolve_policy("adjacency").choose([free, forced]) == [1, 1]


def test_adjacency_runs_along_a_chain_in_either_direction():
    free = [request(0, [0, 1, 2], offset=8 * i, target_offset=8 * i) for i in range(5)]
    assert resolve_policy("adjacency").choose([*free, request(0, [2], offset=40, target_offset=40)]) == [2] * 6
    after = [request(0, [0, 1, 2], offset=8 + 8 * i, target_offset=8 + 8 * i) for i in range(5)]
    assert resolve_policy("adjacency").choose([request(0, [2]), *after]) == [2] * 6


def test_a_read_of_another_target_is_not_adjacent():
    requests = [request(1, [1]), request(0, [0, 1], offset=8, target_offset=8)]
    assert resolve_policy("adjacency").choose(requests) == [1, 0]


def test_adjacency_never_costs_copies_on_fused_weights():
    source = sub_param_map((12, 2), [4, 4, 4], [[2, 2]] * 3, 0)
    target = sub_param_map((12, 2), [4, 4, 4], [[1] * 4] * 3, 0)
    copies = {p: len(plan_transfer(target, source, holder_policy=p).segments) for p in ("lowest", "adjacency")}
    assert copies["adjacency"] == copies["lowest"]


def test_locality_prefers_the_targets_node_then_the_next_objective():
    nodes = Locality(("a", "a", "b", "b"), ("b", "a", "b", "a"))
    policy = resolve_policy("locality+balance", locality=nodes)
    assert policy.choose([request(t, range(4)) for t in range(4)]) == [2, 0, 3, 1]
    assert resolve_policy("locality", locality=nodes).choose([request(1, [2, 3])]) == [2]


def test_locality_names_a_rank_it_does_not_know():
    with pytest.raises(InvalidHolderPolicyError, match="target rank 5"):
        resolve_policy("locality", locality=Locality(("a", "b"), ("a",))).choose([request(5, [0, 1])])


def test_locality_by_name_alone_says_what_it_needs():
    with pytest.raises(InvalidHolderPolicyError, match="source_nodes"):
        resolve_policy("locality")


def test_a_callable_is_asked_only_where_there_is_a_choice():
    asked = []
    policy = resolve_policy(lambda r: asked.append(r.target_rank) or 1)
    assert choose_holders(policy, [request(3, [0]), request(4, [0, 1])]) == [0, 1]
    assert asked == [4]


def test_a_choice_outside_the_holders_is_refused_with_all_values():
    with pytest.raises(InvalidHolderPolicyError, match=r"rank 9 .* target rank 4; holders are \(0, 1\)"):
        choose_holders(CallablePolicy(lambda r: 9), [request(4, [0, 1])])


def test_a_policy_must_answer_every_request():
    class Short:
        def choose(self, requests):
            return []

    with pytest.raises(InvalidHolderPolicyError, match="0 choices for 1"):
        choose_holders(Short(), [request(0, [0])])
