"""RESULTS.md, from the JSON of a bench and nothing else. Rendering only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from weightsync.service.bench.results import REFERENCE, BenchResult, CaseResult
from weightsync.service.bench.statistics import paired_ratio
from weightsync.service.bench.view import HEADINGS, cells, facts_line, notes

_SECTIONS = {
    "ways": "All ways, side by side",
    "sizes": "Model size",
    "consumers": "Number of workers",
    "producers": "Number of trainer ranks",
    "runs": "Run size",
    "strategies": "What the cost model chooses, against each strategy forced",
}
_SUBJECT = "weightsync live, in place"


Tables = Mapping[str, Sequence[Mapping[str, object]]]
"""Tables of rows that share their keys, by title."""


def render_markdown(result: BenchResult, tables: Tables | None = None, plot: str | None = None) -> str:
    """The whole document.

    Args:
        tables: more of them, for the end.
        plot: name of a picture beside the document.
    """
    lines = [
        "# Benchmark results",
        "",
        f"Written by `{result.command}` on {result.started.replace('T', ' ').replace('+00:00', ' UTC')}, "
        f"in {result.seconds:.0f} s. Do not edit; run it again.",
        "",
        "Ways take turns in each round, in an order that is rotated; before each turn's measured moves there is one "
        "that is not counted. Every move carries new values, and every byte that arrives is checked. Figures are "
        f"medians with their quartiles; *of bare* is the speed as a share of `{REFERENCE}` in the same round, so 1.00 "
        "is the limit. Speeds are of all workers together, from the driver's call until every worker holds the "
        "version. *Memory* is what a way holds beyond the tensors of trainers and workers, its processes "
        "included.",
        "",
        *([f"![throughput]({plot})", ""] if plot else []),
        *_table(("machine", ""), result.machine.items()),
        *_table(("package", "version"), result.packages.items()),
    ]
    for section, title in _SECTIONS.items():
        cases = [case for case in result.cases if case.case.section == section]
        if cases:
            lines += [f"## {title}", ""]
            lines += {"ways": _by_case, "strategies": _choices}.get(section, partial(_overview, section))(cases)
    if result.refused or result.failures:
        lines += ["## Not measured, or failed", ""]
        lines += [f"- {line}" for line in (*result.refused, *result.failures)]
        lines.append("")
    for title, rows in (tables or {}).items():
        lines += [f"## {title}", "", *_rows_as_table(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _by_case(cases: Sequence[CaseResult]) -> list[str]:
    """A table per case, and how many times as long as weightsync each way takes."""
    lines = []
    for case in cases:
        headings, rows = list(HEADINGS), [cells(case, row) for row in case.rows]
        if case.row(_SUBJECT) is not None:
            headings.append("times as long as ours")
            for line, row in zip(rows, case.rows, strict=True):
                slower = case.slower_than(row, _SUBJECT)
                line.append("-" if slower is None else f"{slower.median:.2f} ({slower.p25:.2f}-{slower.p75:.2f})")
        lines += [f"### {case.case.title}", "", facts_line(case) + ".", "", *_table(headings, rows)]
        lines += [f"- {note}" for note in notes(case)]
        lines += [""] if notes(case) else []
    return lines


def _overview(section: str, cases: Sequence[CaseResult]) -> list[str]:
    """A line per case, and for each way its speed and its share of bare reads."""
    labels = list(dict.fromkeys(row.label for case in cases for row in case.rows))
    headings = ["case"]
    for label in labels:
        headings.append(f"{label}, GB/s")
        if section == "consumers":
            headings.append("per worker")
        if label != REFERENCE:
            headings.append("of bare")
    table = []
    for case in cases:
        line = [case.case.title]
        for label in labels:
            row = case.row(label)
            speed = None if row is None else case.gbytes_per_second(row)
            share = None if row is None else case.share_of_reference(row)
            line.append("-" if speed is None else f"{speed.median:.2f} ({speed.p25:.2f}-{speed.p75:.2f})")
            if section == "consumers":
                line.append("-" if speed is None else f"{speed.median / case.case.consumers:.2f}")
            if label != REFERENCE:
                line.append("-" if share is None else f"{share.median:.2f} ({share.p25:.2f}-{share.p75:.2f})")
        table.append(line)
    lines = _table(headings, table)
    lines += [f"- {case.case.title}: {note}" for case in cases for note in notes(case)]
    return [*lines, ""] if lines[-1] else lines


def _choices(cases: Sequence[CaseResult]) -> list[str]:
    """A line per case: every strategy's time over the best one's, the chosen one's too, and how often it is close."""
    forced = [f"weightsync live, {strategy}" for strategy in ("direct", "packed", "span")]
    table, chosen = [], []
    for case in cases:
        rows = [row for label in forced if (row := case.row(label)) is not None]
        ours = case.row(_SUBJECT)
        if ours is None or not rows:
            continue
        best = min(rows, key=lambda row: row.time.median)
        ratios = {row.label: paired_ratio(row.seconds, best.seconds) for row in (ours, *rows)}
        over = {label: ratio.median for label, ratio in ratios.items() if ratio is not None}
        if _SUBJECT not in over:
            continue
        chosen.append(over[_SUBJECT])
        share = case.share_of_reference(ours)
        table.append(
            [
                case.case.title,
                best.label.rpartition(" ")[2],
                *(f"{over[label]:.2f}" if label in over else "-" for label in (*forced, _SUBJECT)),
                "-" if share is None else f"{share.median:.2f}",
            ]
        )
    lines = _table(["case", "best", "direct", "packed", "span", "chosen", "chosen, of bare"], table)
    lines += [f"- {case.case.title}: {note}" for case in cases for note in notes(case)]
    close = sum(ratio <= 1.1 for ratio in chosen)
    worst = max(chosen, default=1.0)
    return [*lines, f"Within 10 % of the best in {close} of {len(chosen)} cases; at worst {worst:.2f} times it.", ""]


def _rows_as_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Rows that share their keys."""
    headings = list(dict.fromkeys(key for row in rows for key in row))
    return _table(
        [heading.replace("_", " ") for heading in headings], [[_cell(row.get(h)) for h in headings] for row in rows]
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "" if value is None else str(value)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(parts: Sequence[str]) -> str:
        return "| " + " | ".join(part.replace("|", "\\|") for part in parts) + " |"

    return [line(headings), line(["---"] * len(headings)), *map(line, rows), ""]
