"""How a layer that converts its weights takes a new version in: as vLLM's layerwise reload does, layer by layer.

    1. fresh parameters in the form of the checkpoint, filled with what was pulled
    2. the layer's own conversion (packing, quantising) runs on them
    3. the result is copied to where the converted weights were: compiled and captured graphs keep their addresses

After all layers: attention layers derive again what they derive from their neighbours' weights. The thing to watch:
a conversion may keep what it was given, or write into it, so it gets memory of its own, never what pulls write to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors
from vllm.platforms import current_platform

from weightsync.protocol.errors import UnsupportedLayoutError


def converts(layer: nn.Module) -> bool:
    """Whether a layer makes something of its weights after they are loaded, so that they cannot be pulled in place."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return False
    if type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return bool(current_platform.is_cpu() or current_platform.is_xpu())  # only there something is packed
    return type(method).process_weights_after_loading is not QuantizeMethodBase.process_weights_after_loading


@torch.no_grad()
def take_in(layer: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give one layer new weights.

    Args:
        layer: holds converted weights.
        weights: parameter name -> tensor in the form of the checkpoint; only read.

    Raises:
        UnsupportedLayoutError: the conversion does not give the shape it gave before.
    """
    info = get_layerwise_info(layer)
    parameters, buffers = get_layer_params_buffers(layer)
    unsaved = set(layer._non_persistent_buffers_set)
    kept: dict[str, torch.Tensor] = {}
    restore_layer_on_meta(layer, info)
    try:
        materialize_layer(layer, info)
        _fill(layer, weights, {**parameters, **buffers})
        convert(layer)
        kept = _copy_back(layer, parameters, buffers, unsaved)
    finally:
        _put_back(layer, parameters, buffers, unsaved, kept)


def convert(layer: nn.Module) -> None:
    """Let a layer make what it makes of the parameters that it has now."""
    if hasattr(layer, "_already_called_process_weights_after_loading"):
        del layer._already_called_process_weights_after_loading
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        made_before: Any = getattr(method, "moe_kernel", None)
        method.process_weights_after_loading(layer)
        if isinstance(method, UnquantizedFusedMoEMethod) and made_before is not None:
            # vLLM (0.32) leaves this out except at the first loading; on CPU it would compute with unpacked experts.
            made_before.fused_experts.process_weights_after_loading(layer)
    update: Any = getattr(layer, "update_param_tp_status", None)
    if update is not None:
        update()


def derive_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """What attention layers compute from the weights of other layers (MLA's absorbed projections)."""
    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            derive: Any = layer.process_weights_after_loading
            derive(dtype)


def _fill(layer: nn.Module, weights: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> None:
    """What was pulled, and what no weight fills as it was."""
    for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
        if tensor is None:
            continue
        if name in weights:
            tensor.data.copy_(weights[name])
        elif name in before and tensor is not before[name] and tensor.shape == before[name].shape:
            tensor.data.copy_(before[name])


def _copy_back(
    layer: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    unsaved: set[str],
) -> dict[str, torch.Tensor]:
    """Converted values go to where the old ones are. Returns what has to stay as it is now: an attention layer empties
    some of its neighbour's weights once it has derived its own from them, and needs them whole before.
    """
    kept: dict[str, torch.Tensor] = {}
    for name, old in (*parameters.items(), *((n, b) for n, b in buffers.items() if n not in unsaved)):
        new = getattr(layer, name, None)
        if new is None or new is old:
            continue
        if new.shape == old.shape:
            old.data.copy_(new)
        elif old.numel() == 0:
            kept[name] = new
        else:
            raise UnsupportedLayoutError(
                f"{type(layer).__name__} converts {name!r} to shape {tuple(new.shape)}, and had {tuple(old.shape)}; "
                "its addresses would change, which compiled graphs do not allow"
            )
    return kept


def _put_back(
    layer: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    unsaved: set[str],
    kept: Mapping[str, torch.Tensor],
) -> None:
    for name in get_layer_tensors(layer):
        delattr(layer, name)
    for name, tensor in parameters.items():
        layer.register_parameter(name, cast(nn.Parameter, kept.get(name, tensor)))
    for name, tensor in buffers.items():
        layer.register_buffer(name, kept.get(name, tensor), persistent=name not in unsaved)
