"""Sources of tensors that have their checkpoint names: state dicts, modules, DTensors.

They describe the tensors where they lie; none gathers anything in live mode. The thing to watch: a shard must
stay where it is between registration and the end of training, so sources hold on to the trainer's own
storages and never copy. Tied weights (one memory under several names) are published once, under the first
name, and the others travel as aliases.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.protocol.dtypes import dtype_name
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.messages import TensorMeta
from weightsync.protocol.placements import dtensor_box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class StateDictSource(WeightSource):
    """Whole tensors by checkpoint name, as a single-rank trainer or a data-parallel replica holds them.

    DTensor values are published shard by shard, like `DTensorSource` does.

    Args:
        tensors: name -> tensor; kept by reference. Non-tensors are refused by name.

    Example:
        >>> StateDictSource({"w": torch.zeros(2, 3)}).manifest()[0].shape
        (2, 3)
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise InvalidLayoutError(f"{name!r} is a {type(tensor).__name__}, not a tensor; leave it out")
            if tensor.device.type == "meta":
                raise InvalidLayoutError(f"{name!r} is on the meta device and has no bytes to publish")

    def manifest(self) -> tuple[TensorMeta, ...]:
        first_name: dict[tuple[object, ...], str] = {}
        metas = []
        for name, tensor in self._tensors.items():
            canonical = first_name.setdefault(_memory_key(name, tensor), name)
            metas.append(
                TensorMeta(
                    name,
                    dtype_name(tensor.dtype),
                    tuple(tensor.shape),
                    None if canonical == name else canonical,
                )
            )
        return tuple(metas)

    def shards(self) -> Sequence[LocalShard]:
        return [
            _local_shard(name, tensor)
            for name, tensor in self._canonical().items()
            if not is_dtensor(tensor) or _holds_something(tensor)
        ]

    def held_names(self) -> tuple[str, ...]:
        return tuple(self._canonical())

    @torch.no_grad()
    def gather(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        gathered = {}
        for name in names:
            tensor = self._tensors.get(name)
            if tensor is not None:
                tensor = tensor.detach()
                gathered[name] = tensor.full_tensor() if is_dtensor(tensor) else tensor
        return gathered

    def _canonical(self) -> dict[str, torch.Tensor]:
        return {meta.name: self._tensors[meta.name] for meta in self.manifest() if meta.alias_of is None}


class ModuleSource(StateDictSource):
    """A module's parameters and persistent buffers, under their qualified names.

    Args:
        module: the trainer's model; FSDP2 and tensor-parallel modules are published shard by shard.
        buffers: publish persistent buffers too (checkpoints hold them).

    Example:
        >>> [meta.name for meta in ModuleSource(nn.Linear(2, 3)).manifest()]
        ['weight', 'bias']
    """

    def __init__(self, module: nn.Module, buffers: bool = True) -> None:
        super().__init__(named_tensors(module, buffers))


class DTensorSource(ModuleSource):
    """An FSDP2 or tensor-parallel module whose parameters are DTensors: each rank publishes its own shard.

    Nothing is gathered in live mode. Placements may be `Shard` and `Replicate` on any mesh, FSDP2 over tensor
    parallelism too; uneven shards are fine.

    Raises:
        UnsupportedLayoutError: a `Partial` (or other) placement, named with its parameter.
        InvalidLayoutError: no parameter is a DTensor; then `ModuleSource` is what you want.
    """

    def __init__(self, module: nn.Module, buffers: bool = True) -> None:
        super().__init__(module, buffers)
        if not any(is_dtensor(tensor) for tensor in self._tensors.values()):
            raise InvalidLayoutError("no parameter of this module is a DTensor; use ModuleSource")


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """`isinstance(tensor, DTensor)` that does not import torch's DTensor (0.5 s) where nobody has made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def named_tensors(module: nn.Module, buffers: bool) -> dict[str, torch.Tensor]:
    """Every name in checkpoint order, tied ones included."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    if buffers:
        persistent = set(module.state_dict(keep_vars=True)) - set(named)
        named.update((n, b) for n, b in module.named_buffers(remove_duplicate=False) if n in persistent)
    return named


def _memory_key(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for names that are the same memory seen the same way; memory of no bytes is nobody's alias."""
    if is_dtensor(tensor):
        return (id(tensor),)  # a rank may hold no row of a tied weight, so its address does not tell
    if tensor.numel() == 0:
        return (name,)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _holds_something(tensor: DTensor) -> bool:
    return tensor.to_local().numel() > 0 or tensor.numel() == 0


def _local_shard(name: str, tensor: torch.Tensor) -> LocalShard:
    if is_dtensor(tensor):
        local, offset = tensor.to_local().detach(), dtensor_offset(name, tensor)
    else:
        local, offset = tensor.detach(), (0,) * tensor.dim()
    return LocalShard(name, offset, local)


def dtensor_offset(name: str, tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's local shard begins in the logical tensor, in elements per dimension.

    Raises:
        UnsupportedLayoutError: a placement that cannot be read in place, or a shard that is not what the
            placements say.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise InvalidLayoutError(f"{name!r}: this rank is not in the parameter's device mesh")
    try:
        offset, extent = dtensor_box(tensor.shape, tensor.device_mesh.shape, tensor.placements, coordinate)
    except UnsupportedLayoutError as error:
        raise UnsupportedLayoutError(f"{name!r}: {error}; use mode='staged'") from None
    local = tuple(tensor.to_local().shape)
    if extent != local:
        raise UnsupportedLayoutError(
            f"{name!r}: this rank holds {local} but placements {tensor.placements} of {tuple(tensor.shape)} give "
            f"{extent}; use mode='staged'"
        )
    return offset
