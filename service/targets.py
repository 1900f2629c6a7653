"""Targets: where an inference worker keeps its weights, and how they get in.

The worker's own loading code decides what it needs: `ModuleTarget` runs the module's `load_weights` once over
recording tensors, so fused, sharded and renamed parameters need no description. The thing to watch: recording
shows the module to its loader on the meta device for a moment, so it must not run while the module computes;
it happens when the `Subscriber` is made, or as soon afterwards as the trainer has registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weightsync.actors.interfaces import WeightTarget
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.record import Recording, module_prefixes, record_module
from weightsync.protocol.views import describe_chain
from weightsync.service.sources import dtensor_offset, is_dtensor

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


class ModuleTarget(WeightTarget):
    """A module that loads checkpoints, such as an inference engine's model.

    Args:
        module: holds the parameters.
        load_weights: takes an iterable of (checkpoint name, tensor); None takes `module.load_weights`, or, where
            there is none, each parameter takes the whole tensor of its own name.
        allow_partial: accept parameters of which the loader fills only a part; the rest keeps what it holds.
    """

    def __init__(
        self, module: nn.Module, load_weights: LoadWeights | None = None, *, allow_partial: bool = False
    ) -> None:
        self._module = module
        self._allow_partial = allow_partial
        self._load_weights = load_weights or getattr(module, "load_weights", None)

    def record(self, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> Sequence[RecordedCopy]:
        """The copies of the module's loader.

        Raises:
            UnsupportedLayoutError: a weight goes somewhere else than into the module, or is changed afterwards.
            InvalidLayoutError: a parameter is filled in part only.
        """
        return qualified(self._module, self.recording(manifest))

    def recording(self, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> Recording:
        """What the loader does, and with which parameters it does nothing; raises as `record`."""
        recording = record_module(self._module, self._load_weights, manifest)
        if recording.unattributed:
            name, chain = recording.unattributed[0]
            raise UnsupportedLayoutError(
                f"the loader copies {describe_chain(name, chain)} to memory that belongs to no parameter or buffer of "
                f"the module ({len(recording.unattributed)} such copies), where a pull cannot follow"
            )
        if recording.partial and not self._allow_partial:
            name, hole = recording.partial[0]
            raise InvalidLayoutError(
                f"{name!r} would be filled in part only: nothing is loaded into {hole} ({len(recording.partial)} such "
                "parameters); publish the missing names, or set allow_partial"
            )
        return recording

    def tensors(self) -> Mapping[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = dict(self._module.named_parameters(remove_duplicate=False))
        named.update(self._module.named_buffers(remove_duplicate=False))
        return named


def qualified(module: nn.Module, recording: Recording) -> list[RecordedCopy]:
    """The copies with parameter names as seen from `module`, of which they were recorded."""
    prefixes = module_prefixes(module)
    return [replace(copy, param_name=prefixes[id(copy.module)] + copy.param_name) for copy in recording.copies]


class StateDictTarget(WeightTarget):
    """Plain tensors by published name; DTensor values take just their own shard.

    Args:
        tensors: name -> tensor, written in place; kept by reference.

    Example:
        >>> StateDictTarget({"w": torch.zeros(2, 3)}).tensors()["w"].shape
        torch.Size([2, 3])
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def record(self, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> Sequence[RecordedCopy]:
        copies = []
        for name, tensor in self._tensors.items():
            if name not in manifest:
                raise InvalidLayoutError(
                    f"{name!r} is wanted here but no trainer rank publishes it; published are {len(manifest)} names "
                    f"({', '.join(list(manifest)[:3])}, ...)"
                )
            if tuple(tensor.shape) != tuple(manifest[name][1]):
                raise InvalidLayoutError(
                    f"{name!r} has shape {tuple(tensor.shape)} here and {tuple(manifest[name][1])} in the trainer"
                )
            copies.append(_whole_copy(name, tensor))
        return [copy for copy in copies if torch.Size(copy.dest_shape).numel()]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.to_local() if is_dtensor(tensor) else tensor for name, tensor in self._tensors.items()}


def _whole_copy(name: str, tensor: torch.Tensor) -> RecordedCopy:
    """All of a tensor, or of a DTensor's local shard, from the same part of the published one."""
    if is_dtensor(tensor):
        return region_copy(name, tensor.shape, dtensor_offset(name, tensor), tensor.to_local())
    return region_copy(name, tensor.shape, (0,) * tensor.dim(), tensor)


def region_copy(name: str, shape: Sequence[int], offset: Sequence[int], local: torch.Tensor) -> RecordedCopy:
    """All of `local` from the region at `offset` of the published tensor of that `shape`, under the same name."""
    chain = [
        ("narrow", (dim, start, size), ())
        for dim, (start, size) in enumerate(zip(offset, local.shape, strict=True))
        if size != shape[dim]
    ]
    return RecordedCopy(
        src_name=name,
        op_chain=tuple(chain),
        param_name=name,
        dest_offset=0,
        dest_shape=tuple(local.shape),
        dest_stride=tuple(local.stride()),
        dest_dtype=local.dtype,
    )
