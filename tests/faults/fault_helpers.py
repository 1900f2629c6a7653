"""Trainers and workers as processes that can be killed, stopped and held at a chosen point of a sync."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray
import torch
from helpers import RowSource, equal, model, start_registry

from weightsync.actors.staged_pull import StagedPull
from weightsync.actors.transport import ReadHungError
from weightsync.protocol.errors import SyncError
from weightsync.protocol.status import SyncReport
from weightsync.service import Publisher, ServiceHandle, Settings, StateDictTarget, Subscriber, start


class _GatheringRows(RowSource):
    """Gathers whole tensors, as every rank of an FSDP trainer does in staged mode; fails where it is told to."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(model(0), rank, world)
        self.full = model(0)
        self.fail_at: str | None = None

    def load(self, full: dict[str, torch.Tensor]) -> None:
        self.full = full

    def gather(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        if self.fail_at in names:
            raise FloatingPointError(f"no memory left to gather {self.fail_at} (injected)")
        return {name: self.full[name] for name in names}

    def held_names(self) -> tuple[str, ...]:
        return tuple(self.full)


@ray.remote(num_cpus=0, max_concurrency=4)
class FaultyTrainer:
    """A trainer rank that says where its processes are, and may raise while it gathers."""

    def __init__(self, service: str, rank: int, world: int, mode: str = "live") -> None:
        """In mode "hsdp" ranks 2i and 2i + 1 hold the same rows."""
        if mode == "staged":
            self._source: RowSource = _GatheringRows(rank, world)
        elif mode == "hsdp":
            self._source = RowSource(model(0), rank // 2, world // 2)
        else:
            self._source = RowSource(model(0), rank, world)
        self._publisher = Publisher(service, rank, world, self._source, mode="staged" if mode == "staged" else "live")

    def publish(self, version: int, timeout: float = 30.0) -> tuple[SyncReport, float]:
        """(report, seconds `publish` took)."""
        self._source.load(model(version))
        started = time.monotonic()
        return self._publisher.publish(version, timeout), time.monotonic() - started

    def pid(self) -> int:
        return os.getpid()

    def usage(self) -> dict[str, int]:
        return usage()

    def fail_at(self, name: str | None) -> None:
        """Gathering this name raises from now on."""
        self._source.fail_at = name  # type: ignore[union-attr]

    def close(self) -> None:
        self._publisher.close()


class _Engine:
    """Counts its pauses."""

    def __init__(self) -> None:
        self.paused, self.pauses = False, 0

    def pause(self) -> None:
        assert not self.paused
        self.paused, self.pauses = True, self.pauses + 1

    def resume(self) -> None:
        assert self.paused
        self.paused = False


@ray.remote(num_cpus=0)
class PausingDriver:
    """A driver that holds a worker's engine for as long as it lives."""

    def __init__(self, worker: Any, lease_s: float) -> None:
        self._worker, self._lease_s = worker, lease_s
        ray.get(worker.pause.remote(lease_s))
        threading.Thread(target=self._renew, daemon=True).start()

    def _renew(self) -> None:
        while True:
            time.sleep(self._lease_s / 4)
            ray.get(self._worker.pause.remote(self._lease_s))

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0, max_concurrency=4)
class FaultyWorker:
    """A worker whose follower can be held at a point of the next pull: "pulling", "freeing" or "starting"."""

    def __init__(self, service: str, name: str, install: str = "shadow") -> None:
        self._tensors = {n: torch.zeros_like(t) for n, t in model(0).items()}
        self._engine = _Engine()
        self._subscriber = Subscriber(
            service, name, StateDictTarget(self._tensors), install=install, engine=self._engine
        )
        self._reached = threading.Event()
        self._go_on = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def start_reader(self) -> None:
        """A request thread: again and again, between engine steps, it hashes all weights and their version."""
        self._engine_step = threading.Lock()
        self._seen: list[tuple[int | None, int]] = []
        self._reading = True
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while self._reading:
            with self._engine_step:
                version = self._subscriber.version
                seen = (version, digest(self._tensors))
                if version is not None and self._seen[-1:] != [seen]:
                    self._seen.append(seen)
            time.sleep(0.001)

    def step_to(self, version: int, timeout: float = 20.0) -> int:
        """Engine steps until a version is installed; what is staged is applied between requests."""
        deadline = time.monotonic() + timeout
        while (self._subscriber.version or 0) < version and time.monotonic() < deadline:
            with self._engine_step:
                self._subscriber.sync(timeout=timeout)
            time.sleep(0.001)
        return self._subscriber.version or 0

    def stop_reader(self) -> list[tuple[int | None, int]]:
        """(version, digest) as requests saw them, repeats dropped."""
        self._reading = False
        return self._seen

    def usage(self) -> dict[str, int]:
        return usage() | {"registered_bytes": self._subscriber._agent._prepared.transport.registered_bytes}  # type: ignore[union-attr]

    def hold_at(self, point: str) -> None:
        """From now on the follower stops at this point of a pull."""
        self._reached.clear()
        self._go_on.clear()
        agent = self._subscriber._agent
        pull = agent._pull
        assert pull is not None
        if point == "starting":
            original = agent._attend
            agent._attend = self._held(original)  # type: ignore[method-assign]
        elif point == "pulling":
            transport = pull._transport
            transport.post = self._held(transport.post)  # type: ignore[method-assign]
        elif point == "freeing":
            pull._free_all = self._held(pull._free_all)  # type: ignore[union-attr,method-assign]
        else:
            raise ValueError(point)

    def _held(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            self._reached.set()
            self._go_on.wait()
            return original(*args, **kwargs)

        return held

    def slow_down(self, seconds: float) -> None:
        """From now on reads arrive one after the other, this far apart, as over a slow link."""
        pull = self._subscriber._agent._pull
        assert pull is not None
        transport = pull._transport
        original, link_free_at = transport.post, 0.0

        def slow(*args: Any) -> Callable[[], bool]:
            nonlocal link_free_at
            link_free_at = due = max(link_free_at, time.monotonic()) + seconds
            arrived = original(*args)
            return lambda: time.monotonic() > due and arrived()

        transport.post = slow  # type: ignore[method-assign]

    def corrupt(self, times: int) -> None:
        """A bit of "embed.weight" flips after the next so many arrivals of its bytes."""
        agent = self._subscriber._agent
        pull, left = agent._pull, [times]
        assert pull is not None
        assert agent._prepared.destinations is not None
        transport = pull._transport
        landed = agent._prepared.destinations.buffers["embed.weight"].view(torch.uint8)
        flipped: dict[int, int] = {}

        def flipping(original: Callable[..., Any], where: Callable[..., torch.Tensor]) -> Callable[..., Any]:
            def arrive(*args: Any, **kwargs: Any) -> Any:
                outcome = original(*args, **kwargs)
                memory = where(*args).view(-1)
                if left[0] and int(memory[5]) != flipped.get(memory.data_ptr()):  # what arrived was something else
                    left[0] -= 1
                    memory[5] ^= 8
                    flipped[memory.data_ptr()] = int(memory[5])
                return outcome

            return arrive

        if isinstance(pull, StagedPull):
            transport.fetch_slot = flipping(transport.fetch_slot, lambda *args: args[2])  # type: ignore[method-assign]
        else:
            post = transport.post
            transport.post = lambda *args: flipping(post(*args), lambda: landed)  # type: ignore[method-assign]

    def pause(self, lease_s: float) -> None:
        self._subscriber.pause(lease_s)

    def resume(self) -> None:
        self._subscriber.resume()

    def rollback(self) -> int:
        return self._subscriber.rollback()

    def engine(self) -> tuple[bool, int]:
        """(whether it is paused, how often it was)."""
        return self._engine.paused, self._engine.pauses

    def break_next_pull(self, hangs: bool = False) -> None:
        """The next read fails, or is given up as hanging, as if the link did; the ones after it work."""
        pull = self._subscriber._agent._pull
        assert pull is not None
        transport, original = pull._transport, pull._transport.post

        def broken(*args: Any, **kwargs: Any) -> None:
            transport.post = original  # type: ignore[method-assign]
            raise ReadHungError("nothing came (injected)") if hangs else SyncError("the link broke (injected)")

        transport.post = broken  # type: ignore[method-assign]

    def reached(self, timeout: float = 20.0) -> bool:
        return self._reached.wait(timeout)

    def go_on(self) -> None:
        self._go_on.set()

    def sync(self, version: int | None = None, timeout: float = 30.0) -> int:
        return self._subscriber.sync(version, timeout)

    def holds(self, version: int) -> bool:
        return equal(self._tensors, model(version))

    def state(self) -> tuple[int | None, bool]:
        return self._subscriber.version, self._subscriber.ready

    def close(self) -> None:
        self._subscriber.close()


class Scene:
    """A service, its trainers and its workers."""

    def __init__(
        self,
        *,
        trainers: int = 2,
        install: str = "shadow",
        mode: str = "live",
        service: ServiceHandle | None = None,
        http: bool = False,
        **settings: object,
    ) -> None:
        """In a service of its own with these settings, with an ingress if `http` says so, or in one that runs."""
        defaults = {"http_port": 0, "long_poll_s": 1.0, "lease_s": 20.0, "stall_timeout_s": 60.0}
        begin = start if http else start_registry
        self.service = service or begin(
            f"f{secrets.token_hex(3)}",
            settings=Settings(**{**defaults, **settings}),  # type: ignore[arg-type]
        )
        self.install = install
        self.mode = mode
        self.version = 0
        self.trainers = [FaultyTrainer.remote(self.service.name, r, trainers, mode) for r in range(trainers)]
        self.workers: dict[str, Any] = {}
        ray.get([trainer.pid.remote() for trainer in self.trainers])

    def replace_trainer(self, rank: int) -> None:
        """A new process takes the place of a dead rank."""
        self.trainers[rank] = FaultyTrainer.remote(self.service.name, rank, len(self.trainers), self.mode)
        ray.get(self.trainers[rank].pid.remote())

    def set_workers(self, count: int) -> None:
        """Exactly w0 and up are alive afterwards, and all of them have installed the newest version."""
        wanted = [f"w{i}" for i in range(count)]
        for name in set(self.workers) - set(wanted):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self.workers.pop(name).close.remote(), timeout=10)
        missing = [name for name in wanted if name not in self.workers or not self._alive(name)]
        self.workers.update({name: self.worker(name, wait=False) for name in missing})
        ray.get([self.workers[name].pid.remote() for name in missing])
        self.check_sync(wanted)

    def _alive(self, name: str) -> bool:
        try:
            ray.get(self.workers[name].pid.remote(), timeout=10)
        except ray.exceptions.RayError:
            return False
        return True

    def worker(self, name: str, wait: bool = True) -> Any:
        worker = FaultyWorker.remote(self.service.name, name, self.install)
        if wait:
            ray.get(worker.pid.remote())
        return worker

    def publish(self) -> list[Any]:
        """Start the next version on every rank."""
        self.version += 1
        return [trainer.publish.remote(self.version) for trainer in self.trainers]

    def check_sync(self, names: Sequence[str], evicted: Sequence[str] = ()) -> SyncReport:
        """One whole sync that exactly these workers install, bit for bit."""
        publishing = self.publish()
        assert ray.get([self.workers[n].sync.remote(self.version) for n in names]) == [self.version] * len(names)
        report, _ = ray.get(publishing)[0]
        assert report.installed == sorted(names)
        assert report.evicted == sorted(evicted)
        assert all(ray.get([self.workers[n].holds.remote(self.version) for n in names]))
        return report

    def check_rank_1_is_replaced(self, moment: str, within_s: float) -> None:
        """Of ranks of which two and two hold the same, 1 is killed while workers are held at a moment of a sync."""
        for worker in self.workers.values():
            ray.get(worker.hold_at.remote(moment))
        pid = ray.get(self.trainers[1].pid.remote())
        publishing = self.publish()
        assert all(ray.get([w.reached.remote() for w in self.workers.values()]))
        kill(pid)
        died = time.monotonic()
        ray.get([w.go_on.remote() for w in self.workers.values()])
        for rank in set(range(len(self.trainers))) - {1}:
            report, _ = ray.get(publishing[rank], timeout=within_s)
            assert (report.installed, report.evicted, report.lost_ranks) == (["w0", "w1"], [], [1])
        assert time.monotonic() - died < within_s
        for worker in self.workers.values():
            assert ray.get(worker.sync.remote(self.version)) == self.version
            assert ray.get(worker.holds.remote(self.version))
        self.replace_trainer(1)
        for _ in range(3):
            assert self.check_sync(["w0", "w1"]).lost_ranks == []

    def pid(self, name: str) -> int:
        return int(ray.get(self.workers[name].pid.remote()))

    def close(self) -> None:
        for member in (*self.workers.values(), *self.trainers):
            with contextlib.suppress(Exception):
                ray.kill(member)
        self.service.shutdown()


def digest(tensors: dict[str, torch.Tensor]) -> int:
    """Of all bits of all tensors; whoever mixes two versions gets another one."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def usage() -> dict[str, int]:
    """What this process holds now."""
    process = psutil.Process()
    return {"rss": process.memory_info().rss, "fds": process.num_fds(), "threads": process.num_threads()}


def ingress_processes(service: str) -> list[psutil.Process]:
    """Serve's replicas for a service of this name, on any Ray of this machine."""
    title = f"ServeReplica:weightsync-{service}:ingress"
    return [p for p in psutil.process_iter(["cmdline"]) if title in " ".join(p.info["cmdline"] or ())]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
