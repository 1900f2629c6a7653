"""What is printed and written follows from the JSON alone, and options are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from weightsync.service.bench.cases import Case, suite
from weightsync.service.bench.markdown import render_markdown
from weightsync.service.bench.plot import write_plot
from weightsync.service.bench.results import REFERENCE, BenchResult, CaseResult, LayoutFacts, Row, Skipped
from weightsync.service.bench.run import admitted, run_bench
from weightsync.service.bench.view import render
from weightsync.service.bench.ways import all_ways
from weightsync.service.cli import app


def _case(failures: list[str], **of_case: object) -> CaseResult:
    settings = {"nbytes": 16_000_000, "ways": ("bare", "live-in-place", "files"), "rounds": 2, **of_case}
    return CaseResult(
        case=Case(**settings),  # type: ignore[arg-type]
        layout=LayoutFacts(model_nbytes=16_000_000, moved_nbytes=16_000_000, tensors=9, runs=9, contiguous=True),
        rows=[
            Row(label=REFERENCE, way="bare", seconds={0: 0.004, 1: 0.004}, extra_bytes=1000),
            Row(label="weightsync live, in place", way="live-in-place", seconds={0: 0.005, 1: 0.005}),
            Row(label="safetensors in /dev/shm", way="files", seconds={0: 0.016, 1: 0.016}, extra_bytes=16_000_000),
        ],
        skipped=[Skipped(way="mooncake", reason="Mooncake is not installed")],
        failures=failures,
    )


def _result(failures: list[str]) -> BenchResult:
    return BenchResult(
        command="weightsync bench",
        started="2026-12-01T10:00:00+00:00",
        seconds=12.0,
        machine={"CPU": "an | odd name", "cores": "2"},
        packages={"torch": "2.13.0"},
        cases=[
            _case(failures),
            *(_case([], section="consumers", producers=2, consumers=n, tensor_parallel=n) for n in (1, 4)),
            *(_case([], section="runs", run_nbytes=run) for run in (512, 65536)),
        ],
        refused=["4 GB, 1 rank to whole: needs 9.0 GB of memory, 2.0 GB may be taken here"],
    )


def test_the_document_is_rendered_from_json_that_went_out_and_came_back() -> None:
    result = BenchResult.model_validate_json(_result([]).model_dump_json())
    text = render_markdown(result, {"models": [{"case": "K2", "ms": 1.0}, {"case": "V3", "runs": 3}]}, "RESULTS.svg")
    lines = text.splitlines()
    assert "| CPU | an \\| odd name |" in lines
    assert "| safetensors in /dev/shm | 0.0160 | 1.00 | 0.25 | 0.25-0.25 | 16.0 MB | 3.20 (3.20-3.20) |" in lines
    assert "- skipped mooncake: Mooncake is not installed" in lines
    assert "## Number of workers" in lines
    assert "## Run size" in lines
    assert any(
        line.startswith("| 16 MB, 2 row shards to tensor parallel 4 | 4.00 (4.00-4.00) | 1.00 |") for line in lines
    )
    assert any(line.startswith("| 16 MB in separated runs of 64 KiB |") for line in lines)
    assert "- 4 GB, 1 rank to whole: needs 9.0 GB of memory, 2.0 GB may be taken here" in lines
    assert "| case | ms | runs |" in lines
    assert "| K2 | 1.000 |  |" in lines
    assert "![throughput](RESULTS.svg)" in lines


def _choice(ours: float, direct: float, packed: float, span: float) -> CaseResult:
    taken = {
        "weightsync live, in place": ours,
        "weightsync live, direct": direct,
        "weightsync live, packed": packed,
        "weightsync live, span": span,
    }
    case = _case([], section="strategies", run_nbytes=2048, gap=7.0)
    case.rows += [Row(label=label, way=label, seconds={0: s, 1: s}) for label, s in taken.items() if s]
    case.rows = [row for row in case.rows if not (row.label == "weightsync live, in place" and row.seconds[0] != ours)]
    return case


def test_what_the_cost_model_chose_is_compared_with_the_best_of_the_three() -> None:
    result = _result([])
    result.cases += [_choice(0.0104, 0.020, 0.010, 0.015), _choice(0.012, 0.010, 0.020, 0.0)]
    lines = render_markdown(result).splitlines()
    start = lines.index("## What the cost model chooses, against each strategy forced")
    title = "16 MB in separated runs of 2 KiB, gaps of 7 runs"
    assert lines[start + 2] == "| case | best | direct | packed | span | chosen | chosen, of bare |"
    assert f"| {title} | packed | 2.00 | 1.00 | 1.50 | 1.04 | 0.38 |" in lines
    assert f"| {title} | direct | 1.00 | 2.00 | - | 1.20 | 0.33 |" in lines
    assert "Within 10 % of the best in 1 of 2 cases; at worst 1.20 times it." in lines


def test_every_table_has_as_many_cells_in_each_row() -> None:
    tables = render_markdown(_result([])).replace("\\|", "").split("\n\n")
    for table in (part for part in tables if part.startswith("|")):
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1, table


def test_a_failure_is_a_failure_of_the_whole_and_is_written_down() -> None:
    assert _result([]).ok
    broken = _result(["files, round 1: wrong bytes"])
    assert not broken.ok
    assert "- 16 MB, 1 rank to whole: files, round 1: wrong bytes" in render_markdown(broken)
    assert not _result([]).model_copy(update={"cases": []}).ok, "nothing measured is no success"


def test_tables_fit_a_terminal_of_80_columns() -> None:
    console = Console(width=80, record=True, highlight=False)
    console.print(render(_result([])))
    text = console.export_text()
    assert "safetensors in /dev/shm    0.0160  1.00  0.25     0.25-0.25  16.0 MB" in text
    assert "…" not in text


@pytest.mark.parametrize("extension", ["png", "svg"])
def test_a_plot_is_written_in_the_format_of_its_name(tmp_path: Path, extension: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{extension}"
    write_plot(_result([]), file)
    assert file.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[extension])


@pytest.mark.parametrize("name", ["quick", "full"])
def test_suites_name_ways_that_exist_and_layouts_that_do(name: str) -> None:
    for case in suite(name, list(all_ways())):
        assert set(case.ways) <= set(all_ways())
        assert "bare" in case.ways
        assert case.layout().nbytes > 0


def test_what_does_not_fit_into_memory_is_refused_before_anything_starts() -> None:
    huge = Case(nbytes=500_000_000_000_000, ways=("bare",), rounds=1)
    with pytest.raises(ValueError, match="of memory,"):
        admitted(huge)
    result = run_bench([huge])
    assert result.cases == []
    assert "may be taken here" in result.refused[0]
    assert not result.ok


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--ways", "pigeons"], 1, "there are bare, bare-one-run, memcpy, live"),
        (["--sizes", "1MB"], 1, "sizes go from 16 MB to 4 GB"),
        (["--run-sizes", "256B"], 1, "run sizes go from 512 B to 8 MiB"),
        (["--consumers", "9"], 1, "whole numbers from 1 to 8"),
        (["--plot", "figures.pdf"], 1, "a plot is written as .png or .svg"),
        (["--rounds", "0"], 2, "--rounds"),
        (["--suite", "long"], 2, "'long'"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], status: int, message: str) -> None:
    outcome = CliRunner().invoke(app, ["bench", *arguments])
    if status == 2:
        assert outcome.exit_code == 2
        assert message in outcome.output
    else:
        assert isinstance(outcome.exception, ValueError), "`main` makes one line and exit code 1 of it"
        assert message in str(outcome.exception)
