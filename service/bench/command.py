"""`weightsync bench`: from options to cases, to a run, to what is printed and written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import ray
from rich.console import Console

from weightsync.protocol.errors import WeightsyncError
from weightsync.service.bench.cases import LARGEST, LARGEST_RUN, MAX_MEMBERS, SMALLEST, SMALLEST_RUN, Case, grid, suite
from weightsync.service.bench.kept import Kept
from weightsync.service.bench.plot import check_plot_file, write_plot
from weightsync.service.bench.quantities import format_size, parse_bytes, parse_counts, parse_list
from weightsync.service.bench.results import BenchResult
from weightsync.service.bench.run import run_bench
from weightsync.service.bench.view import progress_bar, render
from weightsync.service.bench.ways import all_ways
from weightsync.service.interrupts import Interrupts


def bench_command(
    *,
    suite_name: str | None,
    sizes: str,
    producers: str,
    consumers: str,
    tensor_parallel: int | None,
    run_sizes: str,
    ways: str,
    rounds: int | None,
    repeats: int,
    plot: Path | None,
    json_output: bool,
) -> int:
    """Run the command; returns the process exit code (0 measured and right, 1 something failed, 130 interrupted).

    Raises:
        ValueError: an option cannot be meant; nothing was started.
    """
    if plot is not None:
        check_plot_file(plot)
    keys = _chosen_ways(ways)
    if suite_name is not None:
        chosen = (_with(case, keys if ways else case.ways, rounds) for case in suite(suite_name, keys))
        cases = [case for case in chosen if case.ways]
    else:
        cases = grid(
            sizes=[_size(part) for part in parse_list(sizes)],
            producers=parse_counts(producers, 1, MAX_MEMBERS, "--producers"),
            consumers=parse_counts(consumers, 1, MAX_MEMBERS, "--consumers"),
            tensor_parallel=tensor_parallel,
            run_sizes=[_run_size(part) for part in parse_list(run_sizes)],
            ways=keys,
            rounds=rounds or 5,
            repeats=repeats,
        )
    interrupts = Interrupts()
    try:
        result = measure(cases, interrupts)
    except (KeyboardInterrupt, WeightsyncError, ray.exceptions.RayError) as error:
        if not interrupts.caused(error):
            raise
        Console(stderr=True).print("Interrupted: everything stopped.")
        return 130
    if json_output:
        sys.stdout.write(result.model_dump_json(indent=2) + "\n")
    else:
        Console(highlight=False).print(render(result))
    if plot is not None:
        write_plot(result, plot)
    for failure in result.failures:
        Console(stderr=True, highlight=False).print(f"[red]failed:[/] {failure}", soft_wrap=True)
    return 0 if result.ok else 1


def measure(
    cases: Sequence[Case], interrupts: Interrupts, command: str | None = None, kept: Kept | None = None
) -> BenchResult:
    """`run_bench` with a bar on standard error, and nothing from libraries on standard output."""
    with interrupts.raised(), contextlib.redirect_stdout(sys.stderr):
        with progress_bar(sum(case.rounds * len(case.ways) for case in cases)) as progress:
            return run_bench(cases, interrupts=interrupts, command=command, progress=progress, kept=kept)


def _with(case: Case, keys: Sequence[str], rounds: int | None) -> Case:
    chosen = tuple(key for key in case.ways if key in keys)
    return case.model_copy(update={"ways": chosen, "rounds": rounds or case.rounds})


def _chosen_ways(text: str) -> list[str]:
    known = list(all_ways())
    chosen = parse_list(text) or known
    unknown = [key for key in chosen if key not in known]
    if unknown:
        raise ValueError(f"no way {unknown[0]!r}; there are {', '.join(known)}")
    return [key for key in known if key in chosen]


def _size(text: str) -> int:
    return _within(text, SMALLEST, LARGEST, "sizes")


def _run_size(text: str) -> int:
    return _within(text, SMALLEST_RUN, LARGEST_RUN, "run sizes")


def _within(text: str, low: int, high: int, what: str) -> int:
    nbytes = parse_bytes(text)
    if not low <= nbytes <= high:
        raise ValueError(f"{what} go from {format_size(low)} to {format_size(high)}; got {text!r}")
    return nbytes
