"""The weights of one vLLM worker, as a target of pulls.

The model's own `load_weights` is recorded over a skeleton of the model, so the live model may compute meanwhile.
What a layer uses as it was loaded is pulled straight into the live parameter (or its shadow); what a layer converts
after loading is pulled into memory in the form of the checkpoint, which nobody sees, and goes through the layer's own
conversion at install. On CUDA, unquantised layers convert nothing; on CPU vLLM packs every linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from weightsync.actors.interfaces import WeightTarget
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.record import Recording, module_prefixes
from weightsync.service.targets import ModuleTarget, qualified
from weightsync.service.vllm.reload import convert, converts, derive_attention, take_in
from weightsync.service.vllm.skeleton import Skeleton, is_as_loaded, make_skeleton


@dataclass
class _Places:
    """Where each parameter's bytes go."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    converted: dict[nn.Module, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Live layer -> parameter name -> what it is converted from."""
    tied: list[nn.Module] = field(default_factory=list)
    """Live layers that convert a parameter which they share with another layer."""


class VllmTarget(WeightTarget):
    """One worker's model.

    Args:
        model: as vLLM loaded it.
        vllm_config: of the worker.
        device: where the model is.
        allow_partial: accept parameters into which no published tensor is loaded; they keep what they hold.
    """

    def __init__(
        self, model: nn.Module, vllm_config: VllmConfig, device: torch.device, *, allow_partial: bool = False
    ) -> None:
        self._model = model
        self._config = vllm_config
        self._device = device
        self._allow_partial = allow_partial
        self._places = _Places()

    def record(self, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> Sequence[RecordedCopy]:
        """The copies of the model's loader.

        Raises:
            UnsupportedViewError, UnsupportedLayoutError: the loader needs the data of a weight, changes one after
                loading it, or fills an attention layer's own parameters.
            InvalidLayoutError: a parameter is filled in part, or not at all.
        """
        skeleton = make_skeleton(self._model)
        with set_current_vllm_config(self._config), self._device:
            recording = ModuleTarget(skeleton.root, allow_partial=self._allow_partial).recording(manifest)
        self._refuse(recording, skeleton)
        self._places = self._place(recording, skeleton)
        return qualified(skeleton.root, recording)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._places.tensors

    def unseen(self) -> frozenset[str]:
        return frozenset(self._places.unseen)

    @torch.no_grad()
    def install(self) -> None:
        """Every converted layer takes its new weights in, then attention derives from them."""
        with set_current_vllm_config(self._config):
            for layer, weights in self._places.converted.items():
                take_in(layer, weights)
            for layer in self._places.tied:
                convert(layer)
            derive_attention(self._model, self._config.model_config.dtype)

    def _refuse(self, recording: Recording, skeleton: Skeleton) -> None:
        for copy in recording.copies:
            if is_deferred_attention_layer(skeleton.live[_owner(copy)]):
                raise UnsupportedLayoutError(
                    f"{copy.src_name} is loaded into {copy.param_name!r} of an attention layer, which derives its "
                    "parameters after loading; leave this name out of what is published"
                )
        attention = {
            prefix for prefix, twin in skeleton.root.named_modules() if is_deferred_attention_layer(skeleton.live[twin])
        }
        missing = [
            name
            for name in recording.unwritten
            if name.rpartition(".")[0] not in attention and name.rpartition(".")[2] not in SKIP_LOAD_TENSORS
        ]
        if missing and not self._allow_partial:
            raise InvalidLayoutError(
                f"no published tensor is loaded into {missing[0]!r} ({len(missing)} such parameters of the engine's "
                f"model); {len(recording.never_copied)} published names are not used"
                f"{_some(recording.never_copied)}: publish the missing names under the names of a checkpoint of this "
                "model, or set allow_partial"
            )

    def _place(self, recording: Recording, skeleton: Skeleton) -> _Places:
        places = _Places()
        prefixes = module_prefixes(skeleton.root)
        written: dict[int, nn.Module] = {}
        for copy in recording.copies:
            twin, name = _owner(copy), copy.param_name
            layer, form = skeleton.live[twin], getattr(twin, name)
            written[id(form)] = twin
            qualified_name = prefixes[id(twin)] + name
            if qualified_name in places.tensors:
                continue
            live = getattr(layer, name, None)
            if live is form or (live is not None and is_as_loaded(live, form) and not converts(layer)):
                places.tensors[qualified_name] = live
            else:
                places.unseen.add(qualified_name)
                places.tensors[qualified_name] = self._memory_like(form)
                places.converted.setdefault(layer, {})[name] = places.tensors[qualified_name]
        places.tied = [
            layer
            for twin, layer in skeleton.live.items()
            if converts(layer)
            and layer not in places.converted
            and any(id(form) in written for form in twin._parameters.values() if form is not None)
        ]
        return places

    def _memory_like(self, form: torch.Tensor) -> torch.Tensor:
        """Zeros: padding that no weight fills is zero in vLLM's layers."""
        made = torch.empty_strided(tuple(form.shape), tuple(form.stride()), dtype=form.dtype, device=self._device)
        return made.zero_()


def _owner(copy: RecordedCopy) -> nn.Module:
    assert isinstance(copy.module, nn.Module)
    return copy.module


def _some(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:3])}, ...)" if names else ""
