"""Staged publishing: credit gates gathers, what the source yields is checked, and its errors reach everybody."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import ray
import torch
from helpers import equal

from weightsync.protocol.errors import InvalidLayoutError, SyncAborted, WeightsyncError
from weightsync.service import Publisher, ServiceHandle, StateDictSource, StateDictTarget, Subscriber

LAYERS = 6


def layers(value: float = 0.0) -> dict[str, torch.Tensor]:
    """One gather group each."""
    return {f"layers.{i}.w": torch.full((8, 4), float(value + i)) for i in range(LAYERS)}


class WatchedSource(StateDictSource):
    """Notes how many groups are resident while each one is gathered, and may answer wrongly or raise."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.gathers = 0
        self.answer: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda gathered: gathered

    def gather(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        self.gathers += 1
        return self.answer(dict(super().gather(names)))


def publishing(publisher: Publisher, version: int) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(publisher.publish(version, timeout=20))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("lookahead", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_with_look_ahead_l_exactly_l_plus_1_groups_are_resident(
    make_service: Callable[..., ServiceHandle], lookahead: int
) -> None:
    service = make_service(gather_lookahead=lookahead)
    source, held = WatchedSource(layers(1)), layers()
    with (
        Publisher(service, 0, 1, source, mode="staged") as publisher,
        Subscriber(service, "w0", StateDictTarget(held)) as worker,
    ):
        most_resident = 0

        def watch(gathered: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            nonlocal most_resident
            assert publisher._ring is not None
            most_resident = max(most_resident, len(publisher._ring.resident_groups) + 1)
            return gathered

        source.answer = watch
        transport, may_fetch = worker._agent._pull._transport, threading.Event()  # type: ignore[union-attr]
        fetch = transport.fetch_slot
        transport.fetch_slot = lambda *args: may_fetch.wait(20) and fetch(*args)  # type: ignore[method-assign]
        for version in (1, 2, 3):
            may_fetch.clear()
            source.gathers = most_resident = 0
            thread, outcome = publishing(publisher, version)
            deadline = time.monotonic() + 10
            while source.gathers < lookahead + 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.3)
            assert source.gathers == lookahead + 1, "nobody has freed anything, so there is no credit for more"
            may_fetch.set()
            thread.join(20)
            assert not isinstance(outcome[0], Exception), outcome
            assert source.gathers == LAYERS
            assert most_resident == lookahead + 1
            assert worker.sync(version, 20) == version
            assert equal(held, layers(1))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda g: {}, "the source yields \\[\\] too many and \\['layers.0.w'\\] too few against its held names"),
        pytest.param(lambda g: {**g, "x": torch.ones(1)}, "yields \\['x'\\] too many", marks=pytest.mark.slow),
        (lambda g: {n: t[:3] for n, t in g.items()}, "announced as \\(8, 4\\) float32 and gathered as \\(3, 4\\)"),
        pytest.param(
            lambda g: {n: t.half() for n, t in g.items()}, "gathered as \\(8, 4\\) float16", marks=pytest.mark.slow
        ),
    ],
)
def test_a_source_that_yields_something_else_than_it_said_fails_at_once(
    service: ServiceHandle, fresh: Callable[[], int], wrong: Callable[..., dict[str, torch.Tensor]], words: str
) -> None:
    version = fresh()
    source, held = WatchedSource(layers(1)), layers()
    with (
        Publisher(service, 0, 1, source, mode="staged") as publisher,
        Subscriber(service, "w0", StateDictTarget(held)) as worker,
    ):
        source.answer = wrong
        begun = time.monotonic()
        with pytest.raises(InvalidLayoutError, match=words):
            publisher.publish(version, timeout=20)
        with pytest.raises(SyncAborted, match=words):
            worker.sync(version, 20)
        assert time.monotonic() - begun < 10
        assert equal(held, layers()), "nothing was installed"
        source.answer = lambda gathered: gathered
        publisher.publish(version + 1, timeout=20)
        assert worker.sync(version + 1, 20) == version + 1
        assert equal(held, layers(1))


def test_a_worker_that_asks_late_still_learns_that_its_version_was_given_up(
    service: ServiceHandle, fresh: Callable[[], int]
) -> None:
    version = fresh()
    source, held = WatchedSource(layers(1)), layers()
    with (
        Publisher(service, 0, 1, source, mode="staged") as publisher,
        Subscriber(service, "w0", StateDictTarget(held)) as worker,
    ):
        agent = worker._agent
        source.answer = lambda gathered: {}
        with pytest.raises(InvalidLayoutError):
            publisher.publish(version, timeout=20)
        deadline = time.monotonic() + 20
        while agent._failed_version != version and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(SyncAborted, match=r"'layers.0.w'\] too few"):
            worker.sync(version, 20)
        # one whose long poll missed the epoch altogether gets it told, and how it ended
        begin = ray.get(agent._registry.next_work.remote(*agent._me, agent._generation, agent._last_epoch - 1))
        assert begin.version == version
        assert re.match(rf"version {version} .* was aborted: trainer rank 0", begin.refusal)
        with pytest.raises(ray.exceptions.RayTaskError, match=rf"version {version} .* was aborted: trainer rank 0"):
            ray.get(agent._registry.start_pull.remote(*agent._me, begin.epoch))
        # nobody gets the epoch told that has heard of it, else its follower would spin
        assert ray.get(agent._registry.next_work.remote(*agent._me, agent._generation, begin.epoch)) is None
        # told once: a second attempt at the same version is waited for
        source.answer = lambda gathered: gathered
        thread, outcome = publishing(publisher, version)
        assert worker.sync(version, 20) == version
        thread.join(20)
        assert not isinstance(outcome[0], Exception), outcome
        assert equal(held, layers(1))


def test_a_gather_that_raises_on_one_rank_releases_every_waiter_on_every_rank(
    service: ServiceHandle, fresh: Callable[[], int]
) -> None:
    version = fresh()
    sources, held = [WatchedSource(layers(1)), WatchedSource(layers(1))], layers()

    def out_of_memory(gathered: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "layers.3.w" in gathered:
            raise MemoryError("no memory left for layers.3 (injected)")
        return gathered

    with (
        Publisher(service, 0, 2, sources[0], mode="staged") as first,
        Publisher(service, 1, 2, sources[1], mode="staged") as second,
        Subscriber(service, "w0", StateDictTarget(held)) as worker,
    ):
        for turn in range(10):
            sources[1].answer = out_of_memory
            threads = [publishing(publisher, version + 2 * turn) for publisher in (first, second)]
            with pytest.raises(WeightsyncError, match=r"no memory left for layers.3 \(injected\)"):
                worker.sync(version + 2 * turn, 20)
            for thread, _ in threads:
                thread.join(20)
            assert isinstance(threads[0][1][0], SyncAborted)
            assert "trainer rank 1: MemoryError: no memory left for layers.3" in str(threads[0][1][0])
            assert isinstance(threads[1][1][0], MemoryError)
            sources[1].answer = lambda gathered: gathered
            threads = [publishing(publisher, version + 2 * turn + 1) for publisher in (first, second)]
            assert worker.sync(version + 2 * turn + 1, 20) == version + 2 * turn + 1
            for thread, _ in threads:
                thread.join(20)
            assert equal(held, layers(1))
