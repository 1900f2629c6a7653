"""Where pulled bytes land at a worker: in the live tensors, or beside them until the flip.

Shadow memory mirrors each destination tensor element for element, so that a plan made for one fits the other
and only base addresses differ. The flip copies shadow into live: addresses of live tensors never change, which
compiled graphs, captured CUDA graphs and views of fused weights rely on. The thing to watch: only elements
that some recorded copy writes are flipped; padding that no weight fills keeps what the engine put there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.messages import InstallMode


class Destinations:
    """Memory of one worker that pulls write to.

    Args:
        live: qualified name -> live tensor.
        copies: what the worker's loader writes; decides which tensors get a shadow.
        install: shadow or in_place.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], copies: Sequence[RecordedCopy], install: InstallMode) -> None:
        self._live = {copy.param_name: live[copy.param_name].detach() for copy in copies}
        self._copies = list(copies)
        self._install = install
        self._buffers = self._live
        if install is InstallMode.SHADOW:
            self._buffers = {name: _mirror(tensor) for name, tensor in self._live.items()}

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
        """Make what lies in the shadow visible; does nothing in place."""
        if self._install is InstallMode.IN_PLACE:
            return
        for copy in self._copies:
            copy.destination_view(self._live[copy.param_name]).copy_(self.view_of(copy))


def _mirror(tensor: torch.Tensor) -> torch.Tensor:
    """Dense memory with the same shape and strides, touched, so that the first pull is not slower."""
    if tensor.numel() == 0:
        return torch.empty_like(tensor)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.zeros(span, dtype=tensor.dtype, device=tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride())


def distinct_copies(
    copies: Sequence[RecordedCopy], canonical: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> list[RecordedCopy]:
    """Aliases resolved and repeats dropped: every destination region is written by exactly one copy.

    Tied weights reach a worker under several names, and an engine that ties them loads the same memory twice;
    identical (source, chain, memory) is moved once.

    Raises:
        InvalidLayoutError: two different copies write the same memory.
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
    return list(kept.values())
