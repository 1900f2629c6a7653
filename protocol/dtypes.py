"""Names of dtypes as they travel: "bfloat16", with or without a leading "torch."."""

from __future__ import annotations

import torch


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype called `name` ("bfloat16" or "torch.bfloat16").

    Raises:
        ValueError: torch has no dtype of that name.
    """
    if not isinstance(name, str):
        raise ValueError(f"a dtype name is a string such as 'bfloat16', got {name!r}")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype called {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the leading "torch."."""
    return str(dtype).removeprefix("torch.")
