"""The processes a bench runs between, and everything else that has to be gone when it ends.

Members are spawned once and take one layout after another, because starting a process takes seconds; a way that
leaves something behind in its processes (a thread that spins) gets members of its own for its turn. Services of
weightsync stay up between turns, without members.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from weightsync.service.api import ServiceHandle, start
from weightsync.service.bench.layout import Layout
from weightsync.service.bench.members import leave, set_version, spawn, take_part, wrong_tensors
from weightsync.service.bench.memory import SHARED_MEMORY
from weightsync.service.interrupts import Interrupts
from weightsync.service.settings import Settings

CALL_TIMEOUT_S = 120.0
"""No step of any way takes as long; one that does hangs."""

_FOLDER_PREFIX = "weightsync-bench-"


@dataclass
class Cast:
    """The members of one layout."""

    layout: Layout
    trainers: list[Any]
    workers: list[Any]
    stage: Stage

    @property
    def members(self) -> list[Any]:
        return [*self.trainers, *self.workers]

    def each(self, actors: Sequence[Any], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(member, *arguments) in all of them at once; their results."""
        return ray.get([actor.do.remote(function, *arguments) for actor in actors], timeout=CALL_TIMEOUT_S)

    def by_worker(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """As `each`, over the workers, the i-th with the i-th arguments."""
        calls = [worker.do.remote(function, *given) for worker, given in zip(self.workers, arguments, strict=True)]
        return ray.get(calls, timeout=CALL_TIMEOUT_S)

    def set_version(self, version: int) -> None:
        self.each(self.trainers, set_version, version)

    def wrong(self, version: int) -> list[str]:
        """What is not as it must be, in words."""
        found = self.each(self.workers, wrong_tensors, version)
        return [f"worker {index}: wrong bytes in {_some(names)}" for index, names in enumerate(found) if names]


class Stage:
    """Ray, services, members and files of one bench.

    Example:
        >>> with Stage(Interrupts()) as stage, stage.cast(layout) as cast: ...  # doctest: +SKIP
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._mark = secrets.token_hex(3)
        self._services: dict[str, ServiceHandle] = {}
        self._trainers: list[Any] = []
        self._workers: list[Any] = []
        self._others: list[Any] = []
        self._version = 0
        self.folder = SHARED_MEMORY / f"{_FOLDER_PREFIX}{self._mark}"
        self._claimed: int | None = None

    def __enter__(self) -> Stage:
        _sweep()
        self.folder.mkdir(mode=0o700)
        self._claimed = _claim(self.folder)
        try:
            self.service()  # brings Ray up
        except BaseException:  # Ctrl-C too
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with self._interrupts.noted():
            self.close()

    def next_version(self) -> int:
        """Above every earlier one, whichever way moves it."""
        self._version += 1
        return self._version

    def service(self, **settings: Any) -> ServiceHandle:
        """The service with these settings; started at the first call for them."""
        key = repr(sorted(settings.items()))
        if key not in self._services:
            address = None if ray.is_initialized() else "local"
            name = f"bench-{self._mark}-{len(self._services)}"
            self._services[key] = start(name, address, Settings(http_port=0, **settings))
        return self._services[key]

    @contextlib.contextmanager
    def cast(self, layout: Layout) -> Iterator[Cast]:
        """Members with the tensors of a layout."""
        for role, known, wanted in (
            ("trainer", self._trainers, layout.producers),
            ("worker", self._workers, layout.consumers),
        ):
            known += spawn(role, range(len(known), wanted))
        cast = Cast(layout, self._trainers[: layout.producers], self._workers[: layout.consumers], self)
        cast.each(cast.members, take_part, layout)
        try:
            yield cast
        except Exception:
            with contextlib.suppress(Exception):
                cast.each(cast.members, leave)
            raise
        cast.each(cast.members, leave)  # not after Ctrl-C: members may be busy, and end anyway

    @contextlib.contextmanager
    def own_cast(self, layout: Layout) -> Iterator[Cast]:
        """Members for one turn, which end with it."""
        trainers = spawn("trainer", range(layout.producers), tensor_transport=True)
        self._others += trainers
        workers = spawn("worker", range(layout.consumers), tensor_transport=True)
        self._others += workers
        cast = Cast(layout, trainers, workers, self)
        try:
            cast.each(cast.members, take_part, layout)
            yield cast
        finally:
            self._end(self._others)

    def replace_members(self) -> None:
        """End all members: something failed in them, and nobody knows what it left."""
        self._end(self._trainers, self._workers, self._others)

    @staticmethod
    def _end(*groups: list[Any]) -> None:
        for group in groups:
            for actor in group:
                with contextlib.suppress(Exception):
                    ray.kill(actor)
            group.clear()

    def close(self) -> None:
        """End members, services and files, and Ray if it was launched here. Idempotent."""
        try:
            if ray.is_initialized():
                self.replace_members()
                for service in reversed(self._services.values()):  # the one that launched Ray comes last
                    service.shutdown()
            self._services.clear()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._claimed is not None:
                os.close(self._claimed)
                self._claimed = None


def _claim(folder: Path) -> int:
    """Open and lock a folder for as long as the returned descriptor, or this process, lives.

    Raises:
        OSError: another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep() -> None:
    """Remove the folders of benches that were killed."""
    for folder in SHARED_MEMORY.glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = _claim(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def seconds(work: Callable[[], object]) -> float:
    """Wall time of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
