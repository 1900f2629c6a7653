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
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch

from weightsync.actors.attempt import Attempt
from weightsync.actors.calibration import measure_link
from weightsync.actors.destinations import Destinations, distinct_copies
from weightsync.actors.digests import DigestMismatchError
from weightsync.actors.interfaces import WeightTarget
from weightsync.actors.lifelines import Lifeline
from weightsync.actors.live_pull import LivePull
from weightsync.actors.options import RegistryOptions
from weightsync.actors.pause import PausableEngine, PauseBracket
from weightsync.actors.spawn import await_registry, call, this_node
from weightsync.actors.staged_pull import StagedPull
from weightsync.actors.transport import Device, Peer, ReadHungError, Transport, create_transport
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.cost_model import LinkCosts
from weightsync.protocol.errors import (
    InvalidLayoutError,
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
    LinkName,
    MemberHistory,
    PlanFacts,
    PublishMode,
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
        self._torn = False
        self._last_epoch = 0
        self._join()
        self._transport: Transport | None = None
        self._recorded: tuple[object, list[RecordedCopy]] | None = None
        self._destinations: Destinations | None = None
        self._pull: LivePull | StagedPull | None = None
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
        deadline = time.monotonic() + timeout_s
        wanted = version if version is not None else self._open_version()
        with self._cond:
            self._callers += 1
            if self._pull is not None and (wanted is None or self._told):
                self._error = None
            self._cond.notify_all()
            try:
                while not self._apply(wanted):
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
            assert self._version is not None
            return self._version

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
                told = self._flip()
            except SyncError:
                self._staged = None  # it stays where it is, and the next sync must not bring it back
                raise
            self._previous = None  # one step only: forward again is the next version
            version = self._version
        with contextlib.suppress(ray.exceptions.RayError, RegistrationError):  # it learns it when we join again
            call(told, timeout_s=5)
        assert version is not None
        return version

    def _no_way_back(self) -> str:
        if self._install is InstallMode.IN_PLACE:
            return "in_place writes over it; use install='shadow'"
        if self._writing or self._staged is not None:
            return "a newer one is pulled into its place"
        return "it holds no version before that"

    def close(self) -> None:
        """Leave the service and release memory and registrations. Idempotent."""
        with self._cond:
            if self._closed:
                return
            self._closed = True
            self._cond.notify_all()
        with contextlib.suppress(Exception):
            call(self._registry.unregister_consumer.remote(*self._me), timeout_s=5)
        self._lifeline.close()
        follower = getattr(self, "_follower", None)
        if follower is not None and follower is not threading.current_thread():
            follower.join(self._options.long_poll_s + 5)
        if self._pull is not None:
            self._pull.close()
        if self._transport is not None:
            self._transport.close()
        if self.pauses is not None:
            self.pauses.close()

    # -- installing, under the condition --------------------------------------------------------------

    def _apply(self, wanted: int | None) -> bool:
        """Flip a staged version in if there is one; True if what is installed satisfies the caller."""
        if self._staged is not None and not self._writing:
            self._flip()
        if self._version is None or self._torn:
            return False
        return wanted is None or self._version >= wanted

    def _flip(self) -> Any:
        """What is staged becomes what requests see, together with its number. Returns the registry's answer to come."""
        assert self._destinations is not None
        with self._engine_held(InstallMode.SHADOW):  # in place it is held since the pull began
            self._destinations.flip()
            self._previous = self._version if self._install is InstallMode.SHADOW else None
            self._version, self._staged, self._torn = self._staged, None, False
        self._flips += 1
        return self._registry.installed.remote(*self._me, self._version, self._flips)

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
        started, self._registration_s = time.monotonic(), 0.0
        try:
            pull = self._prepare(layout)
        except Exception as error:
            failure = error if isinstance(error, WeightsyncError) else _loader_error(self._worker, error)
            with self._cond:
                self._error, self._failed_version, self._pull = failure, None, None
                self._cond.notify_all()
            call(self._registry.plan_failed.remote(*self._me, layout.generation, str(failure)))
            return
        with self._cond:
            self._pull, self._error = pull, None
        facts = PlanFacts(
            bytes_total=pull.bytes_total,
            needs_producers=pull.needs_producers,
            bytes_by_rank=pull.bytes_by_rank,
            plan_s=time.monotonic() - started - self._registration_s,
            registration_s=self._registration_s,
        )
        call(self._registry.planned.remote(*self._me, layout.generation, facts))

    def _prepare(self, layout: LayoutSnapshot) -> LivePull | StagedPull:
        if self._pull is not None:
            self._pull.close()
            self._pull = None
        copies = self._record(layout)
        if self._destinations is None:
            self._destinations = Destinations(self._target.tensors(), copies, self._install)
        if self._transport is None:
            self._transport = create_transport(
                layout.transport,
                f"{self._options.service}:{self._worker}:{secrets.token_hex(4)}",
                serves=False,
            )
        started = time.monotonic()
        self._transport.register(self._destinations.buffers.values())
        self._registration_s = time.monotonic() - started
        actors = call(self._registry.producer_actors.remote(layout.generation))
        peers = [
            Peer(rank, rank, producer.agent_metadata, actor, Device.of(torch.empty(0, device=producer.device)))
            for rank, (producer, actor) in enumerate(zip(layout.producers, actors, strict=True))
        ]
        common = (layout, copies, self._destinations, self._transport, peers, self.consumer_id)
        if layout.mode is PublishMode.STAGED:
            return StagedPull(*common, self._options.num_serve_buffers)
        for peer in peers:
            self._transport.connect(peer)
        costs = self._link_costs(layout, peers, self._transport)
        return LivePull(*common, self._options, costs)

    def _link_costs(self, layout: LayoutSnapshot, peers: Sequence[Peer], transport: Transport) -> dict[int, LinkCosts]:
        """Per rank, what its link costs: as measured between the two nodes before, or now; values set by hand win."""
        assert self._destinations is not None
        device = next(iter(self._destinations.buffers.values())).device
        costs: dict[int, LinkCosts] = {}
        for producer, peer in zip(layout.producers, peers, strict=True):
            link = LinkName(producer.node_id, this_node(), producer.device, str(device))
            known = call(self._registry.link_costs.remote(link))
            if known is None and transport.reads_trainer_memory and self._options.strategy == "auto":
                known = measure_link(transport, peer, producer, device)
                call(self._registry.measured.remote(link, known))
            costs[producer.rank] = (known or LinkCosts()).overridden(self._options.link_costs)
        return costs

    def _record(self, layout: LayoutSnapshot) -> list[RecordedCopy]:
        """The worker's distinct copies; recorded again only if the model itself changed."""
        manifest = {meta.name: (meta.dtype, meta.shape) for meta in layout.manifest}
        if self._recorded is None or self._recorded[0] != manifest:
            canonical = {meta.name: meta.alias_of or meta.name for meta in layout.manifest}
            copies = distinct_copies(self._target.record(manifest), canonical, self._target.tensors())
            if not copies:
                raise InvalidLayoutError(
                    f"worker {self._worker!r} would pull nothing: its loader uses none of the {len(manifest)} "
                    f"published names ({', '.join(list(manifest)[:3])}, ...)"
                )
            self._recorded, self._destinations = (manifest, copies), None
        return self._recorded[1]

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
