"""Adapters alone, what is below them, and both merged: names and rounding as PEFT has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.service.pulls import assert_equal, pull_whole
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.service import (
    LoraBaseSource,
    LoraSource,
    MergedLoraSource,
)


class Adapted(nn.Module):
    """A linear layer with adapters, as PEFT wraps it."""

    def __init__(self, base: nn.Module, inner: int, outer: int, adapters: dict[str, float], rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        dtype = base.weight.dtype
        self.lora_A = nn.ModuleDict({n: nn.Linear(inner, rank, bias=False, dtype=dtype) for n in adapters})
        self.lora_B = nn.ModuleDict({n: nn.Linear(rank, outer, bias=False, dtype=dtype) for n in adapters})
        self.scaling = dict(adapters)
        self.merged_adapters: list[str] = []


class AdaptedEmbedding(nn.Module):
    def __init__(self, base: nn.Embedding, scale: float, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_embedding_A = nn.ParameterDict({"default": torch.randn(rank, base.num_embeddings)})
        self.lora_embedding_B = nn.ParameterDict({"default": torch.randn(base.embedding_dim, rank)})
        self.scaling = {"default": scale}


class Transposed(nn.Module):
    """GPT-2's Conv1D: (in, out)."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inner, outer)), nn.Parameter(torch.randn(outer))


class Replaced(nn.Module):
    """`modules_to_save`."""

    def __init__(self, module: nn.Module, copy: nn.Module) -> None:
        super().__init__()
        self.original_module, self.modules_to_save = module, nn.ModuleDict({"default": copy})


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = AdaptedEmbedding(nn.Embedding(7, 6), 0.25)
        self.q = Adapted(nn.Linear(6, 4), 6, 4, {"default": 2.0, "other": 1.0})
        self.low = Adapted(nn.Linear(6, 4, bias=False, dtype=torch.bfloat16), 6, 4, {"default": 0.5})
        self.mixed = Adapted(nn.Linear(6, 4, bias=False, dtype=torch.bfloat16), 6, 4, {"default": 0.7}).float()
        self.mixed.base_layer.to(torch.bfloat16)
        self.conv = Adapted(Transposed(6, 8), 6, 8, {"default": 1.5})
        self.conv.fan_in_fan_out = True
        self.norm = nn.LayerNorm(6)
        self.head = Replaced(nn.Linear(6, 7), nn.Linear(6, 7))


class Wrapped(nn.Module):
    """`base_model.model.<the trainer's model>`."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = Inner()


def wrapped() -> tuple[Wrapped, Any]:
    torch.manual_seed(3)
    model = Wrapped()
    return model, model.base_model.model


def base_weights(inner: Any) -> dict[str, torch.Tensor]:
    return {
        "embed.weight": inner.embed.base_layer.weight,
        "q.weight": inner.q.base_layer.weight,
        "q.bias": inner.q.base_layer.bias,
        "low.weight": inner.low.base_layer.weight,
        "mixed.weight": inner.mixed.base_layer.weight,
        "conv.weight": inner.conv.base_layer.weight,
        "conv.bias": inner.conv.base_layer.bias,
        "norm.weight": inner.norm.weight,
        "norm.bias": inner.norm.bias,
        "head.weight": inner.head.modules_to_save["default"].weight,
        "head.bias": inner.head.modules_to_save["default"].bias,
    }


def test_the_weights_below_the_adapters_have_their_checkpoint_names() -> None:
    model, inner = wrapped()
    assert_equal(pull_whole([LoraBaseSource(model)]), base_weights(inner))


def test_an_adapter_alone_has_the_names_that_peft_saves() -> None:
    model, inner = wrapped()
    at = "base_model.model."
    assert_equal(
        pull_whole([LoraSource(model)]),
        {
            f"{at}embed.lora_embedding_A": inner.embed.lora_embedding_A["default"],
            f"{at}embed.lora_embedding_B": inner.embed.lora_embedding_B["default"],
            f"{at}q.lora_A.weight": inner.q.lora_A["default"].weight,
            f"{at}q.lora_B.weight": inner.q.lora_B["default"].weight,
            f"{at}low.lora_A.weight": inner.low.lora_A["default"].weight,
            f"{at}low.lora_B.weight": inner.low.lora_B["default"].weight,
            f"{at}mixed.lora_A.weight": inner.mixed.lora_A["default"].weight,
            f"{at}mixed.lora_B.weight": inner.mixed.lora_B["default"].weight,
            f"{at}conv.lora_A.weight": inner.conv.lora_A["default"].weight,
            f"{at}conv.lora_B.weight": inner.conv.lora_B["default"].weight,
            f"{at}head.weight": inner.head.modules_to_save["default"].weight,
            f"{at}head.bias": inner.head.modules_to_save["default"].bias,
        },
    )
    assert set(pull_whole([LoraSource(model, "other")])) == {f"{at}q.lora_A.weight", f"{at}q.lora_B.weight"}


def merged_by_hand(inner: Any) -> dict[str, torch.Tensor]:
    """As PEFT's `merge`: products of halves are taken in fp32 on the CPU, and adapters keep their own dtype."""
    out = {name: tensor.detach().clone() for name, tensor in base_weights(inner).items()}
    out["q.weight"] += (inner.q.lora_B["default"].weight @ inner.q.lora_A["default"].weight) * 2.0
    low = inner.low.lora_B["default"].weight.float() @ inner.low.lora_A["default"].weight.float()
    out["low.weight"] += (low * 0.5).to(torch.bfloat16)
    out["mixed.weight"] += (inner.mixed.lora_B["default"].weight @ inner.mixed.lora_A["default"].weight) * 0.7
    out["conv.weight"] += (inner.conv.lora_B["default"].weight @ inner.conv.lora_A["default"].weight).t() * 1.5
    embedding = inner.embed.lora_embedding_B["default"] @ inner.embed.lora_embedding_A["default"]
    out["embed.weight"] += embedding.t() * 0.25
    return out


def test_a_merged_adapter_follows_training_and_leaves_the_trainers_weights_alone() -> None:
    model, inner = wrapped()
    before = {name: tensor.detach().clone() for name, tensor in base_weights(inner).items()}
    source = MergedLoraSource(model)
    addresses = [shard.tensor.data_ptr() for shard in source.shards()]
    for step in range(3):
        with torch.no_grad():
            inner.q.lora_B["default"].weight.add_(step)
            inner.embed.lora_embedding_A["default"].mul_(1 + step)
        assert_equal(pull_whole([source]), merged_by_hand(inner))
    assert [shard.tensor.data_ptr() for shard in source.shards()] == addresses
    assert_equal({name: t.detach() for name, t in base_weights(inner).items()}, before)
    assert source.extra_bytes == 4 * (7 * 6 + 4 * 6 + 6 * 8) + 2 * 4 * 6 * 2


def test_a_tied_head_is_no_alias_of_a_merged_embedding() -> None:
    model, inner = wrapped()
    inner.tied = nn.Linear(6, 7, bias=False)
    inner.tied.weight = inner.embed.base_layer.weight
    source = MergedLoraSource(model)
    assert all(meta.alias_of is None for meta in source.manifest())
    assert_equal(pull_whole([source]), {**merged_by_hand(inner), "tied.weight": inner.tied.weight.detach()})


def _dora(inner: Any) -> None:
    inner.q.lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(1, 4)})


def _bias(inner: Any) -> None:
    inner.q.lora_B["default"] = nn.Linear(2, 4)


def _convolution(inner: Any) -> None:
    inner.q.base_layer = nn.Conv2d(2, 2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [(_dora, "q.lora_magnitude_vector"), (_bias, "q.lora_B.default.bias"), (_convolution, "q.lora_A.*2, 2, 2, 2")],
)
def test_adapters_that_are_no_product_of_matrices_are_refused_by_name(
    change: Callable[[Any], None], message: str
) -> None:
    model, inner = wrapped()
    change(inner)
    with pytest.raises(UnsupportedLayoutError, match=message):
        MergedLoraSource(model)


def test_an_adapter_that_is_merged_already_is_not_merged_twice() -> None:
    model, inner = wrapped()
    source = MergedLoraSource(model)
    inner.q.merged_adapters.append("default")
    with pytest.raises(InvalidLayoutError, match=r"'q\.weight': the trainer has merged adapter 'default'"):
        source.refresh()


@pytest.mark.parametrize("kind", [LoraSource, LoraBaseSource, MergedLoraSource])
def test_an_unknown_adapter_is_refused_with_those_there_are(kind: Any) -> None:
    with pytest.raises(InvalidLayoutError, match=r"no adapter 'absent'; it has \['default', 'other'\]"):
        kind(wrapped()[0], "absent")
