"""Log lines of the registry: one per event, with the same fields each time, as text or JSON.

The thing to watch: at INFO a sync writes two lines (it began, how it ended), so that a week of them stays readable;
faults are WARNING, and only these reach a driver's terminal under Ray's defaults for detached actors.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

_FIELDS = ["timestamp", "level", "service", "kind", "version", "epoch", "member", "fault", "event"]


def event_logger(service: str, level: Level, fmt: Format) -> Any:
    """A structlog logger of this service, on standard error, where Ray collects the lines of an actor."""
    renderer: Any = structlog.processors.JSONRenderer()
    if fmt == "text":
        renderer = structlog.processors.LogfmtRenderer(key_order=_FIELDS, drop_missing=True)
    logger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _without_none,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
    )
    return logger.bind(service=service)


def _without_none(_: Any, __: str, fields: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: value for key, value in fields.items() if value is not None}
