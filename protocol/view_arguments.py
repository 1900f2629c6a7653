"""Arguments of recorded views as data: hashable, picklable, and nothing but geometry.

The thing to watch: chains arrive from other processes and may be hostile. What is not an integer, a slice,
None, Ellipsis, a dtype or a flat tuple of those is refused, by type, before anything is called with it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

MAX_CHAIN = 64
"""Ops per chain and arguments per op; real loaders take a handful, hostile ones would take more."""


class FrozenSlice(NamedTuple):
    """A slice that hashes (before Python 3.12 slices do not)."""

    start: int | None
    stop: int | None
    step: int | None


def freeze_args(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if op == "__getitem__" and len(args) == 1 and isinstance(args[0], list):
        raise ValueError("indexing by a list selects by value")
    return tuple(freeze(arg) for arg in args)


def freeze(value: Any, depth: int = 0) -> Any:
    """A hashable, picklable form of an argument; refuses all that is not pure geometry."""
    if value is None or value is Ellipsis or isinstance(value, torch.dtype) or type(value) is int:
        return value
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        if all(part is None or type(part) is int for part in parts):
            return FrozenSlice(*parts)
        raise ValueError(f"a slice of {parts}")
    if isinstance(value, FrozenSlice):
        return value
    if isinstance(value, tuple | list) and depth == 0:
        return tuple(freeze(item, 1) for item in value)
    raise ValueError(f"an argument of type {type(value).__name__}")


def thaw_entry(entry: Any, allowed: Collection[str]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(entry, tuple | list) or len(entry) != 3:
        raise ValueError(f"a chain entry is (op, args, kwargs), got {brief(entry)}")
    op, args, kwargs = entry
    if not isinstance(op, str) or op not in allowed:
        raise ValueError(f"{brief(op)} is not a view that may be replayed; allowed are {sorted(allowed)}")
    if not isinstance(args, tuple | list) or not isinstance(kwargs, tuple | list):
        raise ValueError(f"arguments of {op} must be tuples, got {brief(args)} and {brief(kwargs)}")
    if len(args) > MAX_CHAIN or len(kwargs) > MAX_CHAIN:
        raise ValueError(f"{op} has more than {MAX_CHAIN} arguments")
    named: dict[str, Any] = {}
    for item in kwargs:
        if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
            raise ValueError(f"keyword arguments of {op} must be (name, value) pairs, got {brief(item)}")
        named[item[0]] = _thaw(item[1])
    return op, tuple(_thaw(arg) for arg in args), named


def _thaw(value: Any) -> Any:
    frozen = freeze(value)
    if isinstance(frozen, FrozenSlice):
        return slice(*frozen)
    if isinstance(frozen, tuple):
        return tuple(slice(*item) if isinstance(item, FrozenSlice) else item for item in frozen)
    return frozen


def brief(value: Any) -> str:
    text = f"{type(value).__name__}" if not isinstance(value, str) else repr(value)
    return text[:80]
