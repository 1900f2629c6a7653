"""How a bench looks in a terminal: a bar while it runs, tables afterwards. Rendering only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from weightsync.protocol.amounts import format_bytes
from weightsync.service.bench import run as bench
from weightsync.service.bench.results import BenchResult, CaseResult, Row
from weightsync.service.bench.statistics import Spread

HEADINGS = ("way", "s", "GB/s", "of bare", "p25-p75", "memory")


def cells(result: CaseResult, row: Row) -> list[str]:
    """One line of a case's table, under `HEADINGS`."""
    speed, share = result.gbytes_per_second(row), result.share_of_reference(row)
    return [
        row.label,
        f"{row.time.median:.4f}" if row.time.median < 0.1 else f"{row.time.median:.3f}",
        f"{speed.median:.2f}",
        "-" if share is None else f"{share.median:.2f}",
        "-" if share is None else _range(share),
        "-" if row.extra_bytes is None else format_bytes(max(0, row.extra_bytes)),
    ]


def notes(result: CaseResult) -> list[str]:
    """What was left out or went wrong, a line each."""
    return [f"skipped {skip.way}: {skip.reason}" for skip in result.skipped] + [
        f"failed {failure}" for failure in result.failures
    ]


def facts_line(result: CaseResult) -> str:
    layout, case = result.layout, result.case
    workers, runs = _plural(case.consumers, "worker"), _plural(layout.runs, "run")
    return (
        f"{format_bytes(layout.moved_nbytes)} to {workers} in {runs} of {_plural(layout.tensors, 'tensor')}; "
        f"{_plural(case.rounds, 'round')} of {_plural(case.repeats, 'move')}"
    )


def render(result: BenchResult) -> RenderableType:
    """A table per case."""
    parts: list[RenderableType] = []
    for case in result.cases:
        table = Table(*HEADINGS, title=case.case.title, title_justify="left", box=None, pad_edge=False)
        for row in case.rows:
            table.add_row(*cells(case, row))
        parts += [
            table,
            Text(facts_line(case), style="dim"),
            *(Text(note, style="yellow") for note in notes(case)),
            Text(""),
        ]
    parts += [Text(f"not measured: {line}", style="yellow") for line in result.refused]
    return Group(*parts)


@contextmanager
def progress_bar(total_turns: int) -> Iterator[bench.Progress]:
    """A bar on standard error; yields what `run_bench` reports to."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=total_turns)
        yield lambda text, turns: bar.update(task, description=text, advance=turns)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _range(spread: Spread) -> str:
    return f"{spread.p25:.2f}-{spread.p75:.2f}"
