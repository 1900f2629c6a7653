"""What is measured: cases, and the suites that `--suite` names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal

from pydantic import BaseModel, ConfigDict

from weightsync.service.bench.layout import Layout, gapped_layout, model_layout
from weightsync.service.bench.quantities import format_size

MB = 1000**2
MAX_MEMBERS = 8
SMALLEST, LARGEST = 16 * MB, 4000 * MB
SMALLEST_RUN, LARGEST_RUN = 512, 8 << 20
RUN_SIZES = tuple(512 << (2 * i) for i in range(8))
"""512 B, 2 KiB, 8 KiB, ... 8 MiB."""
OURS = ("live", "live-in-place")

FORCED = ("live-direct", "live-packed", "live-span")
"""The strategies that the cost model chooses between, each forced."""

Section = Literal["ways", "sizes", "consumers", "producers", "runs", "strategies"]


class Case(BaseModel):
    """One layout and the ways that take turns on it.

    `run_nbytes` makes it a case of separated runs, one to one, with gaps of `gap` runs; otherwise it is a model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    section: Section = "ways"
    nbytes: int
    producers: int = 1
    consumers: int = 1
    tensor_parallel: int = 1
    run_nbytes: int | None = None
    gap: float = 1.0
    ways: tuple[str, ...]
    rounds: int
    repeats: int = 1

    @property
    def title(self) -> str:
        if self.run_nbytes is not None:
            apart = "" if self.gap == 1 else f", gaps of {self.gap:g} runs"
            return f"{format_size(self.nbytes)} in separated runs of {format_size(self.run_nbytes)}{apart}"
        replicas = self.consumers // self.tensor_parallel
        workers = f"tensor parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else "whole"
        if self.tensor_parallel == 1 and self.consumers > 1:
            workers = f"{self.consumers} workers, each whole"
        elif replicas > 1:
            workers = f"{replicas} replicas of {workers}"
        ranks = f"{self.producers} row shards" if self.producers > 1 else "1 rank"
        return f"{format_size(self.nbytes)}, {ranks} to {workers}"

    def layout(self) -> Layout:
        """Raises ValueError if there is no such layout."""
        if self.run_nbytes is not None:
            return gapped_layout(self.nbytes, self.run_nbytes, self.gap)
        return model_layout(self.nbytes, self.producers, self.consumers, self.tensor_parallel)


def grid(
    *,
    sizes: Sequence[int],
    producers: Sequence[int],
    consumers: Sequence[int],
    tensor_parallel: int | None,
    run_sizes: Sequence[int],
    ways: Sequence[str],
    rounds: int,
    repeats: int,
) -> list[Case]:
    """Every combination; with run sizes, separated runs of the given sizes instead of models.

    Args:
        tensor_parallel: workers per replica; None takes as many as there are consumers.
    """
    if run_sizes:
        return [
            Case(section="runs", nbytes=size, run_nbytes=run, ways=tuple(ways), rounds=rounds, repeats=repeats)
            for size, run in product(sizes, run_sizes)
        ]
    section: Section = "ways"
    if len(sizes) > 1:
        section = "sizes"
    elif len(consumers) > 1:
        section = "consumers"
    elif len(producers) > 1:
        section = "producers"
    return [
        Case(
            section=section,
            nbytes=size,
            producers=p,
            consumers=c,
            tensor_parallel=tensor_parallel or c,
            ways=tuple(ways),
            rounds=rounds,
            repeats=repeats,
        )
        for size, p, c in product(sizes, producers, consumers)
    ]


def suite(name: str, all_ways: Sequence[str]) -> list[Case]:
    """`full` is what `make bench` runs (about 20 minutes on two cores), `quick` takes two minutes."""
    return _quick(tuple(all_ways)) if name == "quick" else _full(tuple(all_ways))


def _quick(all_ways: tuple[str, ...]) -> list[Case]:
    size, few = 64 * MB, ("bare", "live-in-place")
    return [
        Case(nbytes=size, producers=2, consumers=2, tensor_parallel=2, ways=all_ways, rounds=1, repeats=3),
        *(_sliced("consumers", size, (2, n), few, (1, 3)) for n in (1, 4)),
        *(_runs(size, run, few, (1, 3)) for run in (2048, 65536)),
    ]


def _full(all_ways: tuple[str, ...]) -> list[Case]:
    in_place = ("bare", "live-in-place")
    scaling = ("bare", "bare-one-run", *OURS, "staged")
    return [
        Case(nbytes=1000 * MB, ways=all_ways, rounds=3, repeats=3),
        Case(nbytes=1000 * MB, producers=2, consumers=2, tensor_parallel=2, ways=all_ways, rounds=3, repeats=2),
        *(Case(section="sizes", nbytes=n * MB, ways=scaling, rounds=3, repeats=5) for n in (16, 64, 256)),
        Case(section="sizes", nbytes=LARGEST, ways=scaling, rounds=3),
        *(_sliced("consumers", 256 * MB, (2, n), ("bare", *OURS), (3, 3)) for n in (1, 2, 4, 8)),
        Case(section="consumers", nbytes=256 * MB, producers=2, consumers=8, ways=in_place, rounds=3, repeats=3),
        *(_sliced("producers", 256 * MB, (n, 2), in_place, (3, 3)) for n in (1, 2, 4, 8)),
        *(_runs(128 * MB, run, in_place, (3, 3)) for run in RUN_SIZES),
        *_strategies(64 * MB),
    ]


def _strategies(nbytes: int) -> list[Case]:
    """Run sizes, gaps, and ways to cut a model: what the cost model chooses against what it could have chosen."""
    ways, times = ("bare", "live-in-place", *FORCED), (3, 3)
    return [
        *(
            _runs(nbytes, run, ways, times).model_copy(update={"section": "strategies", "gap": gap})
            for run, gap in product((512, 2048, 8192, 32768, 262144), (0.125, 1.0, 7.0))
        ),
        *(
            _sliced("strategies", nbytes, members, ways, times)
            for members in ((1, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4))
        ),
    ]


def _sliced(
    section: Section, nbytes: int, members: tuple[int, int], ways: tuple[str, ...], times: tuple[int, int]
) -> Case:
    """(trainer ranks, workers) with all workers in one tensor-parallel replica; (rounds, repeats)."""
    return Case(
        section=section,
        nbytes=nbytes,
        producers=members[0],
        consumers=members[1],
        tensor_parallel=members[1],
        ways=ways,
        rounds=times[0],
        repeats=times[1],
    )


def _runs(nbytes: int, run_nbytes: int, ways: tuple[str, ...], times: tuple[int, int]) -> Case:
    return Case(section="runs", nbytes=nbytes, run_nbytes=run_nbytes, ways=ways, rounds=times[0], repeats=times[1])
