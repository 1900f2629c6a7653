"""Sizes as people write them: `16MB`, `64KiB`, `4GB`, `512`."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 16MB (decimal) or 64KiB (binary).

    Raises:
        ValueError: it is not one.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = found.group(2).upper() if found else None
    if found is None or unit not in _UNITS:
        raise ValueError(f"a size is a number and a unit, such as 16MB or 64KiB; got {text!r}")
    return round(float(found.group(1)) * _UNITS[unit])


def parse_list(text: str) -> list[str]:
    """The parts of a comma-separated list; empty ones are left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_counts(text: str, low: int, high: int, what: str) -> list[int]:
    """Whole numbers of a comma-separated list, each within [low, high].

    Raises:
        ValueError: one is not.
    """
    parts = parse_list(text)
    if not parts or not all(part.isdigit() and low <= int(part) <= high for part in parts):
        raise ValueError(f"{what}: whole numbers from {low} to {high}, separated by commas; got {text!r}")
    return [int(part) for part in parts]


def format_size(nbytes: int) -> str:
    """Binary where it is round, decimal otherwise: 64 KiB, 1 GB, 128 MB."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0 and nbytes % 1000:
            return f"{nbytes // size} {unit}"
    for unit, size in (("GB", 1000**3), ("MB", 1000**2), ("kB", 1000)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"
