"""The consumer agent: one inference worker's part in every sync, from recording to install.

Lives inside the worker's process, because the memory is there. A follower thread asks the registry for the
next thing to do and does it: plan a new layout, or pull an epoch. `sync`, on the worker's own thread, is the
boundary at which a version becomes visible.

    shadow    the follower pulls beside the live parameters as soon as an epoch opens; once the registry has
              committed, the version is staged, and the next `sync` flips it in.
    in_place  the pull waits for a `sync` call and writes the live parameters while that call holds the
              engine; a pull that fails after it began leaves the worker torn, hence not ready, until a whole
              pull succeeds.

If the engine can be paused it is, for the flip or the pull in place, however these end. The thing to watch: nothing
is flipped before the registry's commit, and never while a pull writes the shadow. A staged version that was not
applied before the next pull begins is superseded by it, and so is the version before, which the flip left there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from weightsync.actors.attempt import Attempt
from weightsync.actors.digests import DigestMismatchError
from weightsync.actors.interfaces import WeightTarget
from weightsync.actors.lifelines import Lifeline
from weightsync.actors.options import RegistryOptions
from weightsync.actors.pause import PausableEngine, PauseBracket
from weightsync.actors.preparing import Preparation, Pull
from weightsync.actors.spawn import await_registry, call, this_node
from weightsync.actors.transport import ReadHungError
from weightsync.protocol.errors import (
    MembershipLostError,
    RegistrationError,
    StallError,
    SyncAborted,
    SyncError,
    WeightsyncError,
)
from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import (
    EpochBegin,
    InstallMode,
    LayoutSnapshot,
    MemberHistory,
    PullStats,
)

log = logging.getLogger("weightsync.consumer")


class ConsumerAgent:
    """One worker's agent.

    Args:
        registry: handle of the service's registry.
        worker: the worker's name, unique in the service; a new process under a known name replaces it.
        target: the worker's weights.
        install: shadow or in_place.
        engine: paused while its weights change; None if it computes only between `sync` calls.
    """

    def __init__(
        self,
        registry: Any,
        worker: str,
        target: WeightTarget,
        install: InstallMode,
        engine: PausableEngine | None = None,
    ) -> None:
        self._registry = registry
        self._worker = worker
        self._target = target
        self._install = install
        self._options: RegistryOptions = call(registry.options.remote())
        self._version: int | None = None
        self._previous: int | None = None
        """The version that lies in the shadow since the last flip."""
        self._flips = 0
        self._news_of_flip: Any = None
        self._kept_until: float | None = None
        """What is staged may not be superseded before (monotonic seconds)."""
        self._torn = False
        self._last_epoch = 0
        self._join()
        self._prepared = Preparation(registry, worker, target, install, self._options)
        self._pull: Pull | None = None
        self._generation = 0
        self._cond = threading.Condition()
        self._staged: int | None = None
        self.pauses = PauseBracket(engine, lambda: not self._torn) if engine is not None else None
        self._callers = 0
        self._writing = False
        self._error: WeightsyncError | None = None
        self._failed_version: int | None = None
        self._told = False
        self._fatal: WeightsyncError | None = None
        self._closed = False
        self.last_pull: PullStats | None = None
        layout = call(registry.layout.remote())
        if layout is not None:
            self._plan(layout)  # on the caller's thread: its errors belong to the caller
            if self._error is not None:
                self.close()
                raise self._error
        self._follower = threading.Thread(target=self._follow, name=f"weightsync-{worker}", daemon=True)
        self._follower.start()

    # -- the worker's side ----------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version that requests see; None before the first install."""
        return self._version

    @property
    def ready(self) -> bool:
        """A complete version is installed and nothing has torn it."""
        return self._version is not None and not self._torn

    def sync(self, version: int | None, timeout_s: float) -> int:
        """Install the newest version, or wait for `version` (or a newer one), and return what is installed.

        Raises:
            StallError: nothing to install came within `timeout_s`; the message says what it waits for.
            SyncAborted, SyncError, PlanError: the attempt, or planning, failed; the worker keeps what it had.
        """
        try:
            return self._await(version, timeout_s, self._apply)
        finally:
            self.release()

    def stage(self, version: int | None, timeout_s: float) -> int:
        """Wait until a version can be installed, and keep it beside the live weights until `sync` or `release`.

        Workers of one engine do this first, so that they can agree on a version before any of them flips.

        Returns:
            The version that `sync` would install, or has installed.

        Raises:
            ValueError: in place nothing lies beside the live weights.
            Exception: as `sync`.
        """
        if self._install is InstallMode.IN_PLACE:
            raise ValueError("install='in_place' writes the live weights at once; only 'shadow' can be staged")
        return self._await(version, timeout_s, self._keep)

    def release(self) -> None:
        """What was staged may be superseded by a newer version again. Idempotent."""
        with self._cond:
            self._kept_until = None
            self._cond.notify_all()

    def confirm(self, timeout_s: float = 5.0) -> None:
        """Wait until the registry knows what is installed here; it learns it later otherwise."""
        if self._news_of_flip is not None:
            with contextlib.suppress(ray.exceptions.RayError, RegistrationError):  # it learns it when we join again
                call(self._news_of_flip, timeout_s)

    def _await(self, version: int | None, timeout_s: float, attempt: Callable[[int | None], int | None]) -> int:
        """Wait until `attempt`, under the condition, has a version."""
        deadline = time.monotonic() + timeout_s
        wanted = version if version is not None else self._open_version()
        with self._cond:
            self._callers += 1
            if self._pull is not None and (wanted is None or self._told):
                self._error = None
            self._cond.notify_all()
            try:
                while (found := attempt(wanted)) is None:
                    error = self._fatal or self._error_for(wanted)
                    if error is not None:
                        self._told = True
                        raise error
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise StallError(self._why_waiting(wanted, timeout_s))
                    self._cond.wait(remaining)
            finally:
                self._callers -= 1
            return found

    def rollback(self) -> int:
        """Make the version before visible again, and return it.

        Raises:
            SyncError: it is not there any more, or never was; the message says why.
        """
        with self._cond:
            if self._previous is None:
                raise SyncError(
                    f"worker {self._worker!r} cannot roll back from version {self._version}: {self._no_way_back()}"
                )
            self._staged = self._previous
            try:
                self._flip()
            except SyncError:
                self._staged = None  # it stays where it is, and the next sync must not bring it back
                raise
            self._previous = None  # one step only: forward again is the next version
            version = self._version
        self.confirm()
        assert version is not None
        return version

    def _no_way_back(self) -> str:
        if self._install is InstallMode.IN_PLACE:
            return "in_place writes over it; use install='shadow'"
        destinations = self._prepared.destinations
        if destinations is not None and not destinations.keeps_previous:
            return "its engine converts weights as it takes them in, and the version before is not kept in their form"
        if self._writing or self._staged is not None:
            return "a newer one is pulled into its place"
        return "it holds no version before that"

    def close(self) -> None:
        """Leave the service and release memory and registrations. Idempotent."""
        with self._cond:
            if self._closed:
                return
            self._closed, self._kept_until = True, None
            self._cond.notify_all()
        with contextlib.suppress(Exception):
            call(self._registry.unregister_consumer.remote(*self._me), timeout_s=5)
        self._lifeline.close()
        follower = getattr(self, "_follower", None)
        if follower is not None and follower is not threading.current_thread():
            follower.join(self._options.long_poll_s + 5)
        if self._pull is not None:
            self._pull.close()
        self._prepared.close()
        if self.pauses is not None:
            self.pauses.close()

    # -- installing, under the condition --------------------------------------------------------------

    def _apply(self, wanted: int | None) -> int | None:
        """Flip a staged version in if there is one; the version installed, if it satisfies the caller."""
        if self._staged is not None and not self._writing:
            self._flip()
        return self._satisfying(None if self._torn else self._version, wanted)

    def _keep(self, wanted: int | None) -> int | None:
        """The version that a flip would bring, kept from being superseded, if it satisfies the caller."""
        staged = None if self._writing else self._staged
        found = self._satisfying(staged if staged is not None or self._torn else self._version, wanted)
        if found is not None:
            self._kept_until = time.monotonic() + self._options.stall_timeout_s
        return found

    @staticmethod
    def _satisfying(version: int | None, wanted: int | None) -> int | None:
        return version if version is not None and (wanted is None or version >= wanted) else None

    def _flip(self) -> None:
        """What is staged becomes what requests see, together with its number."""
        destinations = self._prepared.destinations
        assert destinations is not None
        with self._engine_held(InstallMode.SHADOW):  # in place it is held since the pull began
            version, self._staged, self._torn = self._staged, None, True
            destinations.flip()
            self._flips += 1
            try:
                self._target.install()
            except Exception as error:
                raise self._install_failed(version, error) from error
            self._previous = self._version if destinations.keeps_previous else None
            self._version, self._torn = version, False
        self._news_of_flip = self._registry.installed.remote(*self._me, self._version, self._flips)

    def _install_failed(self, version: int | None, error: Exception) -> SyncError:
        """The engine could not take in what was pulled: it has some of two versions."""
        why = f"{type(error).__name__}: {error}"
        failure = SyncError(
            f"version {version} was pulled into worker {self._worker!r}, but its engine could not take it in ({why}); "
            "it is torn, and not ready until a newer version is installed"
        )
        self._error, self._failed_version, self._previous = failure, version, None
        self._told = self._install is InstallMode.SHADOW  # whose caller gets it from here
        self._registry.installed.remote(*self._me, version, self._flips, str(failure))
        return failure

    @contextlib.contextmanager
    def _engine_held(self, install: InstallMode) -> Iterator[None]:
        """The engine at a step boundary, where this install mode needs it. The block lets go in any case, so the lease
        is only a bound.

        Raises:
            SyncError: the engine does not pause.
        """
        if self.pauses is None or self._install is not install:
            yield
            return
        try:
            self.pauses.hold("install", self._options.stall_timeout_s)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise SyncError(f"the engine of worker {self._worker!r} does not pause ({why})") from error
        try:
            yield
        finally:
            self.pauses.release("install")

    def _error_for(self, wanted: int | None) -> WeightsyncError | None:
        """The error that ends a wait for `wanted`: a failed plan, or a failed attempt at it or a newer one."""
        if self._failed_version is None or wanted is None or self._failed_version >= wanted:
            return self._error
        return None

    def _open_version(self) -> int | None:
        """The version being synced now, if this worker is a member."""
        try:
            return call(self._registry.open_version.remote(*self._me))
        except (MembershipLostError, ray.exceptions.RayActorError):  # the follower is about to join again
            return None

    def _why_waiting(self, wanted: int | None, timeout_s: float) -> str:
        what = "a first version" if wanted is None else f"version {wanted}"
        try:
            why = call(self._registry.explain.remote(*self._me), timeout_s=5)
        except Exception as error:
            why = f"the registry does not answer ({type(error).__name__})"
        return f"worker {self._worker!r} waited {timeout_s:g} s for {what}: {why}"

    # -- the follower ---------------------------------------------------------------------------------

    @property
    def _me(self) -> tuple[int, str]:
        return self.consumer_id, self._token

    def _join(self) -> None:
        grant = call(
            self._registry.register_consumer.remote(
                self._worker,
                self._install.value,
                this_node(),
                os.getpid(),
                MemberHistory(self._version, self._last_epoch, self._torn),
            )
        )
        self.consumer_id, self._token = grant.consumer_id, grant.token
        self._lifeline = Lifeline(grant.lifeline, grant.consumer_id, grant.token, self._options.lease_s)
        self._generation = 0

    def _follow(self) -> None:
        """Do what the registry says next, until closed or replaced."""
        while not self._closed and self._fatal is None:
            try:
                work = call(self._registry.next_work.remote(*self._me, self._generation, self._last_epoch))
                if isinstance(work, LayoutSnapshot):
                    self._plan(work)
                elif isinstance(work, EpochBegin):
                    self._last_epoch = work.epoch
                    self._attend(work)
            except (MembershipLostError, ray.exceptions.RayActorError) as error:
                if not self._rejoin(error):
                    return
            except Exception as error:
                self._stop(error)
                return

    def _rejoin(self, error: Exception) -> bool:
        """This process was taken for dead and is not, or the registry restarted: be a member again."""
        with self._cond:
            self._writing = False
            if self._closed:
                return False
        lost_registry = isinstance(error, ray.exceptions.RayActorError)
        if lost_registry and not await_registry(self._options.service, self._registry):
            self._stop(error)
            return False
        log.warning("worker %s joins again: %s", self._worker, error)
        self._lifeline.close()
        try:
            self._join()
        except Exception as refused:
            self._stop(refused)
            return False
        return True

    def _stop(self, error: Exception) -> None:
        """This worker takes part in nothing more, and every `sync` from now on says why."""
        with self._cond:
            if not self._closed:
                log.warning("worker %s stops following: %s", self._worker, error)
            self._fatal = (
                error
                if isinstance(error, WeightsyncError)
                else SyncError(f"worker {self._worker!r} lost the registry ({type(error).__name__}: {error})")
            )
            self._cond.notify_all()
        self._lifeline.close()  # nobody must wait for it

    def _plan(self, layout: LayoutSnapshot) -> None:
        """Record once per manifest, plan and register once per layout, and tell the registry."""
        self._generation = layout.generation
        if self._pull is not None:
            self._pull.close()
            self._pull = None
        try:
            pull, facts = self._prepared.make(layout, self.consumer_id)
        except Exception as error:
            failure = error if isinstance(error, WeightsyncError) else _loader_error(self._worker, error)
            with self._cond:
                self._error, self._failed_version, self._pull = failure, None, None
                self._cond.notify_all()
            call(self._registry.plan_failed.remote(*self._me, layout.generation, str(failure)))
            return
        with self._cond:
            self._pull, self._error = pull, None
        call(self._registry.planned.remote(*self._me, layout.generation, facts))

    def _attend(self, begin: EpochBegin) -> None:
        """Take part in one epoch."""
        if self._install is InstallMode.IN_PLACE and not self._await_caller(begin):
            return
        try:
            if begin.refusal is not None:
                raise SyncAborted(begin.refusal)
            in_place = self._install is InstallMode.IN_PLACE
            if in_place and not call(self._registry.start_pull.remote(*self._me, begin.epoch)):
                return
            with self._engine_held(InstallMode.IN_PLACE):
                self._take_part(begin)
        except (SyncError, ray.exceptions.RayError) as error:
            self._attempt_failed(begin, error)

    def _take_part(self, begin: EpochBegin) -> None:
        stats = self._pull_version(begin)
        refusal = call(self._registry.pulled.remote(*self._me, begin.epoch, stats))
        with self._cond:
            self._writing = False
            if refusal is None:
                self._staged, self.last_pull, self._error = begin.version, stats, None
                if self._install is InstallMode.IN_PLACE:
                    with contextlib.suppress(SyncError):  # `sync`, which waits, raises it
                        self._flip()
            else:
                self._torn = self._torn or self._install is InstallMode.IN_PLACE
                self._failed_version, self._told = begin.version, False
                self._error = SyncAborted(
                    f"version {begin.version} (epoch {begin.epoch}) {refusal}; worker {self._worker!r} keeps "
                    f"version {self._version}" + (" but is torn until the next sync" if self._torn else "")
                )
            self._cond.notify_all()

    def _await_caller(self, begin: EpochBegin) -> bool:
        """In place the engine must hold still: wait until its thread is inside `sync`."""
        deadline = time.monotonic() + self._options.stall_timeout_s
        with self._cond:
            while not self._callers and not self._closed:
                if time.monotonic() > deadline:
                    return False
                self._cond.wait(1.0)
                if not self._callers and call(self._registry.open_version.remote(*self._me)) != begin.version:
                    break  # that attempt is over; start_pull says how it ended
            return not self._closed

    def _pull_version(self, begin: EpochBegin) -> PullStats:
        with self._cond:
            while self._kept_until is not None and (kept := self._kept_until - time.monotonic()) > 0:
                self._cond.wait(kept)
            self._writing, self._staged, self._previous, self._error = True, None, None, None
            if self._install is InstallMode.IN_PLACE:
                self._torn = True
        assert self._pull is not None
        attempt = Attempt(self._registry, *self._me, begin, self._options.stall_timeout_s)
        try:
            return self._pull.run(attempt)
        finally:
            attempt.close()

    def _attempt_failed(self, begin: EpochBegin, error: Exception) -> None:
        failure = error if isinstance(error, WeightsyncError) else SyncError(str(error))
        with self._cond:
            self._writing, self._told = False, False
            self._error, self._failed_version = failure, begin.version
            self._cond.notify_all()
        wrong = isinstance(failure, DigestMismatchError)  # at its source, for all we know: everyone's failure
        fault = Fault.VERIFICATION if wrong else Fault.PULL_FAILED
        call(self._registry.pull_failed.remote(*self._me, begin.epoch, str(failure), fault))
        if isinstance(failure, ReadHungError):
            self._stop(SyncError(f"{failure}; it may still write, so this worker must be restarted"))


def _loader_error(worker: str, error: Exception) -> WeightsyncError:
    """A worker's own loader raised while it was recorded (an unknown name, a wrong shape, ...)."""
    return RegistrationError(
        f"worker {worker!r}: its loader failed while its copies were recorded: {type(error).__name__}: {error}"
    )
