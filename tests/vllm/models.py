"""Small random models of real architectures, saved as transformers saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors import safe_open

_SIZES = {
    "vocab_size": 250,  # not a multiple of 64, to which vLLM pads
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama() -> Any:
    return hf.LlamaConfig(**_SIZES, tie_word_embeddings=False)


def _qwen2() -> Any:
    return hf.Qwen2Config(**_SIZES, tie_word_embeddings=True)


def _qwen3() -> Any:
    return hf.Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True)


def _mixtral() -> Any:
    return hf.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)


def _qwen3_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return hf.Qwen3MoeConfig(**_SIZES, head_dim=32, **experts, tie_word_embeddings=False)


def _deepseek_v2() -> Any:
    heads = {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64}
    parts = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    grouping = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}
    return hf.DeepseekV2Config(**{**_SIZES, **heads, **parts, **experts, **grouping})


def _gpt2() -> Any:
    return hf.GPT2Config(
        vocab_size=250, n_positions=512, n_embd=128, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )


KINDS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "gpt2": _gpt2,
}


def build(kind: str, seed: int) -> torch.nn.Module:
    """A model of this kind; every parameter, norms and biases too, has other bits for another seed."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.05 if parameter.dim() > 1 else 0.2
            parameter.add_(torch.randn(parameter.shape, generator=generator).mul(spread).to(parameter.dtype))
    return model


def save(kind: str, seed: int, folder: Path) -> Path:
    """A checkpoint of `build(kind, seed)`."""
    build(kind, seed).save_pretrained(folder)
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, under its name there."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors
