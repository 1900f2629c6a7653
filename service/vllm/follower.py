"""An engine that follows the service: no call of the trainer is needed for its weights to be up to date.

Runs in the process that holds vLLM's `AsyncLLM`. A version that is complete at every worker goes in so:

    pause    at a step boundary; requests in flight are treated by policy
    install  all workers of the engine, or none
    stamp    the engine's outputs say from now on which version made them
    resume   however the above ended, unless weights are torn

    drain    requests in flight are finished with the version before; no response mixes two
    keep     they are frozen, and go on with the new version; their tokens are computed anew from the prompt and what
             they have, and the response's `weight_versions` say which version made which tokens
    abort    they end at once, with what they have

The thing to watch: caches of prefixes are cleared while paused, in every policy, or requests would be answered from
keys and values of the version before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Literal

from vllm import LLM
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM

from weightsync.protocol.errors import SyncError
from weightsync.protocol.messages import InstallMode
from weightsync.protocol.status import ConsumerStatus, ServiceStatus
from weightsync.service.api import ServiceHandle, ServiceNotFoundError, connect

log = logging.getLogger("weightsync.vllm")

InFlight = Literal["drain", "keep", "abort"]
_PAUSE_MODE = {"drain": "wait", "keep": "keep", "abort": "abort"}
_POLL_S = 2.0
_RETRY_S = 1.0


class EngineFollower:
    """Keeps one engine at the newest version.

    Args:
        engine: started with the backend `weightsync`.
        service: name of the running service, or its handle.
        name: of this engine in the service; a restarted engine takes the name it had. None takes vLLM's instance id.
        in_flight: what becomes of requests that are being computed when a version goes in.
        install: "shadow" or "in_place".

    Example:
        >>> async with EngineFollower(engine, "default", name="engine0") as follower:  # doctest: +SKIP
        ...     await follower.wait_for(3)
        3
    """

    def __init__(
        self,
        engine: AsyncLLM,
        service: str | ServiceHandle = "default",
        *,
        name: str | None = None,
        in_flight: InFlight = "drain",
        install: str = "shadow",
    ) -> None:
        if in_flight not in _PAUSE_MODE:
            raise ValueError(f"in_flight must be one of {sorted(_PAUSE_MODE)}, got {in_flight!r}")
        self._engine = engine
        self._service = connect(service) if isinstance(service, str) else service
        self._name = name or engine.vllm_config.instance_id
        self._workers = _Workers(self._service, self._name)
        self._pause_mode: Any = _PAUSE_MODE[in_flight]
        self._install = install
        self._in_place = install == InstallMode.IN_PLACE
        self._version: int | None = None
        self._installed = asyncio.Condition()
        self._following: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Of the engine in the service."""
        return self._name

    @property
    def service(self) -> str:
        """Name of the service."""
        return self._service.name

    @property
    def version(self) -> int | None:
        """The version that every worker of the engine serves; None before the first."""
        return self._version

    async def start(self) -> None:
        """Join the service and follow it.

        Raises:
            Exception: what a worker says that cannot join; the engine keeps its weights.
        """
        info = self._workers.init_info(self._install)
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        self._following = asyncio.create_task(self._follow(), name=f"weightsync-{self._name}")

    async def wait_for(self, version: int, timeout_s: float | None = None) -> int:
        """Return when this version, or a newer one, is installed; raises TimeoutError."""
        async with asyncio.timeout(timeout_s), self._installed:
            await self._installed.wait_for(lambda: self._version is not None and self._version >= version)
            assert self._version is not None
            return self._version

    async def close(self) -> None:
        """Stop following, after an install that is under way, and leave the service. Idempotent."""
        following, self._following = self._following, None
        if following is None:
            return
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        with contextlib.suppress(Exception):  # a dead engine has left already
            await self._engine.shutdown_weight_transfer_engine()

    async def __aenter__(self) -> EngineFollower:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _follow(self) -> None:
        after: int | None = 0
        while True:
            try:
                news = await asyncio.to_thread(self._service.news, after, _POLL_S)
                after = news.number
                offered = await asyncio.to_thread(self._workers.offered, self._in_place)
                if offered is not None and (self._version is None or offered > self._version):
                    await asyncio.shield(self._take_in(offered))
            except Exception as error:
                log.warning("engine %s keeps version %s: %s", self._name, self._version, error)
                await asyncio.sleep(_RETRY_S)

    async def _take_in(self, offered: int) -> None:
        async with self._paused():
            await self._engine.start_weight_update()
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info={"version": offered}))
            version = await asyncio.to_thread(self._workers.version)
            await self._engine.finish_weight_update(str(version))
        async with self._installed:
            self._version = version
            self._installed.notify_all()
        log.info("engine %s serves version %d", self._name, version)

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """The engine at a step boundary with empty caches. It goes on afterwards, unless its weights are torn."""
        await self._engine.pause_generation(mode=self._pause_mode, clear_cache=True)
        try:
            yield
        finally:
            if not await asyncio.to_thread(self._workers.torn):
                await self._engine.resume_generation()


class OfflineEngine:
    """An offline engine, which computes only inside `generate`, as a member of a service.

    Args:
        llm: made with the backend `weightsync`.
        service, name, install: as `EngineFollower`.

    Example:
        >>> engine = OfflineEngine(llm, "default", name="engine0")  # doctest: +SKIP
        >>> engine.sync(3)                                          # doctest: +SKIP
        3
    """

    def __init__(
        self, llm: LLM, service: str | ServiceHandle = "default", *, name: str | None = None, install: str = "shadow"
    ) -> None:
        handle = connect(service) if isinstance(service, str) else service
        self._llm = llm
        self._workers = _Workers(handle, name or llm.llm_engine.vllm_config.instance_id)
        llm.init_weight_transfer_engine({"init_info": self._workers.init_info(install)})

    def sync(self, version: int | None = None, timeout_s: float | None = None) -> int:
        """Install a version, or a newer one; None takes the newest. Call it between two `generate`.

        Returns:
            The version that the next `generate` uses, and writes into its outputs.

        Raises:
            Exception: what a worker says; all keep what they had, or are torn, which it says.
        """
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"version": version, "timeout_s": timeout_s}})
        installed = self._workers.version()
        self._llm.finish_weight_update(str(installed))
        self._llm.reset_prefix_cache()
        return installed

    def close(self) -> None:
        """Leave the service. Idempotent."""
        self._llm.shutdown_weight_transfer_engine()


class _Workers:
    """The workers of one engine, as the service knows them."""

    def __init__(self, service: ServiceHandle, engine: str) -> None:
        self.service = service
        self.engine = engine

    def init_info(self, install: str) -> dict[str, str]:
        """What vLLM passes to each worker."""
        return {"service": self.service.name, "engine": self.engine, "install": install}

    def offered(self, in_place: bool) -> int | None:
        """The version that all can install without waiting, if there is one: an engine that cannot have the newest,
        because it was left out of that sync, is not paused for it. In place, the version that is being synced now.
        """
        status = self.service.status()
        if in_place:
            return None if status.epoch is None else status.epoch.version
        members = self._members(status)
        have = [m.version if m.staged_version is None else m.staged_version for m in members]
        known = [version for version in have if version is not None]
        return min(known) if known and len(known) == len(have) else None

    def version(self) -> int:
        """The one version that all installed; they agreed on it, perhaps on a newer one than they were asked for.

        Raises:
            SyncError: they are gone, or do not serve one version.
        """
        versions = {member.version for member in self._members(self.service.status())}
        version = versions.pop() if len(versions) == 1 else None
        if version is None:
            raise SyncError(f"workers of engine {self.engine!r} report versions {sorted(map(str, versions))}")
        return version

    def torn(self) -> bool:
        """Whether one has weights that must not be used."""
        with contextlib.suppress(ServiceNotFoundError):  # a service that is gone tears nothing
            return any(member.torn for member in self._members(self.service.status()))
        return False

    def _members(self, status: ServiceStatus) -> list[ConsumerStatus]:
        prefix = f"{self.engine}-dp"
        return [member for member in status.consumers if member.worker.startswith(prefix)]
