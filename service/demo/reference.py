"""The independent check: what a tensor-parallel worker must hold, cut from the full state dict by hand.

Plain torch on purpose. It shares nothing with the planner, the recorder or the engine's loaders, so that a
mistake in one of them shows here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def expected_parameters(
    full: Mapping[str, torch.Tensor], config: Any, rank: int, world: int
) -> dict[str, torch.Tensor]:
    """Every parameter of `EngineModel` on one rank, from the trainer's full state dict."""

    def rows(name: str) -> torch.Tensor:
        return torch.chunk(full[name], world, dim=0)[rank]

    def columns(name: str) -> torch.Tensor:
        return torch.chunk(full[name], world, dim=1)[rank]

    expected = {
        "model.embed_tokens.weight": rows("model.embed_tokens.weight"),
        "model.norm.weight": full["model.norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            expected[f"{at}self_attn.qkv_proj.{kind}"] = torch.cat(
                [rows(f"{at}self_attn.{part}_proj.{kind}") for part in "qkv"]
            )
        expected[f"{at}self_attn.o_proj.weight"] = columns(f"{at}self_attn.o_proj.weight")
        expected[f"{at}mlp.gate_up_proj.weight"] = torch.cat(
            [rows(f"{at}mlp.gate_proj.weight"), rows(f"{at}mlp.up_proj.weight")]
        )
        expected[f"{at}mlp.down_proj.weight"] = columns(f"{at}mlp.down_proj.weight")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            expected[f"{at}{norm}.weight"] = full[f"{at}{norm}.weight"]
    return expected


def bit_differences(held: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """One line per parameter that is not bit for bit what it must be (NaN patterns compare by their bits)."""
    problems = [f"{name}: held but not expected" for name in held.keys() - expected.keys()]
    for name, wanted in expected.items():
        have = held.get(name)
        if have is None:
            problems.append(f"{name}: missing")
        elif have.shape != wanted.shape or have.dtype != wanted.dtype:
            problems.append(f"{name}: {tuple(have.shape)} {have.dtype}, must be {tuple(wanted.shape)} {wanted.dtype}")
        elif not torch.equal(_bits(have), _bits(wanted)):
            wrong = int((_bits(have) != _bits(wanted)).sum())
            problems.append(f"{name}: {wrong} of {wanted.numel()} elements differ")
    return problems


def logits_distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative distance |mine - theirs| / |theirs| over all logits."""
    return float((mine - theirs).norm() / theirs.norm())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int16)
