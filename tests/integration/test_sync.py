"""Versions move whole and bit for bit between real processes, over every transport and mode."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest
import ray
import torch
from helpers import Trainer, Worker, equal, model
from torch import nn

from weightsync.protocol.errors import SyncError
from weightsync.protocol.messages import MemberHistory
from weightsync.service import (
    ModuleSource,
    ModuleTarget,
    Publisher,
    ServiceHandle,
    Settings,
    StateDictSource,
    StateDictTarget,
    Subscriber,
    connect,
    list_services,
    start,
)


# In the default run `test_transports` moves more, by every transport, in both modes and both installs.
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["nixl", "object_store"])
@pytest.mark.parametrize("install", ["shadow", "in_place"])
def test_two_ranks_reach_two_workers_bit_for_bit_version_after_version(
    make_service: Callable[..., ServiceHandle], transport: str, install: str
) -> None:
    service = make_service(transport=transport, min_consumers=2)
    trainers = [Trainer.remote(service.name, rank, 2) for rank in range(2)]
    workers = [Worker.remote(service.name, f"w{i}", install) for i in range(2)]
    ray.get([worker.ready.remote() for worker in workers])
    for version in range(1, 6):
        publishing = [trainer.publish.remote(version) for trainer in trainers]
        assert ray.get([worker.sync.remote(version) for worker in workers]) == [version, version]
        reports = ray.get(publishing)
        assert all(ray.get([worker.holds.remote(version) for worker in workers]))
        assert not any(ray.get([worker.holds.remote(version - 1) for worker in workers]))
        size = sum(t.nbytes for t in model(version).values())
        assert reports[0] == reports[1]
        assert reports[0].bytes == reports[0].needed_bytes == 2 * size
        assert reports[0].installed == ["w0", "w1"]
        assert reports[0].transport == transport
    ray.get([member.close.remote() for member in (*trainers, *workers)])


@pytest.mark.parametrize("transport", ["nixl", pytest.param("object_store", marks=pytest.mark.slow)])
def test_staged_groups_go_through_a_bounded_ring(make_service: Callable[..., ServiceHandle], transport: str) -> None:
    service = make_service(transport=transport, gather_lookahead=0)
    tensors = model(0)
    tensors["transposed"] = torch.randn(6, 4).t()
    with Publisher(service, 0, 1, StateDictSource(tensors), mode="staged") as publisher:
        held = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        with Subscriber(service, "w0", StateDictTarget(held)) as subscriber:
            for version in (1, 2, 3):
                for name, values in model(version).items():
                    tensors[name].copy_(values)
                tensors["transposed"].add_(1)
                report = publisher.publish(version, timeout=30)
                assert subscriber.sync(version, timeout=30) == version
                assert equal(held, tensors)
                assert report.bytes == report.needed_bytes == sum(t.nbytes for t in tensors.values())


def test_publish_then_sync_works_in_one_thread_in_shadow_mode(service: ServiceHandle, fresh: Callable[[], int]) -> None:
    version = fresh()
    source, target = model(1), {n: torch.zeros_like(t) for n, t in model(1).items()}
    with Subscriber(service, "w0", StateDictTarget(target)) as subscriber:
        assert not subscriber.ready
        with Publisher(service, 0, 1, StateDictSource(source)) as publisher:
            publisher.publish(version, timeout=30)
            assert subscriber.version is None
            assert equal(target, {n: torch.zeros_like(t) for n, t in target.items()}), "nothing flips before sync()"
            assert subscriber.sync(timeout=10) == version
            assert subscriber.ready
            assert equal(target, source)


class Tied(nn.Module):
    """An embedding that is also the output head."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        if tie:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("mode", "worker_ties"),
    [
        ("live", True),
        ("staged", False),
        pytest.param("live", False, marks=pytest.mark.slow),
        pytest.param("staged", True, marks=pytest.mark.slow),
    ],
)
def test_tied_weights_move_once_whichever_side_ties(
    service: ServiceHandle, fresh: Callable[[], int], worker_ties: bool, mode: str
) -> None:
    trainer, worker = Tied(tie=True), Tied(tie=worker_ties)
    with (
        Publisher(service, 0, 1, ModuleSource(trainer), mode=mode) as publisher,
        Subscriber(service, "w0", ModuleTarget(worker)) as subscriber,
    ):
        for version in (fresh(), fresh() + 1):
            with torch.no_grad():
                trainer.embed.weight.add_(version)
            report = publisher.publish(version, timeout=30)
            subscriber.sync(version, timeout=30)
            assert torch.equal(worker.embed.weight, trainer.embed.weight)
            assert torch.equal(worker.head.weight, trainer.embed.weight)
            assert (worker.head.weight is worker.embed.weight) == worker_ties
            assert report.bytes == report.needed_bytes == trainer.embed.weight.nbytes


@pytest.mark.parametrize("mode", ["live", pytest.param("staged", marks=pytest.mark.slow)])
def test_a_worker_converts_transposes_and_skips_as_its_loader_says(
    service: ServiceHandle, fresh: Callable[[], int], mode: str
) -> None:
    version = fresh()
    source = {
        "layers.0.w": torch.randn(40, 33),
        "layers.1.w": torch.randn(8, 8),
        "layers.1.gate": torch.randn(4, 6),
        "layers.1.up": torch.randn(4, 6),
        "unused": torch.randn(3),
    }

    class Engine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.zeros(33, 40, dtype=torch.bfloat16), requires_grad=False)
            self.padded = nn.Parameter(torch.full((10, 8), 7.0), requires_grad=False)
            self.gate_up = nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: object) -> None:
            for name, weight in weights:  # type: ignore[attr-defined]
                if name == "layers.0.w":
                    self.low.data.copy_(weight.t())
                elif name == "layers.1.w":
                    self.padded.data[8:].zero_()
                    self.padded.data[:8].copy_(weight)
                elif name in ("layers.1.gate", "layers.1.up"):
                    self.gate_up.data.chunk(2)[name == "layers.1.up"].copy_(weight)

    engine = Engine()
    with (
        Publisher(service, 0, 1, StateDictSource(source), mode=mode) as publisher,
        Subscriber(service, "w0", ModuleTarget(engine)) as subscriber,
    ):
        report = publisher.publish(version, timeout=30)
        subscriber.sync(version, timeout=30)
    assert torch.equal(engine.low, source["layers.0.w"].t().to(torch.bfloat16))
    assert torch.equal(engine.padded[:8], source["layers.1.w"])
    assert bool((engine.padded[8:] == 7).all()), "what no weight fills is the engine's own"
    both = torch.cat([source["layers.1.gate"], source["layers.1.up"]])
    assert torch.equal(engine.gate_up, both.to(torch.bfloat16)), "two conversions into one parameter do not collide"
    assert report.bytes == report.needed_bytes == 4 * (40 * 33 + 64 + 48)


def test_a_worker_that_pulls_nothing_from_most_groups_still_completes(
    service: ServiceHandle, fresh: Callable[[], int]
) -> None:
    for mode in ("live", "staged"):
        source = model(1)
        target = {"layers.1.scale": torch.zeros(5)}
        with (
            Publisher(service, 0, 1, StateDictSource(source), mode=mode) as publisher,
            Subscriber(service, "w0", StateDictTarget(target)) as subscriber,
        ):
            version = fresh()
            report = publisher.publish(version, timeout=30)
            subscriber.sync(version, timeout=30)
            assert torch.equal(target["layers.1.scale"], source["layers.1.scale"])
            assert report.bytes == 20


def test_services_run_side_by_side_and_a_second_start_attaches(
    make_service: Callable[..., ServiceHandle],
) -> None:
    first, second = make_service("alpha"), make_service("beta")
    again = start("alpha", settings=Settings(http_port=0))
    assert again.registry._actor_id == first.registry._actor_id
    assert {"alpha", "beta"} <= set(list_services())
    targets = {}
    for handle, seed in ((first, 1), (second, 2)):
        targets[seed] = {n: torch.zeros_like(t) for n, t in model(1).items()}
        publisher = Publisher(handle.name, 0, 1, StateDictSource(model(1, seed)))
        subscriber = Subscriber(handle.name, "w0", StateDictTarget(targets[seed]))
        publisher.publish(1, timeout=30)
        subscriber.sync(1, timeout=30)
        publisher.close()
        subscriber.close()
    assert equal(targets[1], model(1, 1))
    assert equal(targets[2], model(1, 2))
    first.shutdown()
    assert connect("beta").status().newest_version == 1


def test_http_says_what_the_registry_says(make_service: Callable[..., ServiceHandle]) -> None:
    service = make_service(http=True)
    url = service.status().http_url
    assert url is not None
    base = url.rstrip("/")
    assert httpx.get(f"{base}/healthz").json()["status"] == "ok"
    assert httpx.get(f"{base}/v1/status").json()["service"] == service.name
    metrics = httpx.get(f"{base}/metrics").text
    assert f'weightsync_up{{service="{service.name}"}} 1.0' in metrics
    ray.kill(service.registry)
    assert httpx.get(f"{base}/healthz").status_code == 503
    assert httpx.get(f"{base}/v1/status").status_code == 503
    assert f'weightsync_up{{service="{service.name}"}} 0.0' in httpx.get(f"{base}/metrics").text


def test_a_laggard_goes_straight_to_the_newest_version(service: ServiceHandle, fresh: Callable[[], int]) -> None:
    first = fresh()
    source, target = model(1), {n: torch.zeros_like(t) for n, t in model(1).items()}
    with (
        Publisher(service, 0, 1, StateDictSource(source)) as publisher,
        Subscriber(service, "w0", StateDictTarget(target)) as subscriber,
    ):
        for step in (1, 2, 3):
            for name, values in model(step).items():
                source[name].copy_(values)
            publisher.publish(first + step, timeout=30)
        assert subscriber.sync(timeout=10) == first + 3
        assert equal(target, model(3))
        assert subscriber.sync(timeout=10) == first + 3, "nothing newer: answers at once"


def test_a_worker_rolls_back_one_version_until_the_next_pull_begins(
    service: ServiceHandle, fresh: Callable[[], int]
) -> None:
    source = {"w": torch.arange(3_000.0).reshape(30, 100).to(torch.bfloat16), "step": torch.tensor(0)}
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    memory = {name: tensor.data_ptr() for name, tensor in target.items()}
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def publish(version: int) -> None:
        source["w"].add_(1)
        source["step"].fill_(version)
        kept[version] = {name: tensor.clone() for name, tensor in source.items()}
        publisher.publish(version, timeout=20)

    first = fresh()
    with (
        Publisher(service, 0, 1, StateDictSource(source)) as publisher,
        Subscriber(service, "w0", StateDictTarget(target)) as worker,
    ):
        with pytest.raises(SyncError, match="cannot roll back from version None: it holds no version before that"):
            worker.rollback()
        publish(first)
        assert worker.sync(first, 20) == first
        with pytest.raises(SyncError, match="it holds no version before that"):
            worker.rollback()
        publish(first + 1)
        with pytest.raises(SyncError, match="a newer one is pulled into its place"):
            worker.rollback()
        assert worker.sync(first + 1, 20) == first + 1
        assert equal(target, kept[first + 1])

        assert worker.rollback() == first
        assert (worker.version, worker.ready) == (first, True)
        assert equal(target, kept[first])
        assert worker.sync() == first, "it is not installed again behind the caller's back"
        with pytest.raises(SyncError, match="it holds no version before that"):
            worker.rollback()
        assert service.status().consumers[0].version == first

        publish(first + 2)
        assert worker.sync() == first + 2
        assert equal(target, kept[first + 2])
        assert worker.rollback() == first
        assert equal(target, kept[first])
    assert {name: tensor.data_ptr() for name, tensor in target.items()} == memory
    with Subscriber(service, "w1", StateDictTarget(target), install="in_place") as worker:
        with pytest.raises(SyncError, match="in_place writes over it; use install='shadow'"):
            worker.rollback()
        with pytest.raises(ValueError, match=r"no engine to pause; give it one: Subscriber\(\.\.\., engine="):
            worker.pause()


class _Stubborn:
    """An engine that does not pause as often as `refusals` says."""

    def __init__(self) -> None:
        self.running, self.refusals = True, 0

    def pause(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("a request does not end (injected)")
        self.running = False

    def resume(self) -> None:
        self.running = True


@pytest.mark.parametrize("install", ["shadow", "in_place"])
def test_an_engine_that_does_not_pause_keeps_its_version_and_gets_the_next(
    service: ServiceHandle, fresh: Callable[[], int], install: str
) -> None:
    first = fresh()
    source, target, engine = {"w": torch.ones(4)}, {"w": torch.zeros(4)}, _Stubborn()
    with (
        Publisher(service, 0, 1, StateDictSource(source)) as publisher,
        Subscriber(service, "w0", StateDictTarget(target), install=install, engine=engine) as worker,
    ):

        def step(version: int, refusals: int) -> None:
            source["w"].fill_(version)
            engine.refusals = refusals
            failed: list[Exception] = []

            def publish() -> None:
                try:
                    publisher.publish(version, timeout=20)
                except Exception as error:
                    failed.append(error)

            thread = threading.Thread(target=publish)
            thread.start()
            try:
                worker.sync(version, 20)
            finally:
                thread.join()
            assert failed == []

        step(first, 0)
        with pytest.raises(SyncError, match=r"engine of worker 'w0' does not pause \(RuntimeError: a request does not"):
            step(first + 1, 1)
        assert (worker.version, worker.ready, engine.running) == (first, True, True)
        assert target["w"].tolist() == [float(first)] * 4
        if install == "shadow":
            assert worker.sync() == first + 1, "it is whole and lies beside, so the next sync installs it"
        step(first + 2, 0)
        assert target["w"].tolist() == [float(first + 2)] * 4
        if install == "shadow":
            engine.refusals = 1
            with pytest.raises(SyncError, match="does not pause"):
                worker.rollback()
            assert worker.sync() == first + 2, "a rollback that failed happens at no later sync"
            assert worker.rollback() == first + 1
            assert target["w"].tolist() == [float(first + 1)] * 4


def test_a_failure_told_by_a_worker_that_is_not_in_the_sync_ends_nothing(
    service: ServiceHandle, fresh: Callable[[], int]
) -> None:
    version = fresh()
    source, target, may_read = {"w": torch.ones(4)}, {"w": torch.zeros(4)}, threading.Event()
    registry = service.registry
    with (
        Publisher(service, 0, 1, StateDictSource(source)) as publisher,
        Subscriber(service, "w0", StateDictTarget(target)) as worker,
    ):
        transport = worker._agent._pull._transport  # type: ignore[union-attr]
        post, reading = transport.post, threading.Event()

        def held(*args: object) -> Callable[[], bool]:
            reading.set()
            may_read.wait(20)
            return post(*args)  # type: ignore[arg-type]

        transport.post = held  # type: ignore[method-assign]
        thread = threading.Thread(target=publisher.publish, args=(version, 20))
        thread.start()
        assert reading.wait(20)
        epoch = service.status().epoch
        assert epoch is not None
        late = ray.get(registry.register_consumer.remote("late", "shadow", "n", 1, MemberHistory()))
        ray.get(registry.pull_failed.remote(late.consumer_id, late.token, epoch.epoch, "wrong bytes", True))
        may_read.set()
        thread.join(20)
        assert worker.sync(version, 20) == version
        assert torch.equal(target["w"], source["w"])
        ray.get(registry.unregister_consumer.remote(late.consumer_id, late.token))


def test_a_late_joiner_is_not_ready_until_it_has_a_version(service: ServiceHandle, fresh: Callable[[], int]) -> None:
    first = fresh()
    source = model(1)
    targets = [{n: torch.zeros_like(t) for n, t in model(1).items()} for _ in range(2)]
    with (
        Publisher(service, 0, 1, StateDictSource(source)) as publisher,
        Subscriber(service, "early", StateDictTarget(targets[0])) as early,
    ):
        publisher.publish(first, timeout=30)
        early.sync(first, timeout=30)
        with Subscriber(service, "late", StateDictTarget(targets[1])) as late:
            assert not late.ready
            outcome: list[int] = []
            thread = threading.Thread(target=lambda: outcome.append(late.sync(timeout=30)))
            thread.start()
            for name, values in model(2).items():
                source[name].copy_(values)
            report = publisher.publish(first + 1, timeout=30)
            thread.join(30)
            assert outcome == [first + 1]
            assert report.installed == ["early", "late"]
            assert equal(targets[1], model(2))
