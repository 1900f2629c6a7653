"""Groups, routes and packed pull plans: every byte asked for once, every group signalled exactly once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.dtypes import dtype_from_name, dtype_name
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.groups import layerwise_groups
from weightsync.protocol.packing import PACK_ALIGNMENT, buffer_alloc_bytes, pack_offsets
from weightsync.protocol.pull_plan import build_pull_plan, plan_digest
from weightsync.protocol.routing import Router, assign_producer_indices, consumer_id

# -- dtypes and packing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bfloat16", "torch.float32", "float8_e4m3fn", "int64", "bool"])
def test_dtype_names_round_trip(name: str) -> None:
    assert dtype_name(dtype_from_name(name)) == name.removeprefix("torch.")


@pytest.mark.parametrize("name", ["float33", "zeros", "nn", "", "torch.", "Tensor", None, 3])
def test_what_is_no_dtype_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="dtype"):
        dtype_from_name(name)


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["uint8", "bfloat16", "float32", "int64"]))))
def test_packed_slices_are_aligned_disjoint_and_tight(items: list[tuple[int, str]]) -> None:
    offsets, nbytes = pack_offsets(items)
    end = 0
    for offset, (numel, dtype) in zip(offsets, items, strict=True):
        assert offset % PACK_ALIGNMENT == 0
        assert 0 <= offset - end < PACK_ALIGNMENT
        end = offset + numel * dtype_from_name(dtype).itemsize
    assert nbytes == end


def test_buffers_are_rounded_up_to_the_granularity() -> None:
    assert buffer_alloc_bytes(1) == 256 << 20
    assert buffer_alloc_bytes(10, presize=100, granularity=1) == 100
    assert buffer_alloc_bytes(10, granularity=0) == 10
    assert buffer_alloc_bytes(0, granularity=64) == 0
    assert buffer_alloc_bytes(65, granularity=64) == 128
    for bad in ({"nbytes": -1}, {"nbytes": 1, "presize": -1}, {"nbytes": 1, "granularity": -1}):
        with pytest.raises(ValueError, match="negative"):
            buffer_alloc_bytes(**bad)


# -- groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stack",
    [
        "model.layers",
        "model.language_model.layers",
        "language_model.layers",
        "thinker.model.layers",
        "transformer.h",
        "transformer.blocks",
        "transformer.encoder.layers",
        "backbone.layers",
        "gpt_neox.layers",
        "model.decoder.layers",
        "model.h",
        "model.layers.layers",
        "bert.encoder.layer",
        "visual.blocks",
    ],
)
def test_every_naming_convention_groups_by_layer(stack: str) -> None:
    names = ["embed.weight", *(f"{stack}.{n}.{p}" for n in (1, 0, 10, 2) for p in ("a", "b")), "norm.weight"]
    assert layerwise_groups(names) == [
        ["embed.weight"],
        *[[f"{stack}.{n}.a", f"{stack}.{n}.b"] for n in (0, 1, 2, 10)],
        ["norm.weight"],
    ]


def test_experts_stay_in_their_layer_and_stacks_in_order_of_appearance() -> None:
    names = [
        "visual.patch.weight",
        "visual.blocks.0.w",
        "model.layers.0.mlp.experts.7.w",
        "visual.blocks.1.w",
        "model.embed.weight",
        "model.layers.0.mlp.experts.1.w",
    ]
    assert layerwise_groups(names) == [
        ["visual.patch.weight"],
        ["visual.blocks.0.w"],
        ["visual.blocks.1.w"],
        ["model.layers.0.mlp.experts.7.w", "model.layers.0.mlp.experts.1.w"],
        ["model.embed.weight"],
    ]


@given(st.lists(st.from_regex(r"[ab]\.([0-3]|x)\.[0-3]?[cd]", fullmatch=True), unique=True))
def test_grouping_loses_nothing_and_makes_no_empty_group(names: list[str]) -> None:
    groups = layerwise_groups(names)
    assert all(groups)
    assert sorted(name for group in groups for name in group) == sorted(names)


def test_a_repeated_name_is_refused() -> None:
    with pytest.raises(ValueError, match="a\\.0"):
        layerwise_groups(["a.0", "b", "a.0"])


# -- routes -------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40))
def test_producers_are_spread_in_blocks(producers: int, consumers: int) -> None:
    blocks = [assign_producer_indices(producers, consumers, c) for c in range(consumers)]
    used = Counter(p for block in blocks for p in block)
    assert set(used) == set(range(producers))
    if producers >= consumers:
        assert [p for block in blocks for p in block] == list(range(producers))
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    else:
        assert all(len(block) == 1 for block in blocks)
        assert max(used.values()) - min(used.values()) <= 1
        assert blocks == sorted(blocks)


def test_consumer_ids_are_distinct_fleet_wide() -> None:
    ids = {consumer_id(worker, 4, replica) for worker in range(4) for replica in range(5)}
    assert ids == set(range(20))
    for bad in ((4, 4, 0), (-1, 4, 0), (0, 0, 0), (0, 4, -1)):
        with pytest.raises(InvalidLayoutError):
            consumer_id(*bad)


def test_adding_a_deployment_moves_nobody_and_rotation_uses_every_producer() -> None:
    small, large = Router(6, 2, workers_per_replica=2), Router(6, 4, workers_per_replica=2)
    for consumer in range(2):
        routes = [small.producer_for(0, group, consumer) for group in range(9)]
        assert routes == [large.producer_for(0, group, consumer) for group in range(9)]
        assert routes == [large.producer_for(0, group, consumer + 2) for group in range(9)]
        assert set(routes) == {3 * consumer, 3 * consumer + 1, 3 * consumer + 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"owner_sets": [[]]}, "owner set 0 is empty"),
        ({"owner_sets": [[0, 9]]}, "outside"),
        ({"owner_sets": [[0], [1]], "names": ["w"], "group_lens": [1]}, "'w'"),
        ({"owner_sets": [[0]], "name_owner_class": {"w": 3}}, "'w'"),
        ({"workers_per_replica": 3}, "one size"),
        ({"names": ["w"], "group_lens": [2]}, "groups hold 2"),
    ],
)
def test_what_cannot_be_routed_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidLayoutError, match=words):
        Router(2, 4, **options)


# -- plans --------------------------------------------------------------------------------------------


def copy_of(name: str, module: Any, chain: Any = (), shape: tuple[int, ...] = (4,)) -> RecordedCopy:
    return RecordedCopy(name, chain, f"{module}.w", 0, shape, (1,), torch.float32, module)


@st.composite
def fleet(draw: st.DrawFn) -> dict[str, Any]:
    """Names in groups, random owners per name, and a worker that loads a random part of them."""
    producers = draw(st.integers(1, 4))
    lens = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    names = [f"layers.{g}.p{i}" for g, length in enumerate(lens) for i in range(length)]
    owner_sets = draw(
        st.lists(st.lists(st.integers(0, producers - 1), min_size=1, unique=True), min_size=1, max_size=3)
    )
    live = draw(st.lists(st.sampled_from(names), unique=True))
    modules: dict[int, list[RecordedCopy]] = {}
    copies_by_name = {}
    for name in live:
        module = draw(st.integers(0, 2))
        copies = modules.setdefault(module, [])
        for start in draw(st.lists(st.integers(0, 2), min_size=1, max_size=2)):
            copies.append(copy_of(name, module, (("narrow", (0, start, 2), ()),), (2,)))
        copies_by_name[name] = copies
    consumers = draw(st.integers(1, 5))
    return {
        "producers": producers,
        "consumers": consumers,
        "names": names,
        "lens": lens,
        "owner_sets": owner_sets,
        "classes": {name: draw(st.integers(0, len(owner_sets) - 1)) for name in names},
        "copies_by_name": copies_by_name,
        "consumer": draw(st.integers(0, consumers - 1)),
    }


def build(case: dict[str, Any]) -> Any:
    router = Router(
        case["producers"],
        case["consumers"],
        owner_sets=case["owner_sets"],
        name_owner_class=case["classes"],
        names=case["names"],
        group_lens=case["lens"],
    )
    return build_pull_plan(
        case["copies_by_name"],
        names=case["names"],
        group_lens=case["lens"],
        name_meta=dict.fromkeys(case["names"], ("float32", (4,))),
        live_names=set(case["copies_by_name"]),
        router=router,
        consumer_id=case["consumer"],
    )


@settings(max_examples=500, deadline=None)
@given(fleet())
def test_every_group_is_signalled_once_at_every_owner_after_its_last_chunk(case: dict[str, Any]) -> None:
    plan = build(case)
    group_of = {name: int(name.split(".")[1]) for name in case["names"]}
    owners_of = {
        group: {
            o for name in case["names"] if group_of[name] == group for o in case["owner_sets"][case["classes"][name]]
        }
        for group in range(len(case["lens"]))
    }
    signals = Counter((group, owner) for group, owners in plan.pre_free for owner in owners)
    pulled_groups = {group_of[name] for name in case["copies_by_name"]}
    assert {group for group, _ in plan.pre_free} == set(owners_of) - pulled_groups
    for position, chunk in enumerate(plan.chunks):
        for group, owners in chunk.free:
            signals.update((group, owner) for owner in owners)
            later = {group_of[name] for c in plan.chunks[position + 1 :] for name, _ in c.keys}
            assert group not in later, "a group is freed while a later chunk still reads it"
    assert signals == Counter({(group, owner): 1 for group, owners in owners_of.items() for owner in owners})


@settings(max_examples=500, deadline=None)
@given(fleet())
def test_every_copy_is_in_one_chunk_of_a_right_owner_and_issue_order_counts_up(case: dict[str, Any]) -> None:
    plan = build(case)
    planned = Counter(copy for chunk in plan.chunks for _, copy in chunk.scatters)
    assert planned == Counter(
        copy for copies in {id(c): c for c in case["copies_by_name"].values()}.values() for copy in copies
    )
    issued: Counter[int] = Counter()
    for chunk in plan.chunks:
        assert chunk.seq == issued[chunk.owner]
        issued[chunk.owner] += 1
        assert len(set(chunk.keys)) == len(chunk.keys)
        for index, copy in chunk.scatters:
            assert chunk.keys[index] == (copy.src_name, copy.op_chain)
            assert chunk.owner in case["owner_sets"][case["classes"][copy.src_name]]
        offsets, nbytes = pack_offsets([(2, torch.float32)] * len(chunk.keys))
        assert [offset for offset, _, _ in chunk.pack_layout] == offsets
        assert chunk.pack_bytes == nbytes
    firsts = Counter(module for chunk in plan.chunks for module in chunk.materialize)
    lasts = Counter(module for chunk in plan.chunks for module in chunk.quantize)
    modules = {copy.module for copies in case["copies_by_name"].values() for copy in copies}
    assert firsts == lasts == Counter(modules)
    assert build(case) == plan, "a plan is a pure function of its inputs"


def test_mixed_dtypes_are_packed_as_the_chain_leaves_them() -> None:
    copies = [
        RecordedCopy("w", (), "m.w", 0, (3, 5), (5, 1), torch.float8_e4m3fn, "m"),
        RecordedCopy("w_scale", (), "m.s", 0, (3,), (1,), torch.float32, "m"),
    ]
    plan = build_pull_plan(
        {"w": copies, "w_scale": copies},
        names=["w", "w_scale"],
        group_lens=[2],
        name_meta={"w": ("float8_e4m3fn", (3, 5)), "w_scale": ("float32", (3,))},
        live_names={"w", "w_scale"},
        router=Router(1, 1, names=["w", "w_scale"], group_lens=[2]),
        consumer_id=0,
    )
    assert plan.chunks[0].pack_layout == ((0, (3, 5), torch.float8_e4m3fn), (16, (3,), torch.float32))
    assert plan.chunks[0].pack_bytes == 28


@pytest.mark.parametrize("copies", [{}, {"layers.0.w": []}])
def test_a_live_name_without_a_plan_is_refused_by_name(copies: dict[str, list[RecordedCopy]]) -> None:
    with pytest.raises(InvalidLayoutError, match=r"layers\.0\.w"):
        build_pull_plan(
            copies,
            names=["layers.0.w"],
            group_lens=[1],
            name_meta={"layers.0.w": ("float32", (4,))},
            live_names={"layers.0.w"},
            router=Router(1, 1),
            consumer_id=0,
        )


def test_digests_tell_plans_apart() -> None:
    one, two = ("w", ()), ("w", (("t", (), ()),))
    assert plan_digest([one, two]) == plan_digest([one, two])
    assert len({plan_digest([one]), plan_digest([two]), plan_digest([one, two]), plan_digest([two, one])}) == 4
