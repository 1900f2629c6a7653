"""Models of the demo: real architectures built from configs, random weights, nothing downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Qwen2Config

SIZES: dict[str, dict[str, Any]] = {
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


def build_model(size: str) -> Any:
    """The trainer's `Qwen2ForCausalLM` in bfloat16, parameters allocated and not yet initialised.

    Initialising is left to `init_parameters` after sharding, so that no rank fills what it will not keep.
    """
    from transformers import Qwen2ForCausalLM  # seconds to import, and only trainers need it
    from transformers.initialization import no_init_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with no_init_weights():
            model = Qwen2ForCausalLM(model_config(size))
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()  # which the context left out too
    return model


@torch.no_grad()
def init_parameters(locals_by_name: Iterable[tuple[str, torch.Tensor]], seed: int) -> None:
    """Random matrices of the usual scale, unit norms, zero biases; in place, on one rank's shards."""
    generator = torch.Generator().manual_seed(seed)
    for name, local in locals_by_name:
        if name.endswith("norm.weight"):
            local.fill_(1.0)
        elif name.endswith(".bias"):
            local.zero_()
        else:
            local.normal_(0.0, 0.02, generator=generator)
