"""How `weightsync status` looks in a terminal. Rendering only."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightsync.protocol.status import ConsumerStatus, ServiceStatus


def render(status: ServiceStatus) -> RenderableType:
    """Summary, running sync, and one row per member."""
    parts: list[RenderableType] = [_summary(status)]
    if status.epoch is not None:
        parts.append(
            Text(
                f"syncing version {status.epoch.version} (epoch {status.epoch.epoch}, {status.epoch.seconds:.1f} s); "
                f"waiting for {', '.join(status.epoch.waiting_for) or 'nobody'}",
                style="yellow",
            )
        )
    parts.append(_members(status))
    if status.last_error:
        parts.append(Text(f"last error: {status.last_error}", style="red"))
    return Group(*parts)


def format_bytes(nbytes: float) -> str:
    """Decimal units, as links are rated in."""
    for unit in ("B", "kB", "MB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def _summary(status: ServiceStatus) -> Text:
    newest = "none yet" if status.newest_version is None else str(status.newest_version)
    return Text(
        f"service {status.service}: newest version {newest}, {status.syncs_committed} committed, "
        f"{status.syncs_aborted} aborted\n"
        f"transport {status.transport} ({status.transport_reason})\nHTTP {status.http_url}"
    )


def _members(status: ServiceStatus) -> Table:
    table = Table("member", "state", "version", "pulled", "node", "pid")
    for producer in status.producers:
        table.add_row(
            f"trainer rank {producer.rank}/{status.world_size}",
            producer.mode.value,
            "",
            format_bytes(producer.bytes_held) + " held" if producer.bytes_held else "",
            producer.node_id[:8],
            str(producer.pid),
        )
    for consumer in status.consumers:
        table.add_row(
            f"worker {consumer.worker}",
            f"{consumer.state.value}{'' if consumer.ready else ', not ready'}",
            _version(consumer),
            f"{format_bytes(consumer.bytes_done)} of {format_bytes(consumer.bytes_total)}",
            consumer.node_id[:8],
            str(consumer.pid),
        )
    return table


def _version(consumer: ConsumerStatus) -> str:
    live = "-" if consumer.version is None else str(consumer.version)
    return live if consumer.staged_version is None else f"{live} ({consumer.staged_version} staged)"
