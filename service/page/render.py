"""The documents, from what the registry says and nothing else.

The thing to watch: names of workers and texts of errors come from other programs. Templates escape everything, and
the page is meant to be served with `CONTENT_SECURITY_POLICY`, under which no markup that slipped in could run; so it
holds no inline script, style or handler. A route serves `STYLE` at `<base>/page.css` and `SCRIPT` at `<base>/page.js`;
both are the same for every service and hold nothing secret.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from urllib.parse import quote

from jinja2 import DictLoader, Environment, StrictUndefined

from weightsync.protocol.amounts import format_bytes
from weightsync.protocol.status import Event, ServiceStatus, VersionRecord
from weightsync.service.page import rows
from weightsync.service.page.headline import QUIET_S, Headline, PageState, headline
from weightsync.service.page.words import age, clock, counted, duration, some, stamp

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""For the header of that name. Frames are refused, because a page inside another site's could be clicked for it."""

REFRESH_S = 5
"""How often a browser without JavaScript asks again."""

_SIGNS = {
    PageState.CURRENT: "✓",
    PageState.EMPTY: "○",
    PageState.SYNCING: "↻",
    PageState.WAITING: "…",
    PageState.BEHIND: "▲",
    PageState.PAUSED: "‖",
    PageState.STALLED: "■",
    PageState.BROKEN: "✕",
    PageState.DOWN: "✕",
}
"""Shapes, so that the state does not hang on its colour."""

_ICON_COLOURS = {
    PageState.CURRENT: "1a8a4f",
    PageState.EMPTY: "7a8494",
    PageState.SYNCING: "2f7dd1",
    PageState.WAITING: "c77d0a",
    PageState.BEHIND: "c77d0a",
    PageState.PAUSED: "c77d0a",
}


def _text(name: str) -> str:
    return files("weightsync.service.page").joinpath(name).read_text(encoding="utf-8")


def _key(text: str) -> str:
    """In the addresses of style and script, so that browsers may keep them until they change."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


STYLE = _text("page.css")
SCRIPT = _text("page.js")


def _environment() -> Environment:
    names = ("frame.html", "parts.html", "page.html", "down.html")
    environment = Environment(
        loader=DictLoader({name: _text(name) for name in names}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: tuple[Callable[..., object], ...] = (
        age,
        clock,
        duration,
        format_bytes,
        some,
        stamp,
        rows.outcome,
        rows.progress,
        rows.segments,
        rows.standing,
        rows.timings,
        rows.waits,
    )
    environment.filters.update({function.__name__: function for function in filters})
    environment.globals.update(
        counted=counted,
        phases=rows.PHASES,
        quiet_s=QUIET_S,
        refresh_s=REFRESH_S,
        style_key=_key(STYLE),
        script_key=_key(SCRIPT),
    )
    return environment


_PAGES = _environment()


def render_page(
    status: ServiceStatus,
    versions: Sequence[VersionRecord],
    events: Sequence[Event],
    why: Sequence[str],
    base: str,
    *,
    now: float | None = None,
) -> str:
    """The state of a service as a complete HTML document.

    Args:
        versions: its last attempts, in any order.
        events: its last events, in any order; those that are faults are shown.
        why: who waits for whom; shown where a sync stands still or waits to begin.
        base: the prefix of the service's addresses: "" for the default service, "/name" for others.
        now: seconds since 1970 that ages are counted from; the present if left out.
    """
    epoch = status.epoch
    pulling = rows.pulling(status)
    quiet = epoch is None or epoch.quiet_seconds >= QUIET_S
    return _PAGES.get_template("page.html").render(
        **_frame(status.service, base, headline(status, why), now),
        status=status,
        epoch=epoch,
        why=list(why) if quiet else [],
        workers=_Table(rows.workers(status), rows.MEMBERS_SHOWN),
        pulling=_Table(pulling, rows.MEMBERS_SHOWN),
        others=rows.others(epoch, pulling),
        ranks=_Table(rows.ranks(status), rows.MEMBERS_SHOWN),
        attempts=_Table(rows.attempts(versions), rows.VERSIONS_SHOWN),
        faults=_Table(rows.faults(events), rows.FAULTS_SHOWN),
        links=_Table(rows.links(status), rows.LINKS_SHOWN),
    )


def render_down(service: str, base: str, *, now: float | None = None) -> str:
    """The page of a service whose registry does not answer: what to do about it."""
    head = Headline(PageState.DOWN, "The registry does not answer")
    return _PAGES.get_template("down.html").render(**_frame(service, base, head, now))


class _Table:
    """Rows that are shown, and how many are not."""

    def __init__(self, found: Sequence[object], limit: int) -> None:
        self.shown = found[:limit]
        self.total = len(found)
        self.more = max(0, len(found) - limit)


def _frame(service: str, base: str, head: Headline, now: float | None) -> dict[str, object]:
    return {
        "service": service,
        "base": base,
        "head": head,
        "sign": _SIGNS[head.state],
        "icon": _icon(_ICON_COLOURS.get(head.state, "d33a3a")),
        "now": time.time() if now is None else now,
    }


def _icon(colour: str) -> str:
    circle = f'<circle cx="4" cy="4" r="4" fill="#{colour}"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8">{circle}</svg>'
    return f"data:image/svg+xml,{quote(svg)}"
