"""An HTTP address that says what a test wants: the status page, and a stream of news written line by line.

It has the routes of a service's ingress and nothing behind them. A test of the page needs `url` alone, so it can be
given a running service's in place of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel

from weightsync.protocol.status import ConsumerStatus, EpochStatus, Event, ServiceStatus, VersionRecord
from weightsync.service.page import CONTENT_SECURITY_POLICY, SCRIPT, STYLE, render_down, render_page
from weightsync.service.ports import free_port


class Progress(BaseModel):
    """A message of type `progress`."""

    epoch: EpochStatus | None
    consumers: list[ConsumerStatus]


class ScriptedService:
    """What the address answers. Change the fields at any time; `send` reaches every open stream.

    Args:
        status: None stands for a registry that does not answer.
        base: the prefix of every address.
        token: asked of everything but style and script, as a query parameter, if it is given.
        refuses_streams: while the registry does not answer; otherwise a stream is opened, and ends at once.
        retry_ms: how long a browser waits before it opens a stream again that ended.
    """

    def __init__(
        self,
        status: ServiceStatus | None,
        base: str = "/example",
        token: str | None = None,
        refuses_streams: bool = True,
        retry_ms: int = 200,
    ) -> None:
        self.status = status
        self.versions: Sequence[VersionRecord] = []
        self.events: list[Event] = []
        self.why: Sequence[str] = []
        self.now: float | None = None
        self.base, self.token = base, token
        self.refuses_streams, self.retry_ms = refuses_streams, retry_ms
        self.port = free_port("127.0.0.1")
        self.pages_served = 0
        self.streams_opened = 0
        self._streams: set[asyncio.Queue[str | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        query = f"?token={quote(self.token, safe='')}" if self.token else ""
        return f"http://127.0.0.1:{self.port}{self.base}/{query}"

    def tell(self, event: Event) -> None:
        """Something happened."""
        self.events.append(event)
        self._send(f"id: {event.number}\nevent: event\ndata: {event.model_dump_json()}\n\n")

    def progress(self) -> None:
        """Say how far the sync of `status` is, and nothing of the page."""
        assert self.status is not None
        message = Progress(epoch=self.status.epoch, consumers=self.status.consumers)
        self._send(f"event: progress\ndata: {message.model_dump_json()}\n\n")

    def drop(self) -> None:
        """End every stream."""
        self._send(None)

    def _send(self, text: str | None) -> None:
        assert self._loop is not None
        for queue in list(self._streams):
            self._loop.call_soon_threadsafe(queue.put_nowait, text)

    @contextlib.contextmanager
    def running(self) -> Iterator[ScriptedService]:
        """Serves from a thread of its own."""
        config = uvicorn.Config(self._app(), host="127.0.0.1", port=self.port, log_level="warning")
        self._server = server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        try:
            yield self
        finally:
            server.should_exit = True
            self.drop()
            thread.join(10)

    def _app(self) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            self._loop = asyncio.get_running_loop()
            yield

        app = FastAPI(lifespan=lifespan)
        app.add_api_route(f"{self.base}/", self._page)
        app.add_api_route(f"{self.base}/page.css", lambda: Response(STYLE, media_type="text/css"))
        app.add_api_route(f"{self.base}/page.js", lambda: Response(SCRIPT, media_type="text/javascript"))
        app.add_api_route(f"{self.base}/v1/events", self._news)
        return app

    async def _page(self, request: Request) -> Response:
        if not self._allowed(request):
            return JSONResponse({"detail": "a token is needed"}, 401)
        self.pages_served += 1
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
        if self.status is None:
            return HTMLResponse(render_down("example", self.base, now=self.now), 503, headers)
        html = render_page(self.status, self.versions, self.events, self.why, self.base, now=self.now)
        return HTMLResponse(html, headers=headers)

    async def _news(self, request: Request) -> Response:
        if not self._allowed(request):
            return JSONResponse({"detail": "a token is needed"}, 401)
        if self.status is None and self.refuses_streams:
            return JSONResponse({"detail": "the registry is unreachable"}, 503)
        self.streams_opened += 1
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._streams.add(queue)
        try:
            yield f"retry: {self.retry_ms}\n\n"
            if self.status is None:
                return
            while (text := await queue.get()) is not None:
                yield text
        finally:
            self._streams.discard(queue)

    def _allowed(self, request: Request) -> bool:
        return self.token is None or request.query_params.get("token") == self.token
