"""Models of the demo: real architectures built from configs, random weights, nothing downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "vocab_size": 512,
    },
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1408,
        "vocab_size": 32000,
    },
    "base": {  # the published shape of Qwen2.5-0.5B
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
}


def model_config(size: str) -> Any:
    """A Qwen2 config with tied embeddings.

    Raises:
        ValueError: not one of `SIZES`.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
    return Qwen2Config(
        **SIZES[size],
        tie_word_embeddings=True,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_cache=False,
        dtype="bfloat16",
    )


def build_model(size: str, seed: int) -> Qwen2ForCausalLM:
    """The trainer's model in bfloat16, the same on every rank that passes the same seed."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Qwen2ForCausalLM(model_config(size))
    finally:
        torch.set_default_dtype(before)
