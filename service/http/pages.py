"""The status page and what it is dressed in."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse

from weightsync.protocol.status import News, ServiceStatus, VersionRecord
from weightsync.service.http.gateway import RegistryGateway, gateway
from weightsync.service.http.guards import may_read
from weightsync.service.http.problems import ProblemError, documented
from weightsync.service.page import CONTENT_SECURITY_POLICY, SCRIPT, STYLE, render_down, render_page

pages = APIRouter(tags=["page"])

_SAFE = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
_KEEP = {"Cache-Control": "public, max-age=86400"}
"""Their addresses change with their content."""


@pages.get(
    "/",
    summary="The status page",
    response_class=HTMLResponse,
    dependencies=[Depends(may_read)],
    responses=documented() | {503: {"description": "the registry does not answer", "content": {"text/html": {}}}},
)
async def page(request: Request, registry: Annotated[RegistryGateway, Depends(gateway)]) -> Response:
    base = str(request.scope.get("root_path", ""))
    headers = {**_SAFE, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
    try:
        status, versions, news, why = await _state(registry)
    except ProblemError:
        return HTMLResponse(render_down(registry.service, base), status_code=503, headers=headers)
    return HTMLResponse(render_page(status, versions, news.events, why, base), headers=headers)


async def _state(registry: RegistryGateway) -> tuple[ServiceStatus, list[VersionRecord], News, list[str]]:
    asked = (("status",), ("versions",), ("news", 0, 0.0), ("why",))
    status, versions, news, why = await asyncio.gather(*(registry.ask(*question) for question in asked))
    return status, versions, news, why


@pages.get("/page.css", include_in_schema=False)
async def style() -> Response:
    return Response(STYLE, media_type="text/css", headers=_KEEP)


@pages.get("/page.js", include_in_schema=False)
async def script() -> Response:
    return Response(SCRIPT, media_type="text/javascript", headers=_KEEP)
