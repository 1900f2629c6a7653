"""Server-sent events: one stream per client, fed by the registry's long poll."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent

from weightsync.protocol.status import ConsumerStatus, News
from weightsync.service.http.gateway import ANSWERS_WITHIN_S, RegistryGateway
from weightsync.service.http.problems import ProblemError

MAX_STREAMS = 64
"""Per replica; each holds a call at the registry."""
PROGRESS_EVERY_S = 0.25
IDLE_POLL_S = 10.0
RETRY_MS = 2000
"""How long a browser waits before it connects again."""


class Streams:
    """The open streams of one replica."""

    def __init__(self) -> None:
        self._open = 0

    def open(self, request: Request, registry: RegistryGateway) -> EventSourceResponse:
        """A stream from `Last-Event-ID` on, or from now.

        Raises:
            ProblemError: 429, too many are open; 422, that id is no number.
        """
        if self._open >= MAX_STREAMS:
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS, f"{MAX_STREAMS} event streams are open already", {"Retry-After": "5"}
            )
        last = request.headers.get("last-event-id", "")
        if last and not (last.isascii() and last.isdigit()):
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, f"Last-Event-ID is an event's number, got {last!r}")
        return EventSourceResponse(self._messages(registry, int(last) if last else None), ping=15)

    async def _messages(self, registry: RegistryGateway, after: int | None) -> AsyncIterator[ServerSentEvent]:
        self._open += 1
        try:
            yield ServerSentEvent(comment="weightsync", retry=RETRY_MS)
            news = await _news(registry, after, 0.0)
            shown, known = "", dict[str, ConsumerStatus]()
            while True:
                for event in news.events:
                    yield ServerSentEvent(event.model_dump_json(), event="event", id=str(event.number))
                now = {c.worker: _timeless(c) for c in news.consumers}
                changed = [c for c in news.consumers if known.get(c.worker) != now[c.worker]]
                known = now
                progress = _progress(news, changed)
                if progress != shown:
                    yield ServerSentEvent(progress, event="progress")
                    shown = progress
                news = await _news(registry, news.number, PROGRESS_EVERY_S if news.epoch else IDLE_POLL_S)
        except ProblemError:
            return  # the registry is gone; the client connects again, and is told so then
        finally:
            self._open -= 1


async def _news(registry: RegistryGateway, after: int | None, wait_s: float) -> News:
    news: News = await registry.ask("news", after, wait_s, within_s=wait_s + ANSWERS_WITHIN_S)
    return news


def _timeless(consumer: ConsumerStatus) -> ConsumerStatus:
    """Without what grows by itself, which is no change worth a message."""
    return consumer.model_copy(update={"lag_seconds": 0.0})


def _progress(news: News, changed: list[ConsumerStatus]) -> str:
    """Of 500 workers most stand as they did a moment ago; only the others are sent."""
    epoch = news.epoch.model_dump_json() if news.epoch is not None else "null"
    return f'{{"epoch":{epoch},"consumers":[{",".join(c.model_dump_json() for c in changed)}]}}'
