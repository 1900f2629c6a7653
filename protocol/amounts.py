"""Sizes in words, the same wherever people read them: errors, `status --why`, tables, the page."""

from __future__ import annotations


def format_bytes(nbytes: float) -> str:
    """Decimal units, as links are rated in.

    Example:
        >>> format_bytes(4016)
        '4.0 kB'
    """
    for unit in ("B", "kB", "MB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"
