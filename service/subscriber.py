"""The inference worker's side: `Subscriber` keeps one worker at the newest version."""

from __future__ import annotations

from weightsync.actors.consumer import ConsumerAgent
from weightsync.actors.interfaces import WeightTarget
from weightsync.actors.pause import PausableEngine, PauseBracket
from weightsync.actors.spawn import call
from weightsync.protocol.messages import InstallMode, PullStats
from weightsync.service.api import ServiceHandle, connect


class Subscriber:
    """Keeps one inference worker's weights in step with the trainer.

    Args:
        service: name of a running service, or its handle.
        worker: this worker's name, unique in the service. A restarted worker uses the same name and replaces
            its predecessor.
        target: the worker's weights.
        install: `shadow` pulls beside the live weights in the background and swaps inside `sync`; `in_place`
            pulls into the live weights during `sync`, which needs no extra memory, but a failed pull leaves the
            worker not ready until the next whole one.
        engine: paused while its weights change, and resumed whatever happens; None if it computes nothing while
            `sync` runs, as an engine that calls `sync` between two steps.

    Raises:
        ServiceNotFoundError: no such service.
        PlanError, RegistrationError: the published model cannot be loaded into this target; names the tensor.

    Example:
        >>> sub = Subscriber("demo", worker="tp0", target=ModuleTarget(engine))  # doctest: +SKIP
        >>> sub.sync(version=3)                                                  # doctest: +SKIP
        3
    """

    def __init__(
        self,
        service: str | ServiceHandle,
        worker: str,
        target: WeightTarget,
        install: str | InstallMode = InstallMode.SHADOW,
        engine: PausableEngine | None = None,
    ) -> None:
        try:
            mode = InstallMode(install)
        except ValueError:
            raise ValueError(f"install must be one of {[m.value for m in InstallMode]}, got {install!r}") from None
        handle = connect(service) if isinstance(service, str) else service
        self._stall_timeout_s = call(handle.registry.options.remote()).stall_timeout_s
        self._agent = ConsumerAgent(handle.registry, worker, target, mode, engine)

    def sync(self, version: int | None = None, timeout: float | None = None) -> int:
        """Make a newer version visible; call it where no request is being computed.

        Args:
            version: wait until this version, or a newer one, is installed. None applies what is there: a
                complete version, or the one being pulled now; the very first call waits for a first version.
            timeout: seconds; None takes the service's stall timeout.

        Returns:
            The installed version.

        Raises:
            StallError: nothing came in time; says what it is waiting for.
            SyncAborted, SyncError, PlanError: the attempt failed; the worker keeps what it had.
        """
        return self._agent.sync(version, self._stall_timeout_s if timeout is None else timeout)

    def stage(self, version: int | None = None, timeout: float | None = None) -> int:
        """Wait as `sync` does, but leave the version beside the live weights, until `sync` flips it in or `release`
        gives it up. Workers of one engine agree on a version so, before any of them flips.

        Returns:
            The version that `sync` will install.

        Raises:
            ValueError: with install="in_place" there is nothing to stage.
            Exception: as `sync`.
        """
        return self._agent.stage(version, self._stall_timeout_s if timeout is None else timeout)

    def release(self) -> None:
        """A newer version may take the place of what was staged again. Idempotent."""
        self._agent.release()

    def confirm(self) -> None:
        """Wait until the registry, and so `status`, knows which version is installed here."""
        self._agent.confirm()

    def rollback(self) -> int:
        """Make the version before visible again (shadow mode), until the next `sync` finds a newer one.

        It lies beside the live weights from one install to the next pull, so this works once, and only while no
        newer version is on its way. Call it where no request is being computed.

        Returns:
            The version that requests see now.

        Raises:
            SyncError: the version before is not there any more, or never was; the message says why.
        """
        return self._agent.rollback()

    def pause(self, lease_s: float = 30.0) -> None:
        """Hold the engine at a step boundary until `resume`, or until the lease runs out: call again to renew it.

        Args:
            lease_s: seconds after which the engine goes on by itself, in case the caller dies.

        Raises:
            ValueError: this subscriber was given no engine, or the lease is not positive.
        """
        self._pauses().hold("caller", lease_s)

    def resume(self) -> None:
        """Let the engine go on; it does unless an install holds it, or its weights are torn. Idempotent."""
        self._pauses().release("caller")

    def _pauses(self) -> PauseBracket:
        if self._agent.pauses is None:
            raise ValueError("this Subscriber has no engine to pause; give it one: Subscriber(..., engine=...)")
        return self._agent.pauses

    @property
    def version(self) -> int | None:
        """The version that requests see; None before the first install."""
        return self._agent.version

    @property
    def ready(self) -> bool:
        """True once a complete version is installed, False while a failed in-place pull has torn it."""
        return self._agent.ready

    @property
    def last_pull(self) -> PullStats | None:
        """What the newest pull moved and how long each phase took."""
        return self._agent.last_pull

    def close(self) -> None:
        """Leave the service and release memory. Idempotent."""
        self._agent.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
