"""vLLM models without an engine around them: loaded as a worker loads them, in this process."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  calls of torch.accelerator do nothing from here on, as in a worker
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import get_model


@dataclass
class Loaded:
    """A model as a worker has it after loading."""

    model: nn.Module
    config: VllmConfig


def load(folder: Path, **arguments: Any) -> Loaded:
    """What a single worker loads from a checkpoint."""
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True, **arguments}
    config = EngineArgs(model=str(folder), **options).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        destroy_model_parallel()  # models with experts need groups that others do not have
        initialize_model_parallel(1, 1)
        return Loaded(get_model(vllm_config=config), config)


@torch.no_grad()
def behaviour(loaded: Loaded) -> dict[str, torch.Tensor]:
    """What the model holds, and what each module with weights makes of the same input in a forward pass.

    Packed weights cannot be looked at, so every linear layer is also tried alone.
    """
    seen: dict[str, torch.Tensor] = {}
    for name, tensor in (*loaded.model.named_parameters(), *loaded.model.named_buffers()):
        if tensor.numel():
            seen[f"{name} itself"] = tensor.detach().clone()
    for prefix, module in loaded.model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):  # what attention derives from other layers' weights
                seen[f"{prefix}.{name} derived"] = value.clone()
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(loaded.config))
        stack.enter_context(set_forward_context(None, loaded.config))
        for name, module in loaded.model.named_modules():
            if isinstance(module, LinearBase):
                given = torch.randn(3, _width(module), generator=generator).bfloat16()
                seen[f"{name} tried"] = _first(module(given)).clone()
        for name, module in loaded.model.named_modules():
            if isinstance(module, AttentionLayerBase):  # leaves its output as it is if there is nothing to attend to
                stack.callback(module.register_forward_hook(lambda module, given, made: made.zero_()).remove)
            elif name:
                stack.callback(module.register_forward_hook(_noting(seen, name)).remove)
        tokens = torch.arange(7) * 31 % 250
        hidden = loaded.model(tokens, torch.arange(7), None)
        seen["logits"] = loaded.model.compute_logits(_first(hidden)).clone()
    return seen


def _width(module: LinearBase) -> int:
    return getattr(module, "input_size_per_partition", module.input_size)


def _noting(seen: dict[str, torch.Tensor], name: str) -> Any:
    def note(module: nn.Module, given: Any, made: Any) -> None:
        if isinstance(_first(made), torch.Tensor):
            seen[f"{name} in passing"] = _first(made).clone()

    return note


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value
