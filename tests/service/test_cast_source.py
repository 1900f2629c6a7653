"""Masters are served in another dtype: the rounding is torch's, the memory stays, ties hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.service.pulls import assert_equal, pull_whole
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.service import (
    CastSource,
    ModuleSource,
    StateDictSource,
)


def test_masters_are_cast_at_every_publish_into_the_same_memory() -> None:
    full = {"w": torch.randn(5, 3), "steps": torch.tensor(7), "b": torch.randn(3).to(torch.bfloat16)}
    source = CastSource(StateDictSource(full), torch.bfloat16)
    expected = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in full.items()}
    assert_equal(pull_whole([source]), expected)
    before = {shard.name: shard.tensor.data_ptr() for shard in source.shards()}
    assert before["b"] == full["b"].data_ptr(), "what has the dtype already is published as it lies"
    full["w"].mul_(3)
    source.refresh()
    assert {shard.name: shard.tensor.data_ptr() for shard in source.shards()} == before
    assert_equal(pull_whole([source]), expected | {"w": full["w"].to(torch.bfloat16)})
    assert source.extra_bytes == full["w"].numel() * 2
    assert_equal(source.gather(["w"]), {"w": full["w"].to(torch.bfloat16)})


def test_some_tensors_are_cast_and_the_others_are_not() -> None:
    full = {"w": torch.randn(4), "router": torch.randn(4)}
    source = CastSource(StateDictSource(full), {"w": torch.float16})
    assert_equal(pull_whole([source]), {"w": full["w"].half(), "router": full["router"]})


def test_tied_masters_are_cast_once() -> None:
    weight = torch.randn(4, 2)
    source = CastSource(StateDictSource({"in": weight, "out": weight}), torch.bfloat16)
    assert [(m.name, m.dtype, m.alias_of) for m in source.manifest()] == [
        ("in", "bfloat16", None),
        ("out", "bfloat16", "in"),
    ]
    assert source.extra_bytes == 0
    assert_equal(pull_whole([source]), dict.fromkeys(("in", "out"), weight.to(torch.bfloat16)))
    assert source.extra_bytes == 16


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.int8, "every tensor: torch.int8 takes no part"),
        ({"x": torch.float16}, "'x' is to be cast"),
        ({"steps": torch.float16}, "'steps': torch.int64 takes no part"),
    ],
)
def test_casts_that_are_none_are_refused(dtype: Any, message: str) -> None:
    with pytest.raises(InvalidLayoutError, match=message):
        CastSource(StateDictSource({"w": torch.zeros(2), "steps": torch.tensor(1)}), dtype)


def test_a_module_keeps_its_ties_through_every_wrapper() -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    module["b"].weight = module["a"].weight
    assert {m.name: m.alias_of for m in CastSource(ModuleSource(module), torch.bfloat16).manifest()} == {
        "a.weight": None,
        "b.weight": "a.weight",
    }
