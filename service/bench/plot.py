"""The figures of a bench as a picture: PNG or SVG by the file's extension. Needs the `bench` extra (matplotlib)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weightsync.service.bench.quantities import format_size
from weightsync.service.bench.results import REFERENCE, BenchResult, CaseResult

FORMATS = (".png", ".svg")
_AXES: dict[str, tuple[str, Callable[[CaseResult], int]]] = {
    "sizes": ("bytes of the model", lambda case: case.layout.model_nbytes),
    "consumers": ("workers", lambda case: case.case.consumers),
    "producers": ("trainer ranks", lambda case: case.case.producers),
    "runs": ("bytes of a run", lambda case: case.case.run_nbytes or 0),
}


def check_plot_file(path: Path) -> None:
    """Raises ValueError if no plot can be written there, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a plot is written as {' or '.join(FORMATS)}; got {path.name!r}")
    if not path.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {path.resolve().parent} to write {path.name} into")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"a plot needs the `bench` extra ({error}); run `pip install 'weightsync[bench]'`") from error


def write_plot(result: BenchResult, path: Path) -> None:
    """One panel per case of all ways, and one per sweep."""
    from matplotlib.figure import Figure

    panels: list[Callable[[Any], None]] = [
        partial(_bars, case=case) for case in result.cases if case.case.section == "ways" and case.rows
    ]
    for section, (label, value) in _AXES.items():
        for whole in (False, True):
            cases = [case for case in result.cases if case.case.section == section and case.rows]
            cases = [case for case in cases if _each_takes_all(case) is whole]
            if cases:
                panels.append(partial(_lines, cases=cases, value=value, label=label, whole=whole))
    figure = Figure(figsize=(9, 4.5 * max(1, len(panels))), layout="constrained")
    axes = figure.subplots(max(1, len(panels)), squeeze=False)
    for draw, (ax,) in zip(panels, axes, strict=False):
        draw(ax)
    figure.suptitle(f"weightsync bench, {result.machine.get('CPU', '')}, {result.started[:10]}", fontsize=9)
    figure.savefig(path)


def _each_takes_all(case: CaseResult) -> bool:
    return case.case.consumers > 1 and case.case.tensor_parallel == 1


def _bars(axes: Any, case: CaseResult) -> None:
    rows = case.rows[::-1]
    speeds = [case.gbytes_per_second(row) for row in rows]
    medians = [speed.median for speed in speeds]
    errors = [[s.median - s.p25 for s in speeds], [s.p75 - s.median for s in speeds]]
    colours = ["tab:blue" if row.label.startswith("weightsync") else "tab:grey" for row in rows]
    axes.barh([row.label for row in rows], medians, xerr=errors, color=colours)
    axes.set_xlabel("GB/s, all workers together")
    axes.set_title(case.case.title, fontsize=9)


def _lines(axes: Any, cases: Sequence[CaseResult], value: Callable[[CaseResult], int], label: str, whole: bool) -> None:
    labels = dict.fromkeys(row.label for case in cases for row in case.rows)
    for name in labels:
        points = [(value(case), case.gbytes_per_second(row)) for case in cases if (row := case.row(name)) is not None]
        points.sort(key=lambda point: point[0])
        places = [place for place, _ in points]
        errors = [[s.median - s.p25 for _, s in points], [s.p75 - s.median for _, s in points]]
        style = "--" if name == REFERENCE else "-"
        axes.errorbar(places, [s.median for _, s in points], yerr=errors, label=name, linestyle=style, marker="o")
    places = sorted({value(case) for case in cases})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [format_size(place) if place > 64 else str(place) for place in places], fontsize=7)
    axes.set_xlabel(label)
    axes.set_ylabel("GB/s, all workers together")
    axes.set_ylim(bottom=0)
    axes.set_title(f"over {label}" + (", each worker takes the whole model" if whole else ""), fontsize=9)
    axes.legend(fontsize=7)
