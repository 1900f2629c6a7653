"""Where pulled bytes land at a worker: in the live tensors, or beside them until the flip.

Shadow memory mirrors each destination tensor element for element, so that a plan made for one fits the other
and only base addresses differ. The flip exchanges the values of shadow and live: addresses of live tensors never
change, which compiled graphs, captured CUDA graphs and views of fused weights rely on, and the version before stays
in the shadow until the next pull overwrites it. The thing to watch: only elements that some recorded copy writes are
flipped; padding that no weight fills keeps what the engine put there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from weightsync.protocol.boxes import span_of
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.messages import InstallMode
from weightsync.protocol.written import MemoryRegion, find_shared_bytes

_BLOCK_BYTES = 1 << 19
"""Values are exchanged through a scratch block that stays in the cache. Of 64 KiB to 4 MiB, 512 KiB to 1 MiB were
fastest (measured: 1 GB in 0.20 s, a plain copy 0.11 s, an exchange through 1 GB of scratch 0.32 s)."""


class Destinations:
    """Memory of one worker that pulls write to.

    Args:
        live: qualified name -> live tensor.
        copies: what the worker's loader writes; decides which tensors get a shadow.
        install: shadow or in_place.
        unseen: names in `live` that no request reads, and that need no shadow therefore.
    """

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        copies: Sequence[RecordedCopy],
        install: InstallMode,
        unseen: Collection[str] = (),
    ) -> None:
        self._live = {copy.param_name: live[copy.param_name].detach() for copy in copies}
        self._buffers = self._live
        self._flipped: list[RecordedCopy] = []
        if install is InstallMode.SHADOW:
            self._flipped = [copy for copy in copies if copy.param_name not in unseen]
            shadow = {copy.param_name: _mirror(self._live[copy.param_name]) for copy in self._flipped}
            self._buffers = {**self._live, **shadow}
        self.keeps_previous = len(self._flipped) == len(copies)
        """Whether the version before lies in the shadow after a flip."""
        self._blocks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Qualified name -> tensor that reads write into; strides equal the live tensor's."""
        return self._buffers

    def address_of(self, copy: RecordedCopy) -> int:
        """Byte address of the first element of the copy's parameter in the buffers."""
        return self._buffers[copy.param_name].data_ptr()

    def view_of(self, copy: RecordedCopy) -> torch.Tensor:
        """The copy's destination region in the buffers."""
        return copy.destination_view(self._buffers[copy.param_name])

    @torch.no_grad()
    def flip(self) -> None:
        """Exchange what lies in the shadow and what is visible; does nothing in place."""
        if self._blocks is None:
            self._blocks = self._make_blocks()
        for live, shadow, scratch in self._blocks:
            scratch.copy_(live)
            live.copy_(shadow)
            shadow.copy_(scratch)

    def _make_blocks(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(live, shadow, scratch) of every region, cut along its first dimension."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for copy in self._flipped:
            live, shadow = copy.destination_view(self._live[copy.param_name]), self.view_of(copy)
            if live.numel() == 0:
                continue
            if live.dim() == 0:
                live, shadow = live.unsqueeze(0), shadow.unsqueeze(0)
            rows = max(1, _BLOCK_BYTES * live.shape[0] // live.nbytes)
            pairs += zip(live.split(rows), shadow.split(rows), strict=True)
        largest: dict[tuple[torch.dtype, torch.device], int] = {}
        for live, _ in pairs:
            key = live.dtype, live.device
            largest[key] = max(largest.get(key, 0), live.numel())
        scratch = {key: torch.empty(numel, dtype=key[0], device=key[1]) for key, numel in largest.items()}
        return [
            (live, shadow, scratch[live.dtype, live.device][: live.numel()].view(live.shape)) for live, shadow in pairs
        ]


def _mirror(tensor: torch.Tensor) -> torch.Tensor:
    """Dense memory with the same shape and strides, touched, so that the first pull is not slower."""
    if tensor.numel() == 0:
        return torch.empty_like(tensor)
    flat = torch.zeros(span_of(tensor.shape, tensor.stride()), dtype=tensor.dtype, device=tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride())


def distinct_copies(
    copies: Sequence[RecordedCopy], canonical: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> list[RecordedCopy]:
    """Aliases resolved and repeats dropped: every destination region is written by exactly one copy.

    Tied weights reach a worker under several names, and an engine that ties them loads the same memory twice;
    identical (source, chain, memory) is moved once.

    Raises:
        InvalidLayoutError: two different copies write the same memory, wholly or in part (I1).
    """
    kept: dict[tuple[object, ...], RecordedCopy] = {}
    for copy in copies:
        source = canonical[copy.src_name]
        tensor = tensors[copy.param_name]
        region = (
            tensor.data_ptr() + copy.dest_offset * tensor.element_size(),
            copy.dest_shape,
            copy.dest_stride,
            copy.dest_dtype,
        )
        known = kept.get(region)
        if known is None:
            kept[region] = replace(copy, src_name=source)
        elif (known.src_name, known.op_chain) != (source, copy.op_chain):
            raise InvalidLayoutError(
                f"{copy.param_name}: {known.src_name} and {copy.src_name} are both loaded into elements "
                f"{copy.dest_offset}.. of shape {copy.dest_shape}; the worker's loader contradicts itself"
            )
    distinct = list(kept.values())
    shared = find_shared_bytes([_memory(copy, tensors[copy.param_name]) for copy in distinct])
    if shared is not None:
        one, other = (distinct[index] for index in shared)
        raise InvalidLayoutError(
            f"{one.src_name} into {one.param_name} and {other.src_name} into {other.param_name} write some of the same "
            "memory; every byte must come from one place, so load one of them only"
        )
    return distinct


def _memory(copy: RecordedCopy, tensor: torch.Tensor) -> MemoryRegion:
    size = tensor.element_size()
    return MemoryRegion(tensor.data_ptr() + copy.dest_offset * size, copy.dest_shape, copy.dest_stride, size)
