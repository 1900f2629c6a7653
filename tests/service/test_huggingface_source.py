"""transformers models are published as `save_pretrained` writes them, bit for bit, however they are sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.service.pulls import assert_equal, pull, pull_whole
from weightsync.actors.interfaces import LocalShard
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.service import (
    CastSource,
    FlatSource,
    ModuleSource,
    ShardSource,
    TransformersSource,
    partitioned_ranges,
)

transformers = pytest.importorskip("transformers", minversion="5.0")

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 31,
}
MIXTURE = {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen2, tied": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=3),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **MIXTURE),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SMALL, **MIXTURE, shared_expert_intermediate_size=12),
    "olmoe": lambda: transformers.OlmoeConfig(**{**SMALL, "num_experts": 3, "num_experts_per_tok": 2}),
    "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=31, n_positions=8),
    "gpt_bigcode": lambda: transformers.GPTBigCodeConfig(n_embd=16, n_layer=2, n_head=4, vocab_size=31, n_positions=8),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"},
        moe_intermediate_size=8,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
    ),
}


def model_of(kind: str) -> Any:
    torch.manual_seed(11)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The library's own checkpoint, tied names that it leaves out added."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def halves(model: Any) -> list[ShardSource]:
    """Two ranks, each with a part of dimension 0 of every tensor; nothing divides evenly."""
    whole = ModuleSource(model)
    ranks = []
    for rank in range(2):
        shards = []
        for shard in whole.shards():
            cut = (2 * shard.tensor.shape[0] + 2) // 3 if shard.tensor.dim() else 0
            part = shard.tensor[:cut] if rank == 0 else shard.tensor[cut:]
            if part.numel():
                start = 0 if rank == 0 else cut
                shards.append(LocalShard(shard.name, (start, *(0,) * (part.dim() - 1)), part.clone()))
        ranks.append(ShardSource(whole.manifest(), shards))
    return ranks


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_is_published_as_the_library_saves_it(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    expected = saved(model, tmp_path)
    source = TransformersSource(model)
    untied = {meta.name: meta.alias_of for meta in source.manifest()}
    expected |= {name: expected[other] for name, other in untied.items() if other in expected and name not in expected}
    assert_equal(pull_whole([source]), expected)
    gathered = source.gather(source.held_names())
    assert_equal(gathered, {name: expected[name] for name in source.held_names()})


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_cut_out_of_shards_of_their_stack(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    expected = saved(model, tmp_path)
    ranks = [TransformersSource(model, base) for base in halves(model)]
    assert_equal(pull_whole(ranks), expected)
    some = {name: torch.zeros_like(t) for name, t in expected.items() if ".experts.2." in name}
    assert pull(ranks, some) == sum(tensor.nbytes for tensor in some.values())


def test_masters_of_a_mixture_are_served_in_bfloat16(tmp_path: Path) -> None:
    model = model_of("mixtral")
    expected = saved(model, tmp_path)
    source = TransformersSource(model, CastSource(ModuleSource(model), torch.bfloat16))
    assert_equal(pull_whole([source]), {name: tensor.to(torch.bfloat16) for name, tensor in expected.items()})


def test_zero_3_masters_of_a_mixture_are_served_in_bfloat16(tmp_path: Path) -> None:
    """Experts, stacked and fused, out of flattened fp32 partitions, on ranks whose number divides nothing."""
    model, world = model_of("mixtral"), 5
    expected = saved(model, tmp_path)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ranks = []
    for rank in range(world):
        partitions = {}
        for name, parameter in model.named_parameters():
            flat = parameter.detach().flatten()
            each = -(-flat.numel() // world)
            padded = torch.cat([flat, torch.full((each * world - flat.numel(),), float("nan"))])
            partitions[name] = padded[rank * each : (rank + 1) * each].clone()
        flat_source = FlatSource(shapes, partitioned_ranges(shapes, rank, world, partitions))
        ranks.append(TransformersSource(model, CastSource(flat_source, torch.bfloat16)))
    assert_equal(pull_whole(ranks), {name: tensor.to(torch.bfloat16) for name, tensor in expected.items()})


def test_nothing_is_copied() -> None:
    model = model_of("qwen3_moe")
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    source = TransformersSource(model)
    assert {shard.tensor.untyped_storage().data_ptr() for shard in source.shards()} == storages
    assert source.extra_bytes == 0


def test_another_module_is_refused() -> None:
    with pytest.raises(InvalidLayoutError, match="Linear is no transformers model; use ModuleSource"):
        TransformersSource(torch.nn.Linear(2, 2))
