"""A recorded copy: one copy an engine's own loader does, as data.

Offsets and strides are in elements of the destination parameter and start at the parameter's first element,
which need not be the first of its storage.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

OpChain = tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
"""Pure views applied in order: (op name, positional arguments, keyword arguments sorted by name)."""


@dataclass(frozen=True)
class RecordedCopy:
    """`destination_view(param).copy_(replay(source, op_chain))`, without the data.

    `module` is whoever owns the parameter (an `nn.Module` when recorded); `param_name` is the parameter's name
    in it.
    """

    src_name: str
    op_chain: OpChain
    param_name: str
    dest_offset: int
    dest_shape: tuple[int, ...]
    dest_stride: tuple[int, ...]
    dest_dtype: torch.dtype
    module: Hashable | None = None

    def destination_view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The region of `parameter` that this copy writes.

        Raises:
            ValueError: `parameter` has another dtype than the one recorded.
        """
        if parameter.dtype != self.dest_dtype:
            raise ValueError(f"{self.param_name} was recorded as {self.dest_dtype} and is {parameter.dtype} now")
        return parameter.as_strided(self.dest_shape, self.dest_stride, parameter.storage_offset() + self.dest_offset)

    @property
    def numel(self) -> int:
        """Elements written."""
        return torch.Size(self.dest_shape).numel()
