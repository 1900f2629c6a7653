"""How a service looks in a terminal. Rendering only."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightsync.protocol.amounts import format_bytes
from weightsync.protocol.messages import EpochState
from weightsync.protocol.status import PHASES, ConsumerStatus, ServiceStatus, VersionRecord


def render(status: ServiceStatus) -> RenderableType:
    """Summary, running sync, and one row per member."""
    parts: list[RenderableType] = [_summary(status)]
    if status.paused is not None:
        parts.append(Text(f"publishing is paused: {status.paused}", style="yellow"))
    if status.epoch is not None:
        parts.append(
            Text(
                f"syncing version {status.epoch.version} (epoch {status.epoch.epoch}, {status.epoch.seconds:.1f} s, "
                f"{status.epoch.progress:.0%}); waiting for {', '.join(status.epoch.waiting_for) or 'nobody'}",
                style="yellow",
            )
        )
    parts.append(render_members(status))
    if status.last_error:
        parts.append(Text(f"last error: {status.last_error}", style="red"))
    return Group(*parts)


def format_time(seconds: float) -> str:
    """Local time of a moment in seconds since 1970."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def render_members(status: ServiceStatus) -> Table:
    """One row per trainer rank and worker."""
    table = Table("member", "state", "version", "behind", "pulled", "node", "pid")
    for producer in status.producers:
        table.add_row(
            f"trainer rank {producer.rank}/{status.world_size}",
            producer.mode.value,
            "",
            "",
            format_bytes(producer.bytes_held) + " held" if producer.bytes_held else "",
            producer.node_id[:8],
            str(producer.pid),
        )
    for consumer in status.consumers:
        unready = ", torn" if consumer.torn else "" if consumer.ready else ", not ready"
        table.add_row(
            f"worker {consumer.worker}",
            f"{consumer.state.value}{unready}",
            _version(consumer),
            f"{consumer.lag_versions} ({consumer.lag_seconds:.0f} s)" if consumer.lag_versions else "",
            f"{format_bytes(consumer.bytes_done)} of {format_bytes(consumer.bytes_total)}",
            consumer.node_id[:8],
            str(consumer.pid),
        )
    return table


def render_versions(records: Sequence[VersionRecord], workers: bool) -> RenderableType:
    """One row per attempt; with `workers`, one per worker of each too."""
    table = Table("version", "epoch", "ended", "outcome", "seconds", "GB/s", *PHASES)
    for record in records:
        report = record.report
        table.add_row(
            str(record.version),
            str(record.epoch),
            format_time(record.ended_at),
            _outcome(record),
            f"{record.seconds:.3f}",
            f"{report.gbytes_per_second:.2f}" if report else "",
            *(f"{report.phases[phase]:.3f}" if report and phase in report.phases else "" for phase in PHASES),
        )
        for worker, pull in report.workers.items() if workers and report else ():
            table.add_row(
                "",
                "",
                "",
                f"worker {worker}: {format_bytes(pull.bytes_wire)}",
                f"{pull.seconds:.3f}",
                f"{pull.bytes_wire / pull.seconds / 1e9:.2f}" if pull.seconds else "",
                *(f"{pull.phases[phase]:.3f}" if phase in pull.phases else "" for phase in PHASES),
            )
    return table


def _outcome(record: VersionRecord) -> Text:
    if record.state is EpochState.ABORTED:
        return Text(f"aborted ({record.fault}): {record.error}", style="red")
    without = f" without {', '.join(record.evicted)}" if record.evicted else ""
    return Text(f"on {len(record.report.installed) if record.report else 0} workers{without}")


def _summary(status: ServiceStatus) -> Text:
    newest = "none yet" if status.newest_version is None else str(status.newest_version)
    return Text(
        f"service {status.service}: newest version {newest}, {status.syncs_committed} committed, "
        f"{status.syncs_aborted} aborted\n"
        f"transport {status.transport} ({status.transport_reason})\nHTTP {status.http_url}"
    )


def _version(consumer: ConsumerStatus) -> str:
    live = "-" if consumer.version is None else str(consumer.version)
    return live if consumer.staged_version is None else f"{live} ({consumer.staged_version} staged)"
