"""The Serve application: ingress replicas over a registry that outlives them.

Deployed by `start` or, declaratively, by `serve deploy` of a file that names `build`. The thing to watch: the
registry is a detached actor and no part of the application, so redeploying, scaling or killing the ingress costs no
member and no sync; an ingress that finds no registry makes it.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from weightsync.actors.options import RegistryOptions
from weightsync.actors.spawn import call, find_registry, spawn_registry
from weightsync.actors.transport import choose_transport
from weightsync.service.api import check_name
from weightsync.service.http import replica
from weightsync.service.http.access import Gate, Tokens, is_loopback
from weightsync.service.http.app import create_app
from weightsync.service.ports import free_port
from weightsync.service.settings import RuntimeSettings, Settings

log = logging.getLogger("weightsync.serve")


class Application(BaseModel):
    """Arguments of `build` in a Serve config file."""

    model_config = ConfigDict(extra="forbid")

    service: str = Field("default", description="the service's name; set `route_prefix` to / or, for others, /<name>")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="settings by name, above those of environment and file"
    )


@serve.deployment(
    name="ingress",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=256,
    graceful_shutdown_wait_loop_s=0.1,  # requests take milliseconds; the default waits 2 s for each service
    graceful_shutdown_timeout_s=5.0,
    health_check_period_s=5.0,
)
@serve.ingress(replica.application)
class Ingress:
    """HTTP face of one service."""

    def __init__(self, service: str, settings: Settings) -> None:
        self._service = service
        ensure_registry(service, settings)
        tokens = Tokens(settings.read_tokens, settings.operate_tokens)
        replica.serve(create_app(service, Gate(tokens, exposed=not is_loopback(_serve_host()))))

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's `user_config`: settings that a running service can take over, by name.

        Raises:
            ValidationError: an unknown name, or a wrong value; the running settings stay.
        """
        changes = RuntimeSettings(**user_config).model_dump(exclude_none=True)
        registry = find_registry(self._service)
        if registry is not None and changes:
            await registry.reconfigure.remote(changes)

    async def check_health(self) -> None:
        """Without a registry this replica is of no use; Serve replaces it, and the new one makes a registry."""
        if find_registry(self._service) is None:
            raise RuntimeError(f"service {self._service!r} has no registry")


def build(args: dict[str, Any]) -> Any:
    """The application for `serve deploy` and `serve run`; `args` are the file's, see `Application`."""
    wanted = Application(**args)
    check_name(wanted.service)
    return _bound(wanted.service, Settings(**wanted.settings))


def _bound(service: str, settings: Settings) -> Any:
    ingress: Any = Ingress
    return ingress.options(num_replicas=settings.http_replicas).bind(service, settings)


def ensure_registry(service: str, settings: Settings) -> Any:
    """The service's registry, made if there is none. One that runs keeps the settings it has.

    Raises:
        TransportUnavailableError: NIXL is demanded but does not import; the message carries the remedy.
    """
    registry = find_registry(service)
    if registry is not None:
        _warn_of_differences(call(registry.options.remote(), timeout_s=30), settings)
        return registry
    transport, reason = choose_transport(settings.transport)
    return spawn_registry(settings.registry_options(service, transport, reason, service_url(service)))


def ensure_serve(settings: Settings) -> None:
    """Start Serve if it is not running. Services on one Ray share its proxy: host and port are those of the first.

    Raises:
        ValueError: other machines reach the Serve that runs, and these settings have no tokens.
    """
    _hush_serve()
    if _get_global_client(raise_if_no_controller_running=False) is None:
        port = settings.http_port or free_port(settings.http_host)
        serve.start(http_options=HTTPOptions(host=settings.http_host, port=port))
    host = _serve_host()
    if not is_loopback(host) and not settings.has_tokens:
        raise ValueError(
            f"Serve listens on {host}, where other machines reach it; set http_read_tokens and http_operate_tokens, or "
            "start Serve on 127.0.0.1"
        )


def deploy_ingress(service: str, settings: Settings) -> None:
    """Deploy the ingress on the Serve that runs; returns when it answers."""
    _hush_serve()
    serve.run(
        _bound(service, settings),
        name=application_name(service),
        route_prefix=route_prefix(service),
        blocking=False,
    )


def remove_ingress(service: str) -> None:
    """Remove the ingress, and Serve with it when no application is left."""
    _hush_serve()
    applications = serve.status().applications
    if application_name(service) in applications:
        serve.delete(application_name(service))
    if not [name for name in applications if name != application_name(service)]:
        serve.shutdown()


def application_name(service: str) -> str:
    return f"weightsync-{service}"


def route_prefix(service: str) -> str:
    """`/` for the default service, `/<name>` for others, so that several share one proxy."""
    return "/" if service == "default" else f"/{service}"


def service_url(service: str) -> str:
    """Where the ingress of a service is, as seen from the cluster."""
    options = _http_options()
    host = ray.util.get_node_ip_address() if options.host == "0.0.0.0" else options.host
    return f"http://{host}:{options.port}{route_prefix(service)}"


def _warn_of_differences(running: RegistryOptions, settings: Settings) -> None:
    """An ingress deployed again with other settings: those of the registry stay until the service is started anew."""
    wanted = settings.registry_options(running.service, running.transport, "", running.http_url)
    different = [
        field.name
        for field in fields(running)
        if field.name not in ("transport_reason", "ray_address", *RuntimeSettings.model_fields)
        and getattr(running, field.name) != getattr(wanted, field.name)
    ]
    if different:
        log.warning(
            "service %s runs with other settings than these (%s); they take effect after `weightsync down` and up",
            running.service,
            ", ".join(different),
        )


def _serve_host() -> str:
    return str(_http_options().host)


def _http_options() -> Any:
    client: Any = _get_global_client()
    return client.http_config


def _hush_serve() -> None:
    """Serve narrates every step at INFO, which would drown our own output."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
