"""Sources of shards that no DTensor describes: boxes, affine maps, ranges of flattened parameters.

Layouts that trainers keep in their own code (tensor parallelism by hand, ZeRO) are said here per rank, as boxes of
the logical tensor over this rank's memory. The thing to watch: nobody but the caller knows whether the memory holds
what the layout says; what can be checked here is that sizes, dtypes and bounds fit, and every message names both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.protocol.boxes import Box
from weightsync.protocol.coverage import find_holes
from weightsync.protocol.dtypes import dtype_name
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.maps import AffineMap
from weightsync.protocol.messages import TensorMeta


class ShardSource(WeightSource):
    """Boxes of logical tensors, as one rank holds them.

    Args:
        manifest: every logical tensor this rank knows of, aliases included.
        shards: the boxes; their memory is kept by reference.

    Raises:
        InvalidLayoutError: a box of an unknown tensor, of another dtype, or outside of its tensor; names it.

    Example:
        >>> upper = LocalShard("w", (2, 0), torch.zeros(2, 3))
        >>> ShardSource([TensorMeta("w", "float32", (4, 3))], [upper]).held_names()
        ()
    """

    def __init__(self, manifest: Sequence[TensorMeta], shards: Sequence[LocalShard]) -> None:
        self._manifest = tuple(manifest)
        self._shards = list(shards)
        known = {meta.name: meta for meta in self._manifest if meta.alias_of is None}
        self._boxes: dict[str, list[LocalShard]] = {name: [] for name in known}
        for shard in self._shards:
            if shard.name not in known:
                raise InvalidLayoutError(
                    f"a shard of {shard.name!r} is given, which is no canonical name of the manifest"
                )
            _check_box(known[shard.name], shard)
            self._boxes[shard.name].append(shard)

    def manifest(self) -> tuple[TensorMeta, ...]:
        return self._manifest

    def shards(self) -> Sequence[LocalShard]:
        return self._shards

    def held_names(self) -> tuple[str, ...]:
        """Names of which this rank holds everything: only those can it yield whole, without asking other ranks."""
        return tuple(meta.name for meta in self._manifest if meta.alias_of is None and self._is_whole(meta))

    @torch.no_grad()
    def gather(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Whole tensors out of the rank's own boxes."""
        held = set(self.held_names())
        metas = {meta.name: meta for meta in self._manifest}
        return {name: self._assembled(metas[name]) for name in names if name in held}

    def _is_whole(self, meta: TensorMeta) -> bool:
        boxes = [Box(shard.offset, tuple(shard.tensor.shape)) for shard in self._boxes[meta.name]]
        if not boxes:
            return False
        return not find_holes(Box((0,) * len(meta.shape), meta.shape), boxes)

    def _assembled(self, meta: TensorMeta) -> torch.Tensor:
        own = self._boxes[meta.name]
        if len(own) == 1:
            return own[0].tensor.detach()
        whole = torch.empty(meta.shape, dtype=own[0].tensor.dtype, device=own[0].tensor.device)
        for shard in own:
            box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.tensor.shape, strict=True))
            whole[box].copy_(shard.tensor)
        return whole


class AffineSource(ShardSource):
    """Shards laid out as affine maps say: fused QKV, BigCode, CodeGen, Yuan, or any other map.

    Args:
        maps: name -> layout of the logical tensor over the ranks (builders are in `weightsync.protocol.affine`).
        rank: this rank in the maps.
        tensors: name -> this rank's shard, of the map's shard shape or flat; contiguous. Kept by reference.
        aliases: other names of tensors that are published: alias -> canonical name.

    Raises:
        InvalidLayoutError: a map without a tensor or the other way round, or sizes that do not fit.
        UnsupportedLayoutError: a shard that is not contiguous.

    Example:
        >>> from weightsync.protocol.affine import gate_up_map
        >>> fused = {"gate_up": gate_up_map((8, 3), tp=2)}
        >>> [shard.offset for shard in AffineSource(fused, 1, {"gate_up": torch.zeros(4, 3)}).shards()]
        [(2, 0), (6, 0)]
    """

    def __init__(
        self,
        maps: Mapping[str, AffineMap],
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        one_sided = sorted(maps.keys() ^ tensors.keys())
        if one_sided:
            raise InvalidLayoutError(f"rank {rank}: {one_sided[:3]} have a map or a tensor, but not both")
        manifest, shards = [], []
        for name, layout in maps.items():
            tensor = tensors[name].detach()
            manifest.append(TensorMeta(name, dtype_name(tensor.dtype), layout.logical_shape))
            shards += _boxes_of_map(name, layout, rank, tensor)
        super().__init__([*manifest, *_alias_metas(manifest, aliases or {})], shards)


def _boxes_of_map(name: str, layout: AffineMap, rank: int, tensor: torch.Tensor) -> list[LocalShard]:
    if not 0 <= rank < layout.num_ranks:
        raise InvalidLayoutError(f"{name!r}: its map is of {layout.num_ranks} ranks, this is rank {rank}")
    if not tensor.is_contiguous():
        raise UnsupportedLayoutError(
            f"{name!r} on rank {rank} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}), and "
            "a map addresses a contiguous shard; pass the tensor that the view is of, with the map of that"
        )
    shape = layout.shard_shapes[rank]
    if tuple(tensor.shape) not in (shape, (prod(shape),)):
        raise InvalidLayoutError(f"{name!r} on rank {rank} has shape {tuple(tensor.shape)}, its map says {shape}")
    return [placed(name, box, tensor) for box, _ in layout.logical_boxes(rank)]


def placed(name: str, box: Box, tensor: torch.Tensor) -> LocalShard:
    """A box that addresses `tensor`, in elements from its first, as a shard that views it."""
    view = tensor.as_strided(box.extent, box.strides, tensor.storage_offset() + box.offset)
    return LocalShard(name, box.start, view)


def _alias_metas(manifest: Sequence[TensorMeta], aliases: Mapping[str, str]) -> list[TensorMeta]:
    known = {meta.name: meta for meta in manifest}
    out = []
    for alias, name in aliases.items():
        if name not in known:
            raise InvalidLayoutError(f"{alias!r} is to be an alias of {name!r}, which is not published")
        out.append(TensorMeta(alias, known[name].dtype, known[name].shape, name))
    return out


def _check_box(meta: TensorMeta, shard: LocalShard) -> None:
    shape = tuple(shard.tensor.shape)
    fits = len(shard.offset) == len(shape) == len(meta.shape) and all(
        o >= 0 and o + n <= full for o, n, full in zip(shard.offset, shape, meta.shape, strict=True)
    )
    if not fits:
        raise InvalidLayoutError(f"{meta.name!r}: {shape} at {shard.offset} does not fit into {meta.shape}")
    if dtype_name(shard.tensor.dtype) != meta.dtype:
        raise InvalidLayoutError(
            f"{meta.name!r} is announced as {meta.dtype}, and a shard of it is {dtype_name(shard.tensor.dtype)}"
        )
