"""Views of trainer tensors are published as the elements they show, wherever ranks keep them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.pulls import assert_equal, pull, pull_whole, registrations
from weightsync.actors.interfaces import LocalShard
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError, UnsupportedViewError
from weightsync.protocol.mapping import cat
from weightsync.protocol.messages import TensorMeta
from weightsync.service import CastSource, MappedSource, ShardSource, StateDictSource

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def scattered(full: torch.Tensor, offset: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A box of `full` in memory of its own, element by element, at these strides."""
    memory = torch.full((1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)),), -1).to(full.dtype)
    for index in np.ndindex(*shape):
        memory[sum(i * s for i, s in zip(index, strides, strict=True))] = full[
            tuple(o + i for o, i in zip(offset, index, strict=True))
        ]
    return memory.as_strided(tuple(shape), tuple(strides))


def rank_of(full: dict[str, torch.Tensor], held: dict[str, Sequence[tuple[Any, Any, Any]]]) -> ShardSource:
    """A rank that holds (offset, shape, strides) boxes of these tensors."""
    manifest = [TensorMeta(name, str(tensor.dtype)[6:], tuple(tensor.shape)) for name, tensor in full.items()]
    return ShardSource(
        manifest,
        [
            LocalShard(name, tuple(offset), scattered(full[name], offset, shape, strides))
            for name, boxes in held.items()
            for offset, shape, strides in boxes
        ],
    )


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> Boxes:
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=1))}) for size in shape]
    return [
        (
            tuple(c[i] for c, i in zip(cuts, cell, strict=True)),
            tuple(c[i + 1] - c[i] for c, i in zip(cuts, cell, strict=True)),
        )
        for cell in itertools.product(*(range(len(c) - 1) for c in cuts))
    ]


@st.composite
def strides_for(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), draw(st.sampled_from([1, 1, 2]))
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step = shape[dim] * step + draw(st.sampled_from([0, 0, 1]))
    return tuple(strides)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """A function of a tensor of that shape: some selections, then, perhaps, another shape of the same elements."""
    steps: list[Any] = []
    probe = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(0, 4))):
        if not probe.dim():
            break
        dim = draw(st.integers(0, probe.dim() - 1))
        size = probe.shape[dim]
        kind = draw(st.sampled_from(["narrow", "transpose", "select", "split", "chunk"]))
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            step: Any = (kind, dim, start, draw(st.integers(1, size - start)))
        elif kind == "select":
            step = (kind, dim, draw(st.integers(0, size - 1)))
        elif kind == "split":
            step = (kind, dim, draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])))
        elif kind == "chunk":
            step = (kind, dim, draw(st.integers(1, 3)))
        else:
            step = (kind, dim, draw(st.integers(0, probe.dim() - 1)))
        try:
            probe = _step(probe, step)
        except RuntimeError:  # a `view` of what is not contiguous
            continue
        steps.append(step)
    if draw(st.booleans()):
        steps.append(("reshape", draw(st.sampled_from([(-1,), (1, -1), tuple(probe.shape)]))))

    def view(tensor: Any) -> Any:
        for step in steps:
            tensor = _step(tensor, step)
        return tensor

    return view


def _step(tensor: Any, step: Any) -> Any:
    kind, *args = step
    if kind == "narrow":
        return tensor.narrow(*args)
    if kind == "select":
        return tensor[(slice(None),) * args[0] + (args[1],)]
    if kind == "split":
        dim, parts = args
        return tensor.view(*tensor.shape[:dim], parts, tensor.shape[dim] // parts, *tensor.shape[dim + 1 :])
    if kind == "chunk":
        return tensor.chunk(args[1], args[0])[-1]
    if kind == "reshape":
        return tensor.reshape(args[0])
    return tensor.transpose(*args)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_view_of_any_sharding_is_what_torch_says(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    full = torch.arange(math.prod(shape), dtype=data.draw(st.sampled_from([torch.int16, torch.float64]))).view(shape)
    boxes = [(o, s, data.draw(strides_for(s))) for o, s in data.draw(grids(shape))]
    view, other = data.draw(views(shape)), data.draw(views(shape))
    ranks = [
        MappedSource(rank_of({"t": full}, {"t": own}), lambda t: {"one": view(t["t"]), "two": other(t["t"])})
        for own in ([box] for box in data.draw(st.permutations(boxes)))
    ]
    assert_equal(pull_whole(ranks), {"one": view(full), "two": other(full)})


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_views_are_put_together_along_any_dimension(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)))
    full = {name: torch.randn(shape) for name in ("a", "b")}
    dim = data.draw(st.integers(0, len(shape) - 1))
    ranks = [
        MappedSource(
            rank_of(full, {"a": [(o, s, data.draw(strides_for(s)))], "b": [(o, s, data.draw(strides_for(s)))]}),
            lambda t: {"joined": cat([t["a"], cat([t["b"], t["a"]], dim)], dim)},
        )
        for o, s in data.draw(grids(shape))
    ]
    assert_equal(pull_whole(ranks), {"joined": torch.cat([full["a"], full["b"], full["a"]], dim)})


def test_a_stack_of_experts_out_of_single_ones() -> None:
    full = {f"{kind}{e}": torch.randn(3, 4) for kind in ("gate", "up") for e in range(3)}

    def stacked(t: Any) -> Any:
        return {"gate_up": cat([cat([t[f"gate{e}"].unsqueeze(0), t[f"up{e}"].unsqueeze(0)], 1) for e in range(3)])}

    source = MappedSource(StateDictSource(full), stacked)
    expected = torch.stack([torch.cat([full[f"gate{e}"], full[f"up{e}"]]) for e in range(3)])
    assert_equal(pull_whole([source]), {"gate_up": expected})
    assert torch.equal(source.gather(["gate_up"])["gate_up"], expected)


def test_unmapped_tensors_keep_their_names_and_the_trainers_order_holds() -> None:
    full = {"a": torch.ones(2), "fused": torch.randn(4, 2), "z": torch.ones(3)}
    source = MappedSource(StateDictSource(full), lambda t: {"y": t["fused"][:1], "x": t["fused"][1:]})
    assert [meta.name for meta in source.manifest()] == ["a", "y", "x", "z"]
    assert source.held_names() == ("a", "y", "x", "z")
    assert list(source.gather(["x", "z"])) == ["x", "z"]


def test_the_same_view_under_two_names_and_views_of_tied_tensors_are_published_once() -> None:
    weight = torch.randn(4, 2)
    base = StateDictSource({"in": weight, "out": weight})
    source = MappedSource(base, lambda t: {"embed": t["in"][:3], "head": t["out"][:3], "again": t["in"][:3]})
    assert {m.name: m.alias_of for m in source.manifest()} == {"embed": None, "head": "embed", "again": "embed"}
    assert [shard.name for shard in source.shards()] == ["embed"]
    assert_equal(pull_whole([source]), dict.fromkeys(("embed", "head", "again"), weight[:3]))


def test_views_follow_the_trainers_memory() -> None:
    module = torch.nn.Linear(4, 6)
    source = MappedSource(StateDictSource({"w": module.weight}), lambda t: {"up": t["w"][2:]})
    first = source.shards()
    assert first[0].tensor.data_ptr() == module.weight[2:].data_ptr()
    assert source.shards() is first, "nothing moved, nothing is made anew"
    module.weight.data = module.weight.data.clone()
    assert source.shards()[0].tensor.data_ptr() == module.weight[2:].data_ptr()


def test_empty_tensors_are_published() -> None:
    source = MappedSource(StateDictSource({"w": torch.zeros(0, 4)}), lambda t: {"v": t["w"].t()})
    assert_equal(pull_whole([source]), {"v": torch.zeros(4, 0)})


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        (lambda t: {"x": t["w"] + 1}, UnsupportedViewError, "applies .*add.* to w"),
        (lambda t: {"x": t["w"].t().reshape(8)[:2]}, UnsupportedLayoutError, "'x' is mapped as w.*select before you"),
        (lambda t: {"x": t["w"].to(torch.bfloat16)}, UnsupportedLayoutError, "CastSource"),
        (lambda t: {"x": t["w"].view(torch.int32)}, UnsupportedLayoutError, "another dtype"),
        (lambda t: {"x": torch.zeros(2)}, InvalidLayoutError, "views of the tensors it is given, not a Tensor"),
        (lambda t: {"v": t["w"]}, InvalidLayoutError, "'v' is mapped from another tensor"),
        (lambda t: {"x": cat([t["w"], t["v"]])}, InvalidLayoutError, "cannot be joined"),
        (lambda t: {"x": cat([])}, InvalidLayoutError, "no tensor to join"),
    ],
)
def test_what_is_no_view_is_refused_by_name(mapping: Any, error: type[Exception], message: str) -> None:
    base = StateDictSource({"w": torch.zeros(2, 4), "v": torch.zeros(3)})
    with pytest.raises(error, match=message):
        MappedSource(base, mapping)


def test_what_falls_into_elements_is_refused_by_name_and_a_dense_copy_is_not() -> None:
    full = {"w": torch.arange(4096.0 * 2).view(4096, 2)}
    source = MappedSource(StateDictSource(full), lambda t: {"even": t["w"][:, 0]})
    with pytest.raises(UnsupportedLayoutError, match=r"'even'.* 4096 runs of 4 bytes.*mode='staged'.*CastSource"):
        registrations([source])
    cast = CastSource(source, torch.float64)
    assert_equal(pull_whole([cast]), {"even": full["w"][:, 0].double()})


def test_steps_are_one_box_a_shard_and_not_one_a_step() -> None:
    full = {"w": torch.randn(6, 12)}
    source = MappedSource(StateDictSource(full), lambda t: {"even": t["w"][::2, 1::3]})
    assert [(s.offset, tuple(s.tensor.shape), s.tensor.stride()) for s in source.shards()] == [
        ((0, 0), (3, 4), (24, 3))
    ]
    assert_equal(pull_whole([source]), {"even": full["w"][::2, 1::3]})


def test_a_transposed_parameter_is_read_in_long_runs() -> None:
    full = {"w": torch.randn(96, 64)}
    source = MappedSource(StateDictSource(full), lambda t: {"wt": t["w"].t()})
    targets = {"wt": torch.zeros(64, 96)}
    assert pull([source], targets) == full["w"].nbytes
    assert_equal(targets, {"wt": full["w"].t()})
