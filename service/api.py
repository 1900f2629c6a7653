"""Start a service, find it, ask it, stop it.

`start` is idempotent: a second call with the same name attaches. The thing to watch: a Ray that `start` had to
launch itself belongs to this process; `shutdown` of the handle that launched it ends it too, one that was
running before is left alone.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, cast

import ray

from weightsync.actors.spawn import NAMESPACE, call, find_registry, registry_name, spawn_registry
from weightsync.actors.transport import choose_transport
from weightsync.protocol.errors import RegistrationError
from weightsync.protocol.status import News, ServiceStatus, VersionRecord
from weightsync.service.local_ray import find_cluster
from weightsync.service.settings import Settings

log = logging.getLogger("weightsync")


class ServiceNotFoundError(RegistrationError):
    """No service of that name runs on the cluster."""


class ServiceHandle:
    """A running service.

    Example:
        >>> handle = start("demo")             # doctest: +SKIP
        >>> handle.status().newest_version     # doctest: +SKIP
        3
        >>> handle.shutdown()                  # doctest: +SKIP
    """

    def __init__(self, name: str, registry: Any, owns_ray: bool = False) -> None:
        self.name = name
        self.registry = registry
        self._owns_ray = owns_ray

    def status(self, timeout_s: float = 30.0) -> ServiceStatus:
        """The service's state at this moment.

        Raises:
            ServiceNotFoundError: the registry is gone.
        """
        return cast(ServiceStatus, self._ask("status", timeout_s=timeout_s))

    def why(self, timeout_s: float = 30.0) -> list[str]:
        """Who waits for whom: a line for each member that holds a running sync up; empty if none runs."""
        return list(self._ask("why", timeout_s=timeout_s))

    def versions(self) -> list[VersionRecord]:
        """The last attempts to sync a version, newest first."""
        return list(self._ask("versions"))

    def version(self, version: int) -> list[VersionRecord]:
        """The attempts to sync one version, newest first, with what each worker measured where it is remembered."""
        return list(self._ask("version", version))

    def news(self, after: int | None, wait_s: float) -> News:
        """Events numbered above `after` (None: from now on) and how far a running sync is; waits `wait_s` at most."""
        return cast(News, self._ask("news", after, wait_s, timeout_s=wait_s + 30.0))

    def abort(self, version: int, reason: str) -> None:
        """Give a running sync up; every rank's `publish` raises SyncAborted with the reason.

        Raises:
            NothingRunningError: no sync of this version is under way.
        """
        self._ask("abort", version, reason)

    def evict(self, worker: str, reason: str) -> None:
        """Take a worker out of the running sync; it takes part in the next one again.

        Raises:
            UnknownMemberError, NothingRunningError: it is no member, or has no part in a running sync.
        """
        self._ask("evict", worker, reason)

    def pause(self, reason: str) -> None:
        """Open no more versions until `resume`; ranks wait in `publish` for as long as its timeout."""
        self._ask("pause", reason)

    def resume(self) -> None:
        """Open versions again. Idempotent."""
        self._ask("resume")

    def _ask(self, method: str, *arguments: Any, timeout_s: float = 30.0) -> Any:
        try:
            return call(getattr(self.registry, method).remote(*arguments), timeout_s)
        except ray.exceptions.RayActorError as error:
            raise ServiceNotFoundError(f"service {self.name!r} is not running any more") from error

    def shutdown(self) -> None:
        """Stop the service: running syncs abort, HTTP, producers and registry end. Idempotent.

        Members that are still alive get an error at their next call. A Ray that `start` launched ends too.
        """
        with contextlib.suppress(Exception):
            call(self.registry.close.remote(), timeout_s=10)
        if self._owns_ray:  # everything else ends with it
            self._owns_ray = False
            ray.shutdown()
            return
        from weightsync.service.serving import remove_ingress  # imports Serve, which members never need

        with contextlib.suppress(Exception):
            remove_ingress(self.name)
        with contextlib.suppress(Exception):
            ray.kill(self.registry)
        made_meanwhile = find_registry(self.name)  # by an ingress that had lost its own
        if made_meanwhile is not None:
            with contextlib.suppress(Exception):
                ray.kill(made_meanwhile)

    def __enter__(self) -> ServiceHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def start(name: str = "default", address: str | None = None, settings: Settings | None = None) -> ServiceHandle:
    """Deploy a service on the running Ray, or on a new local one; attach if it runs already.

    Args:
        name: several services of different names run side by side on one Ray.
        address: Ray address; None takes the connected or running cluster, else launches a local one; "local"
            always launches one of its own.
        settings: None takes environment variables and defaults. An existing service keeps its own.

    Raises:
        TransportUnavailableError: NIXL is demanded but does not import; the message carries the remedy.
        ValueError: a name that cannot be part of an actor name or URL.
        ConnectionError: nothing answers at `address`.
    """
    check_name(name)
    settings = settings or Settings()
    transport, reason = choose_transport(settings.transport)
    owns_ray = ensure_ray(address)
    try:
        existing = find_registry(name)
        if existing is not None:
            return ServiceHandle(name, existing, owns_ray)
        return _deploy(name, settings, transport, reason, owns_ray)
    except BaseException:
        if owns_ray:
            ray.shutdown()
        raise


def connect(name: str = "default", address: str | None = None) -> ServiceHandle:
    """Attach to a running service.

    Raises:
        ServiceNotFoundError: no service of that name.
        ConnectionError: no Ray cluster is running.
    """
    check_name(name)
    if not ray.is_initialized():
        if address is None and find_cluster() is None:
            raise ConnectionError(f"no Ray cluster is running here; start one with `weightsync up --name {name}`")
        _connect_ray(address or "auto")
    registry = find_registry(name)
    if registry is None:
        running = ", ".join(list_services()) or "none"
        raise ServiceNotFoundError(
            f"no service {name!r} on this Ray cluster (running: {running}); start it with `weightsync up --name "
            f"{name}` or weightsync.service.start({name!r})"
        )
    return ServiceHandle(name, registry)


def list_services() -> list[str]:
    """Names of the services on the connected cluster."""
    prefix, suffix = registry_name("\0").split("\0")
    return sorted(
        actor["name"][len(prefix) : -len(suffix)]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix) and actor["name"].endswith(suffix)
    )


def _deploy(name: str, settings: Settings, transport: str, reason: str, owns_ray: bool) -> ServiceHandle:
    from weightsync.service.serving import deploy_ingress, ensure_serve, service_url  # Serve, which members never need

    ensure_serve(settings)
    options = settings.registry_options(name, transport, reason, service_url(name))
    handle = ServiceHandle(name, spawn_registry(options), owns_ray)
    try:
        call(handle.registry.status.remote())
        deploy_ingress(name, settings)
    except BaseException:
        handle.shutdown()
        raise
    return handle


def ensure_ray(address: str | None) -> bool:
    """Connect to Ray as `start` does; True if this call launched it.

    Raises:
        ConnectionError: nothing answers at `address`.
        RuntimeError: this process has another version of Ray or Python than the cluster.
    """
    if ray.is_initialized():
        return False
    if address not in (None, "local"):
        _connect_ray(address)
        return False
    if address is None and find_cluster() is not None:
        _connect_ray("auto")
        return False
    log.info("launching a local Ray cluster")
    ray.init(
        address="local",
        namespace=NAMESPACE,
        log_to_driver=False,
        configure_logging=False,
        include_dashboard=False,
    )
    return True


def _connect_ray(address: str) -> None:
    """Join a cluster. "auto" is more than a shorthand: only then does Ray pick up this user's cluster token."""
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)


def check_name(name: str) -> None:
    """Raises ValueError unless the name can be part of actor names and URLs."""
    if not name or not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ValueError(f"a service name is made of ASCII letters, digits, - and _; got {name!r}")
