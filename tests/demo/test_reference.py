"""The demo's judge is right: its slices partition the model, and no single wrong bit gets past it.

The engine's loaders and the reference were written without each other; here they must agree on every bit.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from weightsync.service.demo.engine import EngineModel
from weightsync.service.demo.models import build_model, model_config
from weightsync.service.demo.reference import bit_differences, expected_parameters, logits_distance

WORLD = 2


@pytest.fixture(scope="module")
def config() -> Any:
    return model_config("tiny")


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, torch.Tensor]:
    """A full state dict, the tied head included, every parameter random (fresh biases would be zeros)."""
    model = build_model("tiny")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def held_by(engine: EngineModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in engine.named_parameters()}


def loaded_engine(config: Any, checkpoint: dict[str, torch.Tensor], rank: int, without: str = "") -> EngineModel:
    engine = EngineModel(config, rank, WORLD)
    engine.load_weights((name, tensor) for name, tensor in checkpoint.items() if name != without)
    return engine


@pytest.mark.parametrize("rank", range(WORLD))
def test_the_engines_loaders_and_the_reference_agree_on_every_bit(
    config: Any, checkpoint: dict[str, torch.Tensor], rank: int
) -> None:
    expected = expected_parameters(checkpoint, config, rank, WORLD)
    assert bit_differences(held_by(loaded_engine(config, checkpoint, rank)), expected) == []


def test_the_slices_of_all_ranks_partition_the_model(config: Any, checkpoint: dict[str, torch.Tensor]) -> None:
    """Number every element: sharded ones must turn up once over all ranks, the norms once on each."""
    numbered, first = {}, 0
    for name, tensor in checkpoint.items():
        if name != "lm_head.weight":
            numbered[name] = torch.arange(first, first + tensor.numel()).view(tensor.shape)
            first += tensor.numel()
    seen = torch.zeros(first, dtype=torch.int64)
    for rank in range(WORLD):
        for part in expected_parameters(numbered, config, rank, WORLD).values():
            seen.index_add_(0, part.flatten(), torch.ones(part.numel(), dtype=torch.int64))
    for name, numbers in numbered.items():
        times = WORLD if "norm" in name else 1
        assert (seen[numbers.flatten()] == times).all(), name


def test_one_flipped_bit_in_any_parameter_is_found_and_named(config: Any, checkpoint: dict[str, torch.Tensor]) -> None:
    held = held_by(loaded_engine(config, checkpoint, rank=1))
    expected = expected_parameters(checkpoint, config, 1, WORLD)
    for name, parameter in held.items():
        bits = parameter.view(torch.int16).view(-1)
        bits[-1] ^= 1  # the lowest bit of the mantissa: invisible to any tolerance
        assert bit_differences(held, expected) == [f"{name}: 1 of {parameter.numel()} elements differ"]
        bits[-1] ^= 1
    assert bit_differences(held, expected) == []


def test_a_negative_zero_is_not_a_zero() -> None:
    zero = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    assert bit_differences({"w": -zero["w"]}, zero) == ["w: 4 of 4 elements differ"]


def test_a_fresh_engine_is_nan_everywhere(config: Any) -> None:
    held = held_by(EngineModel(config, 0, WORLD))
    assert held
    assert all(parameter.isnan().all() for parameter in held.values())


@pytest.mark.parametrize(
    ("dropped", "fused"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.layers.0.self_attn.v_proj.bias", "model.layers.0.self_attn.qkv_proj.bias"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_parameter_that_was_never_delivered_is_seen(
    config: Any, checkpoint: dict[str, torch.Tensor], dropped: str, fused: str
) -> None:
    held = held_by(loaded_engine(config, checkpoint, rank=0, without=dropped))
    missing = checkpoint[dropped].numel() // (1 if "norm" in dropped else WORLD)
    expected = expected_parameters(checkpoint, config, 0, WORLD)
    assert bit_differences(held, expected) == [f"{fused}: {missing} of {held[fused].numel()} elements differ"]
    assert int(held[fused].isnan().sum()) == missing


def test_another_ranks_slice_is_seen(config: Any, checkpoint: dict[str, torch.Tensor]) -> None:
    held = held_by(loaded_engine(config, checkpoint, rank=0))
    found = bit_differences(held, expected_parameters(checkpoint, config, 1, WORLD))
    assert {line.split(":")[0] for line in found} == {name for name in held if "norm" not in name}


def test_missing_extra_and_misshapen_parameters_are_named() -> None:
    one = torch.ones(2, dtype=torch.bfloat16)
    found = bit_differences({"extra": one, "long": one}, {"absent": one, "long": torch.ones(3, dtype=one.dtype)})
    assert [line.split(":")[0] for line in found] == ["extra", "absent", "long"]


def test_the_tied_head_is_loaded_once_whether_or_not_the_checkpoint_lists_it(
    config: Any, checkpoint: dict[str, torch.Tensor]
) -> None:
    assert "lm_head.weight" in checkpoint
    used = EngineModel(config, 0, WORLD).load_weights(checkpoint.items())
    assert used == checkpoint.keys() - {"lm_head.weight"}


def test_distance_is_relative_and_nan_is_never_close() -> None:
    logits = torch.tensor([3.0, 4.0])
    assert logits_distance(logits * 1.1, logits) == pytest.approx(0.1)
    assert not logits_distance(torch.tensor([float("nan"), 4.0]), logits) <= 0.05
