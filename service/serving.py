"""The Serve application: a stateless HTTP ingress over the registry.

Everything it says it asks of the registry, so that replicas may come and go. The thing to watch: the ingress
finds the registry by name on each request and reports 503 while it is gone.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from weightsync.actors.spawn import find_registry
from weightsync.protocol.status import ServiceStatus
from weightsync.service.metrics import CONTENT_TYPE, render
from weightsync.service.ports import free_port
from weightsync.service.settings import Settings

_api = FastAPI(title="weightsync", description="State of a weight synchronisation service.")


def application_name(service: str) -> str:
    return f"weightsync-{service}"


def route_prefix(service: str) -> str:
    """`/` for the default service, `/<name>` for others, so that several share one proxy."""
    return "/" if service == "default" else f"/{service}"


@serve.deployment(
    name="ingress",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=64,
    graceful_shutdown_wait_loop_s=0.1,  # requests take milliseconds; the default waits 2 s for each service
)
@serve.ingress(_api)
class Ingress:
    """HTTP face of one service."""

    def __init__(self, service: str) -> None:
        self._service = service

    async def _status(self) -> ServiceStatus | None:
        registry = find_registry(self._service)
        if registry is None:
            return None
        try:
            return await registry.status.remote()
        except ray.exceptions.RayError:
            return None

    @_api.get("/healthz", summary="200 while the registry answers")
    async def healthz(self) -> Response:
        status = await self._status()
        if status is None:
            return JSONResponse({"status": "registry unreachable", "service": self._service}, status_code=503)
        return JSONResponse({"status": "ok", "service": self._service})

    @_api.get("/v1/status", summary="State of the service", response_model=ServiceStatus)
    async def status(self) -> Any:
        status = await self._status()
        if status is None:
            return JSONResponse({"detail": f"the registry of service {self._service!r} is unreachable"}, 503)
        return status

    @_api.get("/metrics", summary="Prometheus metrics")
    async def metrics(self) -> Response:
        return Response(render(self._service, await self._status()), media_type=CONTENT_TYPE)


def deploy_ingress(service: str, settings: Settings) -> str:
    """Deploy the ingress, starting Serve if it is not running; returns the service's URL.

    Services on one Ray share its proxy: host and port are those of the first one.
    """
    _hush_serve()
    if _get_global_client(raise_if_no_controller_running=False) is None:
        port = settings.http_port or free_port(settings.http_host)
        serve.start(http_options=HTTPOptions(host=settings.http_host, port=port))
    ingress: Any = Ingress
    serve.run(
        ingress.bind(service),
        name=application_name(service),
        route_prefix=route_prefix(service),
        blocking=False,
    )
    return _url(service)


def remove_ingress(service: str) -> None:
    """Remove the ingress, and Serve with it when no application is left."""
    _hush_serve()
    applications = serve.status().applications
    if application_name(service) in applications:
        serve.delete(application_name(service))
    if not [name for name in applications if name != application_name(service)]:
        serve.shutdown()


def _hush_serve() -> None:
    """Serve narrates every step at INFO, which would drown our own output."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def _url(service: str) -> str:
    client: Any = _get_global_client()
    options = client.http_config
    return f"http://{options.host}:{options.port}{route_prefix(service)}"
