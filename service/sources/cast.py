"""A source in another dtype: fp32 master weights published as the bf16 that engines serve.

Only what this rank holds is cast, into buffers that are made once and stay where they are, so live mode keeps reading
one-sidedly and nothing is gathered. The thing to watch: the buffers are as good as the last `refresh`, which
`Publisher.publish` calls before the epoch opens; a shard whose dtype is right already is published as it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.protocol.dtypes import dtype_from_name, dtype_name
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.messages import TensorMeta
from weightsync.protocol.packing import pack_offsets


class CastSource(WeightSource):
    """Another source's tensors, cast on each publish.

    Args:
        base: what the trainer holds.
        dtype: what floating-point tensors become; or name -> dtype for some tensors, the others stay as they are.

    Raises:
        InvalidLayoutError: a name that the base does not publish, an alias, or a dtype that is not floating-point.

    Example:
        >>> from weightsync.service.sources.tensors import StateDictSource
        >>> source = CastSource(StateDictSource({"w": torch.ones(2, 3)}), torch.bfloat16)
        >>> source.manifest()[0].dtype, source.shards()[0].tensor.sum().item(), source.extra_bytes
        ('bfloat16', 6.0, 12)
    """

    def __init__(self, base: WeightSource, dtype: torch.dtype | Mapping[str, torch.dtype]) -> None:
        self._base = base
        metas = base.manifest()
        self._dtype_of = _wanted_dtypes(metas, dtype)
        self._manifest = tuple(
            replace(meta, dtype=dtype_name(self._dtype_of[meta.alias_of or meta.name])) for meta in metas
        )
        self._buffers: list[torch.Tensor] | None = None

    def manifest(self) -> tuple[TensorMeta, ...]:
        return self._manifest

    def shards(self) -> Sequence[LocalShard]:
        held = self._base.shards()
        if self._buffers is None:
            self._buffers = self._allocated(held)
            self._cast(held)
        buffers = iter(self._buffers)
        return [LocalShard(s.name, s.offset, next(buffers)) if self._casts(s) else s for s in held]

    def held_names(self) -> tuple[str, ...]:
        return self._base.held_names()

    def gather(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return {name: tensor.to(self._dtype_of[name]) for name, tensor in self._base.gather(names).items()}

    def refresh(self) -> None:
        self._base.refresh()
        if self._buffers is not None:  # else nobody reads shards: staged
            self._cast(self._base.shards())

    @property
    def extra_bytes(self) -> int:
        return self._base.extra_bytes + sum(buffer.nbytes for buffer in self._buffers or ())

    @torch.no_grad()
    def _cast(self, held: Sequence[LocalShard]) -> None:
        cast = [shard for shard in held if self._casts(shard)]
        for buffer, shard in zip(self._buffers or (), cast, strict=True):
            buffer.copy_(shard.tensor)

    def _casts(self, shard: LocalShard) -> bool:
        return shard.tensor.dtype != self._dtype_of[shard.name]

    def _allocated(self, held: Sequence[LocalShard]) -> list[torch.Tensor]:
        """A buffer for each shard that is cast, all in one allocation: memory is registered by the allocation."""
        cast = [shard for shard in held if self._casts(shard)]
        offsets, nbytes = pack_offsets([(s.tensor.numel(), self._dtype_of[s.name]) for s in cast])
        if not cast:
            return []
        memory = torch.empty(nbytes, dtype=torch.uint8, device=cast[0].tensor.device)
        buffers = []
        for shard, offset in zip(cast, offsets, strict=True):
            dtype, shape = self._dtype_of[shard.name], shard.tensor.shape
            end = offset + shape.numel() * dtype.itemsize
            buffers.append(memory[offset:end].view(dtype).view(shape))
        return buffers


def _wanted_dtypes(
    metas: Sequence[TensorMeta], dtype: torch.dtype | Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    now = {meta.name: dtype_from_name(meta.dtype) for meta in metas if meta.alias_of is None}
    if isinstance(dtype, torch.dtype):
        _check_floating("every tensor", dtype)
        return {name: dtype if own.is_floating_point else own for name, own in now.items()}
    for name, wanted in dtype.items():
        if name not in now:
            raise InvalidLayoutError(f"{name!r} is to be cast, but the base publishes no canonical tensor of that name")
        _check_floating(repr(name), wanted)
        _check_floating(repr(name), now[name])
    return now | dict(dtype)


def _check_floating(what: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise InvalidLayoutError(f"{what}: {dtype} takes no part in a cast; only floating-point dtypes do")
