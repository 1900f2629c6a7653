"""A skeleton of a live vLLM model: its modules again, with parameters in the form in which checkpoints are loaded.

vLLM notes each layer's parameters before it converts them (packs, quantises, removes them), and reloads by putting
those notes back into the live layers. A skeleton puts them into shallow copies of the layers instead, so that a
loader can be recorded while the model computes, and nothing has to be restored. The thing to watch: parameters that
vLLM never converts, such as biases, and tables that loaders read, such as expert maps, are the live ones; whoever
drives a loader over the skeleton must not let it write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MethodType

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel


@dataclass
class Skeleton:
    """`root` is the copy of the model; `live` maps each module of it to the one it stands for."""

    root: nn.Module
    live: dict[nn.Module, nn.Module] = field(default_factory=dict)


def make_skeleton(model: nn.Module) -> Skeleton:
    """Copy the modules of `model`; parameters are on the meta device, and no memory is taken.

    Tied parameters are tied here too.
    """
    copies: dict[nn.Module, nn.Module] = {}
    tied: dict[int, torch.Tensor] = {}

    def copy(module: nn.Module) -> nn.Module:
        if module in copies:
            return copies[module]
        twin = copies[module] = module.__class__.__new__(module.__class__)
        twin.__dict__.update(module.__dict__)
        parameters, buffers = get_layerwise_info(module).restore_metadata
        twin.__dict__["_parameters"] = _as_loaded(module, twin, module._parameters, parameters, tied)
        twin.__dict__["_buffers"] = _as_loaded(module, twin, module._buffers, buffers, tied)
        twin.__dict__["_modules"] = {name: child and copy(child) for name, child in module._modules.items()}
        return twin

    root = copy(model)
    return Skeleton(root, {twin: module for module, twin in copies.items()})


def _as_loaded(
    module: nn.Module,
    twin: nn.Module,
    live: Mapping[str, torch.Tensor | None],
    noted: Mapping[str, torch.Tensor],
    tied: dict[int, torch.Tensor],
) -> dict[str, torch.Tensor | None]:
    """A layer's tensors as loaders expect them."""
    if module.__class__.__name__ in SKIP_MODULES:
        return dict(live)
    tensors: dict[str, torch.Tensor | None] = {name: tensor for name, tensor in live.items() if name in SKIP_TENSORS}
    for name, note in noted.items():
        tensor = live.get(name)
        unchanged = tensor is not None and is_as_loaded(tensor, note)
        if unchanged and id(tensor) in tied:
            tensors[name] = tied[id(tensor)]
            continue
        copy = tensors[name] = to_meta_tensor(note)
        _bind(copy, module, twin)
        if unchanged:
            tied[id(tensor)] = copy
    return tensors


def _bind(tensor: torch.Tensor, module: nn.Module, twin: nn.Module) -> None:
    """Loaders are methods of their layer; notes hold them with a placeholder in its stead until the first reload."""
    for key, value in tensor.__dict__.items():
        if isinstance(value, MethodType) and (value.__self__ is layer_ref_sentinel or value.__self__ is module):
            tensor.__dict__[key] = MethodType(value.__func__, twin)


def is_as_loaded(tensor: torch.Tensor, note: torch.Tensor) -> bool:
    """Whether a live tensor has the form that a checkpoint is loaded into."""
    return (tensor.shape, tensor.stride(), tensor.dtype) == (note.shape, note.stride(), note.dtype)
