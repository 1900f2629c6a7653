"""LoRA trainers: adapters alone, the weights below them, or both merged on each publish.

Names follow PEFT: a wrapped model holds `base_model.model.<name>.base_layer.weight` beside `lora_A.<adapter>.weight`
of shape (r, in) and `lora_B.<adapter>.weight` of shape (out, r); its layers keep `scaling[adapter]`. Checkpoints and
engines know neither prefix. The thing to watch: merged weights live in buffers of their own, of the size of this
rank's part of the adapted weights; the trainer's weights are never touched, so there is nothing to unmerge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.service.sources.tensors import StateDictSource, dtensor_offset, is_dtensor, named_tensors

PREFIX = "base_model.model."
_BY_ADAPTER = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_HALVES = (torch.float16, torch.bfloat16)


class LoraSource(StateDictSource):
    """One adapter's tensors alone, under the names that PEFT saves and engines load.

    Args:
        module: a PEFT-wrapped model.
        adapter: which adapter; its name does not appear in the published ones.

    Raises:
        InvalidLayoutError: the model has no such adapter; names those it has.
    """

    def __init__(self, module: nn.Module, adapter: str = "default") -> None:
        super().__init__(_adapter_tensors(named_tensors(module, buffers=True), adapter))


class LoraBaseSource(StateDictSource):
    """The weights below the adapters, under checkpoint names: what an engine that applies adapters itself needs once.

    Of modules that the adapter replaces (`modules_to_save`) the replacements are published.

    Args:
        module: a PEFT-wrapped model.
        adapter: whose replacements to take.
    """

    def __init__(self, module: nn.Module, adapter: str = "default") -> None:
        super().__init__(_base_tensors(named_tensors(module, buffers=True), adapter))


class MergedLoraSource(LoraBaseSource):
    """Weights with the adapter merged in, under checkpoint names: `W + scaling * B @ A`, as PEFT's own merge rounds.

    The weights of an FSDP2 or tensor-parallel model are merged shard by shard; of the adapter, which is small, each
    rank gathers all of A and B. Every rank must publish, then.

    Args:
        module: a PEFT-wrapped model.
        adapter: which adapter to merge.

    Raises:
        InvalidLayoutError: the model has no such adapter.
        UnsupportedLayoutError: an adapter that is no plain LoRA of a matrix (DoRA, biases, convolutions); names it.
    """

    def __init__(self, module: nn.Module, adapter: str = "default") -> None:
        super().__init__(module, adapter)
        self._merges = _merges(module, adapter)
        for merge in self._merges:
            self._tensors[merge.name] = merge.merged

    @torch.no_grad()
    def refresh(self) -> None:
        for merge in self._merges:
            merge.run()

    @property
    def extra_bytes(self) -> int:
        return sum(_local(merge.merged).nbytes for merge in self._merges)


@dataclass(frozen=True)
class _Merge:
    """One adapted weight: where its parts are, and the buffer of the sum."""

    name: str
    layer: Any
    adapter: str
    weight: torch.Tensor
    down: torch.Tensor
    """A: (r, in)."""
    up: torch.Tensor
    """B: (out, r)."""
    embedding: bool
    """PEFT rounds the product to the weight's dtype before it adds it; of a linear layer it rounds the sum only."""
    transposed: bool
    """The weight is (in, out), as in GPT-2's Conv1D and in embeddings."""
    merged: torch.Tensor

    def run(self) -> None:
        """Merge this rank's part."""
        if self.adapter in getattr(self.layer, "merged_adapters", ()):
            raise InvalidLayoutError(
                f"{self.name!r}: the trainer has merged adapter {self.adapter!r} into the weight already; unmerge it, "
                "or publish with LoraBaseSource"
            )
        weight, target = _local(self.weight), _local(self.merged)
        rows, columns = self._region()
        if self.transposed:
            rows, columns = columns, rows
        up, down = _whole(self.up)[rows], _whole(self.down)[:, columns]
        dtype = up.dtype
        if up.device.type == "cpu" and dtype in _HALVES:
            up, down = up.float(), down.float()
        delta = up @ down
        delta = ((delta.t() if self.transposed else delta) * self.layer.scaling[self.adapter]).to(dtype)
        target.copy_(weight).add_(delta.to(weight.dtype) if self.embedding else delta)

    def _region(self) -> tuple[slice, slice]:
        """The rows and columns of the weight that this rank holds."""
        shape = _local(self.weight).shape
        offset = dtensor_offset(self.name, self.weight) if is_dtensor(self.weight) else (0, 0)
        return slice(offset[0], offset[0] + shape[0]), slice(offset[1], offset[1] + shape[1])


def _merges(module: nn.Module, adapter: str) -> list[_Merge]:
    tensors = named_tensors(module, buffers=True)
    _refuse_other_kinds(tensors, adapter)
    merges = []
    for name in tensors:
        layer_name, kind = _adapted_layer(name, adapter)
        if layer_name is None:
            continue
        layer = module.get_submodule(layer_name)
        embedding = kind == "lora_embedding_A"
        other = name.replace(f".{kind}.", f".{kind[:-1]}B.")
        weight = tensors.get(f"{layer_name}.base_layer.weight")
        if weight is None or weight.dim() != 2 or other not in tensors:
            what = "something else than a weight" if weight is None else f"a weight of shape {tuple(weight.shape)}"
            raise UnsupportedLayoutError(
                f"{name!r} adapts {what}, and only matrices with an A and a B are merged here; merge in the trainer "
                "and publish with mode='staged'"
            )
        merges.append(
            _Merge(
                _checkpoint_name(f"{layer_name}.base_layer.weight"),
                layer,
                adapter,
                weight.detach(),
                tensors[name].detach(),
                tensors[other].detach(),
                embedding,
                embedding or bool(getattr(layer, "fan_in_fan_out", False)),
                torch.empty_like(weight, requires_grad=False),
            )
        )
    return merges


def _adapted_layer(name: str, adapter: str) -> tuple[str | None, str]:
    """(module that owns this A of the adapter, kind of A); (None, "") for any other tensor."""
    for kind, suffix in (("lora_A", f".lora_A.{adapter}.weight"), ("lora_embedding_A", f".lora_embedding_A.{adapter}")):
        if name.endswith(suffix):
            return name.removesuffix(suffix), kind
    return None, ""


def _refuse_other_kinds(tensors: Mapping[str, torch.Tensor], adapter: str) -> None:
    for name in tensors:
        if f"lora_magnitude_vector.{adapter}" in name or f"lora_B.{adapter}.bias" in name:
            raise UnsupportedLayoutError(
                f"{name!r}: DoRA magnitudes and LoRA biases are not merged here; merge in the trainer and publish with "
                "mode='staged'"
            )


def _adapter_tensors(tensors: Mapping[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        for kind in _BY_ADAPTER:
            if kind in parts and adapter in parts[parts.index(kind) + 1 : parts.index(kind) + 2]:
                del parts[parts.index(kind) + 1]
                found[".".join(parts)] = tensor
        if f".modules_to_save.{adapter}." in name:
            found[name.replace(f".modules_to_save.{adapter}.", ".")] = tensor
    if not found:
        raise InvalidLayoutError(f"the model has no adapter {adapter!r}; it has {_adapters(tensors) or 'none'}")
    return found


def _base_tensors(tensors: Mapping[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    if adapter not in _adapters(tensors):
        raise InvalidLayoutError(f"the model has no adapter {adapter!r}; it has {_adapters(tensors) or 'none'}")
    replaced = {
        name.partition(f".modules_to_save.{adapter}.")[0] for name in tensors if f".modules_to_save.{adapter}." in name
    }
    out = {}
    for name, tensor in tensors.items():
        if any(kind in name.split(".") for kind in _BY_ADAPTER):
            continue
        if ".modules_to_save." in name:
            if f".modules_to_save.{adapter}." in name:
                out[_checkpoint_name(name.replace(f".modules_to_save.{adapter}.", "."))] = tensor
            continue
        if ".original_module." in name:
            if name.partition(".original_module.")[0] not in replaced:
                out[_checkpoint_name(name.replace(".original_module.", "."))] = tensor
            continue
        out[_checkpoint_name(name)] = tensor
    return out


def _checkpoint_name(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def _adapters(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    found: set[str] = set()
    for name in tensors:
        parts = name.split(".")
        found.update(parts[parts.index(kind) + 1] for kind in (*_BY_ADAPTER, "modules_to_save") if kind in parts[:-1])
    return sorted(found)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
