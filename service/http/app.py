"""The FastAPI application of one service: reading for people, scripts and Prometheus, acting for operators.

Stateless: several replicas answer alike. The thing to watch: a request is let in and checked whole before the
registry hears of it, so that a refused one changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette import EventSourceResponse

from weightsync.protocol.status import ConsumerStatus, ProducerStatus, ServiceStatus, VersionRecord
from weightsync.service import metrics
from weightsync.service.http import problems
from weightsync.service.http.access import Gate
from weightsync.service.http.events import Streams
from weightsync.service.http.gateway import RegistryGateway, gateway
from weightsync.service.http.guards import may_operate, may_read
from weightsync.service.http.pages import pages
from weightsync.service.http.problems import ProblemError, documented

Version = Annotated[int, Path(ge=0, le=2**63 - 1, description="a version number", examples=[7])]
Worker = Annotated[str, Path(min_length=1, max_length=200, description="a worker's name", examples=["vllm-0"])]
Rank = Annotated[int, Path(ge=0, le=2**31 - 1, description="a trainer rank", examples=[0])]


class Members(BaseModel):
    """Who takes part."""

    producers: list[ProducerStatus]
    consumers: list[ConsumerStatus]


class Why(BaseModel):
    """Who waits for whom."""

    why: list[str] = Field(
        description="one line for each member that holds a sync up; empty if none runs",
        examples=[["worker w1 is pulling: 0 B of 4.0 kB are in place, waiting for its first reads"]],
    )


class Reason(BaseModel):
    """What an operator says with an action; it appears in events, logs and errors."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(min_length=1, max_length=500, examples=["the engine is being replaced"])


class Done(BaseModel):
    """An action was taken."""

    done: str = Field(examples=["worker 'w1' was taken out of the running sync"])


class Health(BaseModel):
    status: str = Field(examples=["ok"])
    service: str


class ScrapeTarget(BaseModel):
    """One entry of Prometheus' HTTP service discovery."""

    targets: list[str] = Field(examples=[["127.0.0.1:8000"]])
    labels: dict[str, str]


Registry = Annotated[RegistryGateway, Depends(gateway)]


reading = APIRouter(dependencies=[Depends(may_read)], responses=documented())
acting = APIRouter(
    prefix="/v1",
    tags=["operate"],
    dependencies=[Depends(may_operate)],
    responses=documented(HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.LENGTH_REQUIRED),
)
NOT_FOUND = documented(HTTPStatus.NOT_FOUND)
NOT_RUNNING = documented(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)


# -- state ------------------------------------------------------------------------------------------------


@reading.get("/v1/status", tags=["read"], summary="State of the service")
async def status(registry: Registry) -> ServiceStatus:
    return cast(ServiceStatus, await registry.ask("status"))


@reading.get("/v1/members", tags=["read"], summary="Trainer ranks and inference workers")
async def members(registry: Registry) -> Members:
    state: ServiceStatus = await registry.ask("status")
    return Members(producers=state.producers, consumers=state.consumers)


@reading.get("/v1/versions", tags=["read"], summary="The last attempts, newest first, with seconds per phase")
async def versions(registry: Registry) -> list[VersionRecord]:
    return cast(list[VersionRecord], await registry.ask("versions"))


@reading.get("/v1/versions/{version}", tags=["read"], summary="Attempts to sync one version", responses=NOT_FOUND)
async def version(version: Version, registry: Registry) -> list[VersionRecord]:
    found: list[VersionRecord] = await registry.ask("version", version)
    if not found:
        raise ProblemError(HTTPStatus.NOT_FOUND, f"no attempt to sync version {version} is remembered")
    return found


@reading.get("/v1/why", tags=["read"], summary="Who waits for whom in the running sync")
async def why(registry: Registry) -> Why:
    return Why(why=await registry.ask("why"))


@reading.get(
    "/v1/events",
    tags=["read"],
    summary="Server-sent events: what happens, and progress while a sync runs",
    description="`event` messages carry an Event, numbered by `id`; `progress` messages carry the running sync (or "
    "null) and those of its workers whose state changed since the message before. A client that comes back with "
    "`Last-Event-ID` misses nothing that is remembered.",
    response_class=EventSourceResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(request: Request, registry: Registry) -> Response:
    return cast(Streams, request.app.state.streams).open(request, registry)


# -- acting -----------------------------------------------------------------------------------------------


@acting.post("/versions/{version}/abort", summary="Give a running sync up", responses=NOT_RUNNING)
async def abort(version: Version, body: Reason, registry: Registry) -> Done:
    await registry.ask("abort", version, body.reason)
    return Done(done=f"version {version} was given up")


@acting.post("/members/{worker}/evict", summary="Take a worker out of the running sync", responses=NOT_RUNNING)
async def evict(worker: Worker, body: Reason, registry: Registry) -> Done:
    await registry.ask("evict", worker, body.reason)
    return Done(done=f"worker {worker!r} was taken out of the running sync")


@acting.post("/publishing/pause", summary="Open no more versions; ranks wait in `publish`")
async def pause(body: Reason, registry: Registry) -> Done:
    await registry.ask("pause", body.reason)
    return Done(done="publishing is paused")


@acting.post("/publishing/resume", summary="Open versions again")
async def resume(registry: Registry) -> Done:
    await registry.ask("resume")
    return Done(done="publishing goes on")


# -- health and Prometheus --------------------------------------------------------------------------------


class _Exposition(Response):
    media_type = metrics.CONTENT_TYPE


_PAGE: dict[str, Any] = {
    "tags": ["prometheus"],
    "response_class": _Exposition,
}


@reading.get("/metrics", summary="Everything of this service, for a scraper without discovery", **_PAGE)
async def all_metrics(registry: Registry) -> Response:
    return await _with_counters(registry, metrics.everything)


@reading.get(metrics.REGISTRY_PAGE, summary="The service as a whole", **_PAGE)
async def registry_metrics(registry: Registry) -> Response:
    return await _with_counters(registry, metrics.registry_page)


async def _with_counters(registry: RegistryGateway, page: Callable[[ServiceStatus, bytes], bytes]) -> Response:
    try:
        state, counters = await asyncio.gather(registry.ask("status"), registry.ask("metrics"))
    except ProblemError:  # a scrape that fails tells Prometheus less than `weightsync_up 0`
        return _Exposition(metrics.down_page(registry.service))
    return _Exposition(page(state, counters))


@reading.get("/metrics/producers/{rank}", summary="One trainer rank", responses=NOT_FOUND, **_PAGE)
async def producer_metrics(rank: Rank, registry: Registry) -> Response:
    return _Exposition(metrics.producer_page(registry.service, await registry.ask("producer", rank)))


@reading.get("/metrics/consumers/{worker}", summary="One worker", responses=NOT_FOUND, **_PAGE)
async def consumer_metrics(worker: Worker, registry: Registry) -> Response:
    return _Exposition(metrics.consumer_page(registry.service, await registry.ask("consumer", worker)))


@reading.get("/sd", tags=["prometheus"], summary="Prometheus HTTP service discovery: the registry and every member")
async def discovery(request: Request, registry: Registry) -> list[ScrapeTarget]:
    target, base = request.url.netloc, str(request.scope.get("root_path", ""))
    pages = {"registry": metrics.REGISTRY_PAGE}
    try:
        state: ServiceStatus = await registry.ask("status")
    except ProblemError:
        pass  # its own page says that it is down
    else:
        pages |= {f"trainer rank {p.rank}": metrics.producer_path(p.rank) for p in state.producers}
        pages |= {f"worker {c.worker}": metrics.consumer_path(c.worker) for c in state.consumers}
    return [
        ScrapeTarget(
            targets=[target],
            labels={
                "__metrics_path__": base + page,
                "weightsync_service": registry.service,
                "weightsync_member": member,
            },
        )
        for member, page in pages.items()
    ]


probes = APIRouter(tags=["health"])


@probes.get(
    "/healthz",
    summary="200 while the registry answers; needs no token",
    responses={503: {"description": "it does not", "content": {problems.MEDIA_TYPE: {}}}},
)
async def healthz(registry: Registry) -> Health:
    await registry.ask("options")
    return Health(status="ok", service=registry.service)


def create_app(service: str, gate: Gate) -> FastAPI:
    """The application; `gate` decides who is let in."""
    app = FastAPI(
        title="weightsync",
        summary="State and operation of a weight synchronisation service.",
        description="Errors are `application/problem+json`. Where tokens are set, `Authorization: Bearer <token>` is "
        "needed: scope `read` for GET, scope `operate` for POST.",
        version="1",
    )
    app.state.gateway = RegistryGateway(service)
    app.state.gate = gate
    app.state.streams = Streams()
    problems.install(app)
    for router in (probes, pages, reading, acting):
        app.include_router(router)
    return app
