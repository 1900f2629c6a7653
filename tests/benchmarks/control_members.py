"""Trainer ranks and workers that sync a small model on a timetable, and a count of the calls that takes.

For `bench_control`. Ranks publish at agreed moments of the machine's monotonic clock, so a sync's seconds do not
contain how unevenly the ranks arrive. The thing to watch: calls are counted in subclasses made here; the classes
that ship are as they are.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
import torch

from weightsync.actors import spawn
from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.actors.producer_actor import ProducerActor
from weightsync.actors.registry import Registry
from weightsync.protocol.messages import TensorMeta
from weightsync.service import Publisher, StateDictTarget, Subscriber


@dataclass(frozen=True)
class Measured:
    """One version."""

    seconds: float
    """Of `publish` on the slowest rank."""
    phases: dict[str, float]
    pulls: dict[str, float]
    """Worker -> seconds from its start to when it holds everything."""


def counting(actor_class: type) -> type:
    """A subclass that counts calls by method, and says and forgets the counts in `counted`."""
    calls: Counter[str] = Counter()  # one actor a process

    def counted(method: Any) -> Any:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def on_loop(*args: Any, **kwargs: Any) -> Any:
                calls[method.__name__] += 1
                return await method(*args, **kwargs)

            return on_loop

        @functools.wraps(method)
        def on_thread(*args: Any, **kwargs: Any) -> Any:
            calls[method.__name__] += 1
            return method(*args, **kwargs)

        return on_thread

    def say(self: Any) -> dict[str, int]:
        said = dict(calls)
        calls.clear()
        return said

    async def say_on_loop(self: Any) -> dict[str, int]:
        return say(self)

    public = inspect.getmembers(actor_class, lambda member: inspect.isfunction(member))
    methods = {name: counted(method) for name, method in public if not name.startswith("_")}
    on_loop = any(inspect.iscoroutinefunction(method) for _, method in public)
    extra = {"counted": say_on_loop if on_loop else say, "pid": lambda self: os.getpid()}
    return type(f"Counting{actor_class.__name__}", (actor_class,), {**methods, **extra})


def count_registry_calls() -> None:
    """Registries that this process spawns from now on count their calls."""
    spawn.Registry = counting(Registry)  # type: ignore[misc]


def tensors(nbytes: int, count: int = 8) -> dict[str, torch.Tensor]:
    """A model of about `nbytes` in `count` layers; rows divide by every world size up to 8."""
    columns = max(1, nbytes // count // 8 // 4)
    return {f"layers.{i}.weight": torch.zeros(8, columns) for i in range(count)}


class _Rows(WeightSource):
    """One rank's even share of the rows of every tensor."""

    def __init__(self, full: dict[str, torch.Tensor], rank: int, world: int) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
        self._offset = rank * 8 // world
        self.parts = {n: t[self._offset : (rank + 1) * 8 // world].clone() for n, t in full.items()}

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(name, "float32", shape) for name, shape in self._shapes.items())

    def shards(self) -> list[LocalShard]:
        return [LocalShard(name, (self._offset, 0), part) for name, part in self.parts.items()]

    def gather(self, names: Any) -> dict[str, torch.Tensor]:
        raise NotImplementedError("published live")

    def held_names(self) -> tuple[str, ...]:
        return tuple(self.parts)


@ray.remote(num_cpus=0)
class Rank:
    """A trainer rank."""

    def __init__(self, service: str, rank: int, world: int, nbytes: int) -> None:
        torch.set_num_threads(1)
        spawn.ProducerActor = counting(ProducerActor)  # type: ignore[misc]
        self._source = _Rows(tensors(nbytes), rank, world)
        self._publisher = Publisher(service, rank, world, self._source)

    def publish(self, first: int, count: int, start_s: float, period_s: float) -> list[Measured]:
        """Versions at their moments."""
        measured = []
        for turn in range(count):
            for part in self._source.parts.values():
                part.fill_(first + turn)
            time.sleep(max(0.0, start_s + turn * period_s - time.monotonic()))
            begun = time.perf_counter()
            report = self._publisher.publish(first + turn, timeout=120)
            pulls = {worker: pull.seconds for worker, pull in report.workers.items()}
            measured.append(Measured(time.perf_counter() - begun, report.phases, pulls))
        return measured

    def pids(self) -> tuple[int, int]:
        """This process, and its producer actor."""
        return os.getpid(), ray.get(self._publisher._actor.pid.remote())

    def counted(self) -> dict[str, int]:
        """Calls that this rank's producer received since it was asked last."""
        return ray.get(self._publisher._actor.counted.remote())

    def close(self) -> None:
        self._publisher.close()


@ray.remote(num_cpus=0)
class Worker:
    """An inference worker that wants the whole model."""

    def __init__(self, service: str, name: str, nbytes: int) -> None:
        torch.set_num_threads(1)
        self._tensors = tensors(nbytes)
        self._subscriber = Subscriber(service, name, StateDictTarget(self._tensors))

    def pid(self) -> int:
        return os.getpid()

    def follow(self, first: int, count: int) -> bool:
        """Install versions as they come; True if the last one arrived whole."""
        for version in range(first, first + count):
            installed = self._subscriber.sync(version, timeout=120)
        return all(bool((tensor == installed).all()) for tensor in self._tensors.values())

    def close(self) -> None:
        self._subscriber.close()


class Fleet:
    """P ranks and C workers of one service, all of them joined.

    Raises:
        SystemExit: a worker did not get the bytes.
    """

    def __init__(self, service: Any, ranks: int, workers: int, nbytes: int) -> None:
        self._service = service
        self._version = service.status().newest_version or 0
        self.ranks = [Rank.remote(service.name, rank, ranks, nbytes) for rank in range(ranks)]
        self.workers = [Worker.remote(service.name, f"w{i}", nbytes) for i in range(workers)]
        ray.get([member.__ray_ready__.remote() for member in (*self.ranks, *self.workers)])

    def sync(self, count: int, period_s: float, stopped: int | None = None, stop_s: float = 0.0) -> list[Measured]:
        """`count` versions.

        Args:
            stopped: a process that gets SIGSTOP as each of them begins, and SIGCONT `stop_s` later.
        """
        first, self._version = self._version + 1, self._version + count
        followed = [worker.follow.remote(first, count) for worker in self.workers]
        start_s = time.monotonic() + 0.3
        if stopped is not None:
            moments = [start_s + turn * period_s for turn in range(count)]
            threading.Thread(target=_stop_at, args=(stopped, moments, stop_s), daemon=True).start()
        published = ray.get([rank.publish.remote(first, count, start_s, period_s) for rank in self.ranks])
        if not all(ray.get(followed)):
            raise SystemExit("a worker does not hold the bytes of the last version")
        return [max(turn, key=lambda one: one.seconds) for turn in zip(*published, strict=True)]

    def counted(self) -> tuple[Counter[str], Counter[str]]:
        """Calls since it was asked last: the registry's, and all producers' together."""
        producers: Counter[str] = Counter()
        for counts in ray.get([rank.counted.remote() for rank in self.ranks]):
            producers.update(counts)
        registry = Counter(ray.get(self._service.registry.counted.remote()))
        return registry, producers

    def close(self) -> None:
        """End every process, and wait until the registry knows."""
        members = [*self.ranks, *self.workers]
        ray.get([member.close.remote() for member in members])
        for member in members:
            ray.kill(member)


def _stop_at(pid: int, moments_s: list[float], stop_s: float) -> None:
    for moment in moments_s:
        time.sleep(max(0.0, moment - time.monotonic()))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stop_s)
        os.kill(pid, signal.SIGCONT)
