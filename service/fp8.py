"""Targets that hold block-scaled fp8 weights, whatever the trainer publishes.

The convention is that of DeepSeek-V3's checkpoints: `name` in float8_e4m3fn and `name_scale_inv` in float32 with one
entry per block of 128 x 128, so that weight = fp8 * scale_inv. A trainer that publishes both in fp8 has them delivered
as they are; one that publishes `name` in a wider dtype has it quantised here, at install, weights and scales together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.service.targets import StateDictTarget

FP8 = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"


class Fp8BlockTarget(StateDictTarget):
    """Plain tensors by published name, some of them in block-scaled fp8.

    Args:
        tensors: name -> tensor, written in place; for each two-dimensional float8_e4m3fn `name` also
            `name_scale_inv`, float32, (ceil(rows / block[0]), ceil(columns / block[1])).
        block: rows and columns that share a scale.

    Raises:
        InvalidLayoutError: an fp8 weight without scales, or with scales of another shape.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], block: tuple[int, int] = (128, 128)) -> None:
        super().__init__(tensors)
        self._block = block
        self._wide: dict[str, torch.Tensor] = {}
        """What is quantised at install, in the dtype it was published in."""
        for name, tensor in self._tensors.items():
            if tensor.dtype is FP8:
                self._check_scales(name, tensor)

    def record(self, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> Sequence[RecordedCopy]:
        wide = {
            name: dtype_from_name(manifest[name][0])
            for name, tensor in self._tensors.items()
            if tensor.dtype is FP8 and name in manifest and dtype_from_name(manifest[name][0]) is not FP8
        }
        self._wide = {
            name: torch.zeros(self._tensors[name].shape, dtype=dtype, device=self._tensors[name].device)
            for name, dtype in wide.items()
        }
        made_here = {name + SCALE_SUFFIX for name in wide}
        return StateDictTarget(
            {name: tensor for name, tensor in self.tensors().items() if name not in made_here}
        ).record(manifest)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {**self._tensors, **self._wide}

    def unseen(self) -> frozenset[str]:
        return frozenset(self._wide)

    @torch.no_grad()
    def install(self) -> None:
        for name, wide in self._wide.items():
            weight, scales = quantise(wide, self._block)
            self._tensors[name].copy_(weight)
            self._tensors[name + SCALE_SUFFIX].copy_(scales)

    def _check_scales(self, name: str, weight: torch.Tensor) -> None:
        scales = self._tensors.get(name + SCALE_SUFFIX)
        expected = tuple(-(-size // width) for size, width in zip(weight.shape, self._block, strict=False))
        if weight.dim() != 2 or scales is None or tuple(scales.shape) != expected or scales.dtype != torch.float32:
            found = "none" if scales is None else f"{scales.dtype} of shape {tuple(scales.shape)}"
            raise InvalidLayoutError(
                f"{name!r} is fp8 of shape {tuple(weight.shape)} and needs {name + SCALE_SUFFIX!r}, float32 of shape "
                f"{expected} for blocks of {self._block}; there is {found}"
            )


def quantise(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-scaled fp8 of a weight.

    Args:
        weight: (rows, columns), any floating dtype.
        block: rows and columns that share a scale; the last blocks may be smaller.

    Returns:
        The weight in float8_e4m3fn, and float32 scales (blocks of rows, blocks of columns) to multiply it with. The
        largest magnitude of a block becomes 448, the largest float8_e4m3fn; a block of zeros has scale 1.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))  # (row block, row, column block, column)
    largest = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, largest / torch.finfo(FP8).max, 1.0)
    limit = torch.finfo(FP8).max
    scaled = (blocks / scales[:, None, :, None]).clamp(-limit, limit)
    return scaled.flatten(2).flatten(0, 1)[:rows, :columns].to(FP8), scales
