"""Which way a set of runs travels fastest: a few measured constants, and three ways to add them up.

    direct   a descriptor per run, from the trainer's memory to where the parameter wants it
    span     a descriptor per span (runs and the gaps between them) into a bounce buffer, then scattered here
    packed   the producer packs the runs, one descriptor brings them into a bounce buffer, then scattered here

The thing to watch: seconds are those of one consumer on one link, and the reading side does the work, as it does
with host memory; a producer packs for its consumers one after another, so packing counts once per consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np

from weightsync.protocol.boxes import Ints


class Strategy(StrEnum):
    """How the bytes of a chunk travel."""

    DIRECT = "direct"
    PACKED = "packed"
    SPAN = "span"


@dataclass(frozen=True)
class MoveCosts:
    """Strided copies within one memory: bytes per second, and seconds per run on top.

    The defaults are those of one core of a small server (measured: rows of 2 KiB at 5 GB/s).
    """

    bytes_per_s: float = 6e9
    run_s: float = 40e-9

    def seconds(self, runs: int, nbytes: int) -> float:
        """To pack or scatter this."""
        return runs * self.run_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class LinkCosts:
    """One pair of nodes and one kind of memory.

    The defaults are host memory within one node, read through UCX (measured: large runs at 4.5 GB/s, 6 us for each
    separated run, 2 ms for a question and an answer between actors).
    """

    bytes_per_s: float = 4.5e9
    descriptor_s: float = 6e-6
    control_s: float = 2e-3
    pack_bytes_per_s: float = MoveCosts.bytes_per_s
    pack_run_s: float = MoveCosts.run_s
    scatter_bytes_per_s: float = MoveCosts.bytes_per_s
    scatter_run_s: float = MoveCosts.run_s
    measured: bool = False
    """False for defaults, or where a value was set by hand."""

    @property
    def descriptor_bytes(self) -> float:
        """Reading so many bytes takes as long as one more descriptor."""
        return self.descriptor_s * self.bytes_per_s

    @property
    def pack(self) -> MoveCosts:
        return MoveCosts(self.pack_bytes_per_s, self.pack_run_s)

    @property
    def scatter(self) -> MoveCosts:
        return MoveCosts(self.scatter_bytes_per_s, self.scatter_run_s)

    def without_packing(self) -> LinkCosts:
        """So dear to pack that nothing is packed."""
        return replace(self, pack_bytes_per_s=1e-3)

    def overridden(self, values: Mapping[str, float]) -> LinkCosts:
        """With some values set by hand.

        Raises:
            ValueError: no such cost, or not a positive number; names it.
        """
        known = {field.name for field in fields(self)} - {"measured"}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"no cost is called {name!r}; there are {', '.join(sorted(known))}")
            if not value > 0:
                raise ValueError(f"cost {name} must be above 0, got {value}")
        given: dict[str, Any] = {name: float(value) for name, value in values.items()}
        return replace(self, **given)


@dataclass(frozen=True)
class RunShape:
    """What the model reads of a set of runs: how many, of how many bytes, and of the spans that cover them."""

    runs: int
    nbytes: int
    spans: int
    span_bytes: int

    @classmethod
    def of(cls, nbytes: Ints, starts: Ints, ends: Ints) -> RunShape:
        """Of runs of `nbytes`, covered by spans from `starts` to `ends`."""
        return cls(len(nbytes), int(nbytes.sum()), len(starts), int((ends - starts).sum()))


def spans(src: Ints, nbytes: Ints, costs: LinkCosts) -> tuple[Ints, Ints]:
    """(starts, ends) of spans that cover the runs: a gap is read along where that is cheaper than a descriptor.

    >>> spans(np.array([0, 10, 900000]), np.array([4, 4, 4]), LinkCosts())
    (array([     0, 900000]), array([    14, 900004]))
    """
    order = np.argsort(src, kind="stable")
    starts, ends = src[order], np.maximum.accumulate((src + nbytes)[order])
    if len(starts) < 2:
        return starts, ends
    cut = np.flatnonzero(starts[1:] - ends[:-1] > costs.descriptor_bytes) + 1
    first = np.concatenate([[0], cut])
    last = np.concatenate([cut, [len(starts)]]) - 1
    return starts[first], ends[last]


def predict(strategy: Strategy, shape: RunShape, costs: LinkCosts, consumers: int = 1) -> float:
    """Seconds one consumer spends on these runs.

    Args:
        consumers: that ask the same producer; it packs for one after another while the others wait.
    """
    if strategy is Strategy.DIRECT:
        return shape.runs * costs.descriptor_s + shape.nbytes / costs.bytes_per_s
    scatter = costs.scatter.seconds(shape.runs, shape.nbytes)
    if strategy is Strategy.SPAN:
        return shape.spans * costs.descriptor_s + shape.span_bytes / costs.bytes_per_s + scatter
    packing = max(consumers, 1) * costs.pack.seconds(shape.runs, shape.nbytes)
    return packing + costs.descriptor_s + shape.nbytes / costs.bytes_per_s + scatter


def choose(shape: RunShape, costs: LinkCosts, consumers: int = 1) -> Strategy:
    """The strategy with the smallest prediction; direct where nothing else is clearly better."""
    return min(Strategy, key=lambda strategy: (predict(strategy, shape, costs, consumers), strategy))
