"""How the demo looks in a terminal. Rendering only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.table import Table

from weightsync.protocol.amounts import format_bytes
from weightsync.protocol.status import ServiceStatus, SyncReport
from weightsync.service.demo.results import DemoResult, VersionResult


class DemoView:
    """Narrates a run. With `json_output` everything goes to standard error, which leaves stdout to JSON."""

    def __init__(self, json_output: bool) -> None:
        self.console = Console(stderr=json_output, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner while something takes time."""
        with self.console.status(text):
            yield

    @contextmanager
    def pulling(self, version: int, workers: list[str]) -> Iterator[PullBars]:
        """One live bar per worker for the duration of a sync."""
        progress = Progress(
            TextColumn("  version {task.fields[version]}  {task.description}"),
            BarColumn(bar_width=32),
            DownloadColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[state]}"),
            console=self.console,
        )
        with progress:
            bars = {
                worker: progress.add_task(worker, total=None, version=version, rate="", state="waiting")
                for worker in workers
            }
            yield PullBars(progress, bars)

    def version(self, result: VersionResult) -> None:
        report = result.report
        bits = "bit for bit" if not result.problems else f"[red]{len(result.problems)} parameters wrong[/]"
        self.say(
            f"  version {result.version}  loss {result.loss:.3f}, step {result.train_seconds:.1f} s; "
            f"{format_bytes(report.bytes)} in {report.seconds:.2f} s ({report.gbytes_per_second:.2f} GB/s); "
            f"{bits}, logits within {result.logits_distance:.4f}"
        )

    def summary(self, result: DemoResult) -> None:
        """One row per version, seconds per phase; fits a terminal of 80 columns."""
        phases = list(result.versions[0].report.phases) if result.versions else []
        table = Table(
            "v",
            "needed",
            "on wire",
            "total s",
            *phases,
            "GB/s",
            "logits",
            "ok",
            title=f"{result.parameters / 1e6:.1f} M parameters, {result.trainer_ranks} FSDP2 ranks to tensor "
            f"parallel {result.tensor_parallel}, {result.mode}/{result.install} over {result.transport}",
            box=None,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            title_justify="left",
        )
        for version in result.versions:
            report = version.report
            failed = version.failures(result.logits_tolerance, result.workers)
            table.add_row(
                str(version.version),
                format_bytes(report.needed_bytes),
                format_bytes(report.bytes),
                f"{report.seconds:.3f}",
                *(f"{report.phases[phase]:.3f}" for phase in phases),
                f"{report.gbytes_per_second:.2f}",
                f"{version.logits_distance:.4f}",
                "[red]no[/]" if failed else "[green]yes[/]",
            )
        self.console.print(table)
        for failure in result.failures:
            self.say(f"[red]failed:[/] {failure}")
        if result.ok:
            self.say(f"[green]Every byte of every version is where it belongs.[/] {result.seconds:.0f} s in all.")


class PullBars:
    """The bars of one sync, fed from the service's status, and in the end from the report."""

    def __init__(self, progress: Progress, bars: dict[str, TaskID]) -> None:
        self._progress = progress
        self._bars = bars
        self._started = time.monotonic()

    def update(self, status: ServiceStatus) -> None:
        seconds = time.monotonic() - self._started
        for consumer in status.consumers:
            if consumer.worker in self._bars:
                self._progress.update(
                    self._bars[consumer.worker],
                    completed=consumer.bytes_done,
                    total=consumer.bytes_total,
                    rate=f"{format_bytes(consumer.bytes_done / seconds)}/s",
                    state=consumer.state.value,
                )

    def finish(self, report: SyncReport) -> None:
        """The worker's own measure, which the polled one of a short pull is far from."""
        for worker, pulled in report.workers.items():
            if worker in self._bars:
                self._progress.update(
                    self._bars[worker],
                    completed=pulled.bytes_wire,
                    total=pulled.bytes_needed,
                    rate=f"{format_bytes(pulled.bytes_wire / pulled.seconds)}/s",
                    state="installed",
                )
