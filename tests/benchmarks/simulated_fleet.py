"""The real registry on one event loop, with hundreds of stub members: how its work grows with ranks x workers.

A stub makes the calls a real member makes, in the same order, and moves no bytes. The thing to watch: CPU seconds are
of the whole loop, stubs included, so they are an upper bound of the registry's; what Ray adds to each call is not in
them, `messages` says how often it would.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

from weightsync.actors.options import RegistryOptions
from weightsync.actors.registry import Registry
from weightsync.protocol.messages import (
    EpochBegin,
    LayoutSnapshot,
    MemberHistory,
    PlanFacts,
    ProducerRegistration,
    PublishMode,
    PullStats,
    RankStats,
    TensorMeta,
)
from weightsync.protocol.shards import PublishedShard, PublishedTensor

TENSORS = 100
WAIT_S = 3600.0
APART_S = 1.0
"""Members that come one by one: every change of state is handled alone."""


class _Method:
    """What `actor.method.remote(...)` needs."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._work(*args))


class StubProducer:
    """A producer actor as the registry and the workers see it: it opens epochs and counts free signals."""

    def __init__(self, messages: Counter[str]) -> None:
        self._messages = messages
        self._awaited: set[int] = set()
        self._freed = asyncio.Event()
        self.watch = _Method(asyncio.Event().wait)
        self.begin_sync = _Method(self._begin_sync)
        self.close = _Method(self._close)

    async def _begin_sync(self, epoch: int, live: tuple[int, ...]) -> None:
        self._messages["producer.begin_sync"] += 1
        self._awaited, self._freed = set(live), asyncio.Event()

    async def _close(self) -> None:
        return

    def free(self, consumer_id: int) -> None:
        self._messages["producer.free_group"] += 1
        self._awaited.discard(consumer_id)
        if not self._awaited:
            self._freed.set()

    async def all_freed(self) -> None:
        await self._freed.wait()


class SimulatedFleet:
    """P ranks and C workers around one registry.

    Args:
        one_sided: workers only read live memory; otherwise they ask producers too, and free at each of them.
    """

    def __init__(self, ranks: int, workers: int, one_sided: bool) -> None:
        self._one_sided = one_sided
        self.messages: Counter[str] = Counter()
        self._world, self._workers = ranks, workers
        self._registry = Registry(
            RegistryOptions(
                service="simulated",
                transport="nixl",
                transport_reason="simulated",
                min_consumers=workers,
                max_consumers=workers,
                lease_s=WAIT_S,
                long_poll_s=WAIT_S,
                stall_timeout_s=WAIT_S,
            )
        )
        self._producers = [StubProducer(self.messages) for _ in range(ranks)]
        self._tokens: list[str] = []
        self._generations = [0] * ranks
        self._following: list[asyncio.Task[None]] = []
        self._version, self._apart_s = 0, 0.0
        self._random = random.Random(0)
        self._installed: asyncio.Queue[int] = asyncio.Queue()

    async def join(self) -> None:
        for rank, producer in enumerate(self._producers):
            grant = await self._call("register_producer", _registration(rank, self._world), producer, MemberHistory())
            self._tokens.append(grant.token)
        for worker in range(self._workers):
            grant = await self._call("register_consumer", f"w{worker}", "shadow", "node", worker, MemberHistory())
            self._following.append(asyncio.ensure_future(self._follow(grant.consumer_id, grant.token)))
        await asyncio.sleep(0)

    async def rejoin(self, rank: int) -> None:
        """A rank leaves, and comes back as another process would: there is a new layout."""
        await self._call("unregister_producer", rank, self._tokens[rank])
        registration = _registration(rank, self._world)
        grant = await self._call("register_producer", registration, self._producers[rank], MemberHistory())
        self._tokens[rank], self._generations[rank] = grant.token, 0

    async def sync(self, apart_s: float = 0.0) -> float:
        """One version; seconds until every rank has its report and every worker has installed.

        Args:
            apart_s: ranks come, and workers pull, at random over so many seconds; 0.0 is all at once.
        """
        self._version, self._apart_s = self._version + 1, apart_s
        begun = time.perf_counter()
        await asyncio.gather(*(self._publish(rank) for rank in range(self._world)))
        for _ in range(self._workers):
            assert await self._installed.get() == self._version
        return time.perf_counter() - begun

    async def leave(self) -> None:
        await self._registry.close()
        await asyncio.gather(*self._following, return_exceptions=True)

    async def _publish(self, rank: int) -> None:
        token = self._tokens[rank]
        await self._some_time()
        grant = await self._call("begin_publish", rank, token, self._version, WAIT_S, self._generations[rank])
        if grant.layout is not None:
            self.messages["names"] += len(grant.layout.names)
            self._generations[rank] = grant.layout.generation
        assert grant.one_sided == self._one_sided
        if not grant.one_sided:
            await self._producers[rank].all_freed()
        report = await self._call("end_publish", rank, token, grant.epoch, RankStats())
        assert len(report.installed) == self._workers

    async def _follow(self, consumer_id: int, token: str) -> None:
        generation = epoch = 0
        while True:
            work = await self._call("next_work", consumer_id, token, generation, epoch)
            if isinstance(work, LayoutSnapshot):
                generation = work.generation
                await self._call("planned", consumer_id, token, generation, PlanFacts(1, not self._one_sided))
            elif isinstance(work, EpochBegin):
                epoch = work.epoch
                await self._pull(consumer_id, token, work)

    async def _pull(self, consumer_id: int, token: str, begin: EpochBegin) -> None:
        await self._some_time()
        for producer in () if begin.one_sided else self._producers:
            producer.free(consumer_id)
        refusal = await self._call("pulled", consumer_id, token, begin.epoch, PullStats(1, 1, 0.0, {"pull": 0.0}))
        assert refusal is None
        await self._call("installed", consumer_id, token, begin.version, begin.version)
        self._installed.put_nowait(begin.version)

    async def _some_time(self) -> None:
        await asyncio.sleep(self._random.random() * self._apart_s)

    async def _call(self, method: str, *args: Any) -> Any:
        self.messages[f"registry.{method}"] += 1
        return await getattr(self._registry, method)(*args)


def _registration(rank: int, world: int) -> ProducerRegistration:
    """One row of each of `TENSORS` tensors."""
    metas = tuple(TensorMeta(f"layers.{i}.weight", "bfloat16", (world, 64)) for i in range(TENSORS))
    table = tuple(
        PublishedTensor(m.name, m.dtype, 2, m.shape, (PublishedShard(f"rank{rank}", 0, 128 * i, (rank, 0), (1, 64)),))
        for i, m in enumerate(metas)
    )
    names = tuple(meta.name for meta in metas)
    mode = PublishMode.LIVE
    return ProducerRegistration(rank, world, mode, metas, table, names, f"rank{rank}", b"", "nixl", "node", rank)


def simulate(shape: tuple[int, int], one_sided: bool, syncs: int) -> dict[str, Any]:
    """A row of the table: seconds, CPU seconds and messages of joining and of a sync."""
    return asyncio.run(_simulate(shape, one_sided, syncs))


async def _simulate(shape: tuple[int, int], one_sided: bool, syncs: int) -> dict[str, Any]:
    fleet = SimulatedFleet(*shape, one_sided)
    cpu = time.process_time()
    await fleet.join()
    await fleet.sync()  # workers plan before the first one opens
    joined = time.process_time() - cpu
    fleet.messages.clear()
    cpu = time.process_time()
    seconds = [await fleet.sync() for _ in range(syncs)]
    at_once = time.process_time() - cpu
    messages = Counter({name: count / syncs for name, count in fleet.messages.items()})
    cpu = time.process_time()
    for _ in range(syncs):
        await fleet.sync(APART_S)
    apart = time.process_time() - cpu
    await fleet.leave()
    return {
        "ranks": shape[0],
        "workers": shape[1],
        "one_sided": one_sided,
        "join_cpu_seconds": joined,
        "seconds_median": median(seconds),
        "cpu_seconds": at_once / syncs,
        "cpu_seconds_apart": apart / syncs,
        "registry_messages": sum(count for name, count in messages.items() if name.startswith("registry.")),
        "messages": dict(messages),
    }
