"""How `weightsync watch` looks: members and a bar per worker, redrawn as news come; or a line of JSON per event."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightsync.protocol.amounts import format_bytes
from weightsync.protocol.status import ConsumerStatus, Event, News, ServiceStatus
from weightsync.service.api import ServiceHandle, ServiceNotFoundError
from weightsync.service.status_view import format_time, render

_EVENTS_SHOWN = 8
_REFRESH_S = 0.5
_IDLE_S = 5.0


def follow(handle: ServiceHandle, console: Console | None = None) -> None:
    """Redraw until the service ends or Ctrl-C.

    Raises:
        ServiceNotFoundError: the service ended.
    """
    events: deque[Event] = deque(maxlen=_EVENTS_SHOWN)
    news = handle.news(0, 0.0)
    with Live(console=console or Console(), auto_refresh=False, screen=False) as live:
        while True:
            events.extend(news.events)
            live.update(view(handle.status(), news, list(events)), refresh=True)
            news = _next(handle, news)


def follow_json(handle: ServiceHandle) -> None:
    """One line per event, beginning with those that are remembered."""
    news = handle.news(0, 0.0)
    while True:
        for event in news.events:
            sys.stdout.write(json.dumps(event.model_dump(mode="json")) + "\n")
        sys.stdout.flush()
        news = _next(handle, news)


def view(status: ServiceStatus, news: News, events: list[Event]) -> RenderableType:
    """One frame."""
    parts: list[RenderableType] = [render(status)]
    if news.epoch is not None:
        parts.append(_bars(news.consumers))
    if events:
        parts.append(Text("\n".join(_line(event) for event in events), style="dim"))
    return Group(*parts)


def _bars(consumers: list[ConsumerStatus]) -> Table:
    table = Table.grid(padding=(0, 1))
    for consumer in consumers:
        table.add_row(
            f"worker {consumer.worker}",
            ProgressBar(total=max(consumer.bytes_total, 1), completed=consumer.bytes_done, width=40),
            f"{format_bytes(consumer.bytes_done)} of {format_bytes(consumer.bytes_total)}",
            consumer.waits_for,
        )
    return table


def _line(event: Event) -> str:
    return f"{format_time(event.time)}  {event.text}"


def _next(handle: ServiceHandle, news: News) -> News:
    """The next news; a registry that restarts is waited for."""
    while True:
        try:
            return handle.news(news.number, _REFRESH_S if news.epoch is not None else _IDLE_S)
        except ServiceNotFoundError:
            with suppress(ServiceNotFoundError):
                time.sleep(_REFRESH_S)
                handle.status(timeout_s=10.0)
                continue
            raise
