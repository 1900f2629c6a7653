"""How a doctor's report looks in a terminal. Rendering only."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightsync.service.doctor.report import Check, DoctorReport, Finding, NodeReport, PairReport

_STYLES = {Finding.OK: "green", Finding.WARNING: "yellow", Finding.PROBLEM: "bold red", Finding.SKIPPED: "dim"}


def render(report: DoctorReport) -> RenderableType:
    """The cluster, one table per node, pairs, services, and a line that sums up. Fits a terminal of 80 columns."""
    parts: list[RenderableType] = [_checks("cluster", report.checks)]
    parts += [_checks(_node_title(node), node.checks) for node in report.nodes]
    if report.pairs:
        parts.append(_pairs(report.pairs))
    if report.services:
        parts.append(_checks("services", report.services))
    return Group(*parts, summary(report))


def summary(report: DoctorReport) -> Text:
    """How many problems and warnings there are, and how long it took."""
    problems, warnings = report.count(Finding.PROBLEM), report.count(Finding.WARNING)
    style = _STYLES[Finding.PROBLEM if problems else Finding.WARNING if warnings else Finding.OK]
    counted = f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}"
    return Text(f"{counted}; {report.count(Finding.OK)} ok, {report.seconds:.0f} s", style=style)


def _node_title(node: NodeReport) -> str:
    start = node.node_id[:8]
    return f"node {node.host}" + ("" if start in node.host else f" ({start})")


def _checks(title: str, checks: Iterable[Check]) -> Table:
    table = _table(title)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        table.add_row(check.title, _status(check.status), _found(check.detail, check.remedy))
    return table


def _pairs(pairs: Iterable[PairReport]) -> Table:
    table = _table("one-sided reads: `to` reads what `from` registered")
    for heading in ("from", "to", "status"):
        table.add_column(heading, no_wrap=heading == "status", overflow="fold")
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("us per run", justify="right", no_wrap=True)
    table.add_column("found", overflow="fold")
    for pair in pairs:
        measured = pair.measured
        table.add_row(
            pair.source_host,
            pair.target_host,
            _status(pair.status),
            "" if measured.bytes_per_s is None else f"{measured.bytes_per_s / 1e9:.2f}",
            "" if measured.descriptor_s is None else f"{1e6 * measured.descriptor_s:.2f}",
            _found(pair.verdict, pair.remedy),
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=None, padding=(0, 2, 0, 0), pad_edge=False, title_justify="left", title_style="bold")


def _status(status: Finding) -> Text:
    return Text(status.value, style=_STYLES[status])


def _found(detail: str, remedy: str) -> Text:
    return Text(detail) if not remedy else Text.assemble(detail, ("\nto do: ", "bold"), remedy)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
