"""Durations, times and names as people read them.

The thing to watch: `page.js` says durations and bytes in the same words, because it rewrites in place what was
rendered here; a test in a browser compares them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

_STEPS = ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h"))


def duration(seconds: float) -> str:
    """One number and one unit: `0.4 ms`, `12 ms`, `2.3 s`, `42 s`, `5 min`, `3 h`, `4 d`."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.001 else f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for limit, size, unit in _STEPS:
        if seconds < limit:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds // 86400)} d"


def age(seconds: float) -> str:
    """How long ago, in whole seconds at least; clocks differ, so a moment ahead is now."""
    if seconds < 1:
        return "just now"
    return f"{int(seconds)} s ago" if seconds < 10 else f"{duration(seconds)} ago"


def stamp(time: float) -> str:
    """For the `datetime` of a <time>; `time` is seconds since 1970."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(time: float) -> str:
    """Such as `12-01 10:04:05 UTC`; `time` is seconds since 1970."""
    return datetime.fromtimestamp(time, UTC).strftime("%m-%d %H:%M:%S UTC")


def counted(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first few names, and how many there are besides."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts w2 before w10. Digits are read in pieces that Python turns into a number, however many a name has."""
    parts = re.split(r"(\d{1,18})", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part)
