"""Trainer ranks, gathers, drivers and registries that fail: every waiter is told, and the next version works."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import ray
import torch
from fault_helpers import Scene, kill

from tests.shell import attached
from weightsync.protocol.errors import SyncAborted
from weightsync.service import Publisher, StateDictSource, StateDictTarget, Subscriber, connect

QUICK_S = 10.0

BuildScene = Callable[..., Scene]


def _raised(ref: object) -> BaseException:
    with pytest.raises(ray.exceptions.RayTaskError) as failed:
        ray.get(ref, timeout=QUICK_S)  # type: ignore[call-overload]
    return failed.value.cause


@pytest.mark.parametrize("moment", ["pulling", pytest.param("starting", marks=pytest.mark.slow)])
def test_a_trainer_killed_in_a_sync_aborts_it_naming_what_is_lost(scene: BuildScene, moment: str) -> None:
    s = scene()
    before = s.version
    for worker in s.workers.values():
        ray.get(worker.hold_at.remote(moment))
    pid = ray.get(s.trainers[1].pid.remote())
    publishing = s.publish()
    assert all(ray.get([w.reached.remote() for w in s.workers.values()]))
    died = time.monotonic()
    kill(pid)
    error = _raised(publishing[0])
    assert time.monotonic() - died < QUICK_S
    assert isinstance(error, SyncAborted)
    assert f"version {s.version} " in str(error)
    assert "trainer rank 1: its producer died" in str(error)
    assert "'embed.weight' (18, 0)..(37, 16) and " in str(error)
    ray.get([w.go_on.remote() for w in s.workers.values()])
    for worker in s.workers.values():
        assert ray.get(worker.state.remote()) == (before, True)
        assert ray.get(worker.holds.remote(before)), "nobody flipped"
    s.replace_trainer(1)
    for _ in range(3):
        s.check_sync(["w0", "w1"])


# Two ranks that hold the same are the least that shows it; four, two and two, are twice as many processes.
@pytest.mark.parametrize(
    ("trainers", "moment", "transport"),
    [
        (2, "pulling", "nixl"),
        pytest.param(4, "pulling", "nixl", marks=pytest.mark.slow),
        pytest.param(4, "freeing", "nixl", marks=pytest.mark.slow),
        pytest.param(4, "starting", "nixl", marks=pytest.mark.slow),
        pytest.param(4, "pulling", "rdt", marks=pytest.mark.slow),
        pytest.param(4, "pulling", "object_store", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_killed_in_a_sync_is_replaced_by_those_that_hold_the_same(
    scene: BuildScene, trainers: int, moment: str, transport: str
) -> None:
    s = scene(trainers=trainers, mode="hsdp", transport=transport, verify="full")
    s.check_rank_1_is_replaced(moment, QUICK_S)


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        ("hsdp", "nixl"),
        pytest.param("live", "nixl", marks=pytest.mark.slow),
        pytest.param("live", "rdt", marks=pytest.mark.slow),
        pytest.param("live", "object_store", marks=pytest.mark.slow),
        pytest.param("staged", "nixl", marks=pytest.mark.slow),
        pytest.param("staged", "rdt", marks=pytest.mark.slow),
        pytest.param("staged", "object_store", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_is_read_again_once_and_then_aborts_naming_it(
    scene: BuildScene, mode: str, transport: str
) -> None:
    s = scene(trainers=2, mode=mode, transport=transport, verify="full")
    clean = s.check_sync(["w0", "w1"])
    assert all(pull.regions_verified > 0 for pull in clean.workers.values())
    assert clean.workers["w1"].regions_repeated == 0

    ray.get(s.workers["w1"].corrupt.remote(1))
    repaired = s.check_sync(["w0", "w1"])
    assert repaired.workers["w1"].regions_repeated >= 1
    assert repaired.workers["w0"].regions_repeated == 0

    before = s.version
    ray.get(s.workers["w1"].corrupt.remote(2))
    publishing = s.publish()
    for publish in publishing:
        error = _raised(publish)
        assert isinstance(error, SyncAborted)
        assert "worker w1: 'embed.weight' as read from rank " in str(error)
        assert f"is not what it published as version {s.version}" in str(error)
    for worker in s.workers.values():
        assert ray.get(worker.state.remote()) == (before, True)
        assert ray.get(worker.holds.remote(before))
    for _ in range(3):
        s.check_sync(["w0", "w1"])


@pytest.mark.slow
def test_both_holders_of_a_part_killed_abort(scene: BuildScene) -> None:
    s = scene(trainers=4, mode="hsdp", transport="nixl", verify="full")
    before = s.version
    for worker in s.workers.values():
        ray.get(worker.hold_at.remote("pulling"))
    pids = ray.get([s.trainers[rank].pid.remote() for rank in (0, 1)])
    publishing = s.publish()
    assert all(ray.get([w.reached.remote() for w in s.workers.values()]))
    for pid in pids:
        kill(pid)
    for rank in (2, 3):
        error = _raised(publishing[rank])
        assert isinstance(error, SyncAborted)
        assert "its producer died" in str(error)
        assert "'embed.weight' (0, 0)..(18, 16) and " in str(error)
    ray.get([w.go_on.remote() for w in s.workers.values()])
    assert all(ray.get([w.holds.remote(before) for w in s.workers.values()]))
    for rank in (0, 1):
        s.replace_trainer(rank)
    for _ in range(3):
        s.check_sync(["w0", "w1"])


@pytest.mark.slow
def test_a_trainer_that_raises_while_gathering_releases_every_rank_with_that_error(scene: BuildScene) -> None:
    s = scene(mode="staged")
    ray.get(s.trainers[1].fail_at.remote("layers.1.attn.weight"))
    publishing = s.publish()
    first, second = _raised(publishing[0]), _raised(publishing[1])
    assert "no memory left to gather layers.1.attn.weight (injected)" in str(first)
    assert isinstance(first, SyncAborted)
    assert isinstance(second, FloatingPointError)
    ray.get(s.trainers[1].fail_at.remote(None))
    for _ in range(3):
        s.check_sync(["w0", "w1"])


DRIVER = """
import sys, time, torch
import weightsync.service as ws
publisher = ws.Publisher(sys.argv[1], 0, 1, ws.StateDictSource({"w": torch.ones(4)}))
print(publisher.publish(1, timeout=30).version, flush=True)
time.sleep(600)
"""


def test_a_killed_driver_takes_its_rank_along_and_nothing_else(make_service: Callable[..., object]) -> None:
    service = make_service()
    target = {"w": torch.zeros(4)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, service.name],  # type: ignore[attr-defined]
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **attached()},
    )
    try:
        _await(lambda: service.status().producers != [])  # type: ignore[attr-defined]
        with Subscriber(service, "w0", StateDictTarget(target)) as subscriber:  # type: ignore[arg-type]
            assert subscriber.sync(1, timeout=30) == 1
            assert driver.stdout is not None
            assert "1\n" in iter(driver.stdout.readline, ""), "Ray may say something first"
            driver.kill()
            _await(lambda: service.status().producers == [])  # type: ignore[attr-defined]
            again = connect(service.name)  # type: ignore[attr-defined]
            with Publisher(again, 0, 1, StateDictSource({"w": torch.full((4,), 2.0)})) as publisher:
                for version in (2, 3, 4):
                    publisher.publish(version, timeout=30)
                    assert subscriber.sync(version, timeout=30) == version
                    assert torch.equal(target["w"], torch.full((4,), 2.0))
    finally:
        driver.kill()
        driver.wait()


def _await(done: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "moment",
    [
        "idle",
        "pulling",
        pytest.param("starting", marks=pytest.mark.slow),
        pytest.param("freeing", marks=pytest.mark.slow),
    ],
)
def test_a_killed_registry_restarts_and_versions_go_on(scene: BuildScene, moment: str) -> None:
    s = scene()
    before = s.version
    if moment == "idle":
        kill(s.service.status().registry_pid)
    else:
        for worker in s.workers.values():
            ray.get(worker.hold_at.remote(moment))
        publishing = s.publish()
        assert all(ray.get([w.reached.remote() for w in s.workers.values()]))
        kill(s.service.status().registry_pid)
        for publish in publishing:
            error = _raised(publish)
            assert isinstance(error, SyncAborted)
            assert f"version {s.version} " in str(error)
            assert "registry" in str(error)
        ray.get([w.go_on.remote() for w in s.workers.values()])
    for worker in s.workers.values():
        assert ray.get(worker.state.remote()) == (before, True)
        assert ray.get(worker.holds.remote(before))
    for _ in range(3):
        s.check_sync(["w0", "w1"])
    status = s.service.status()
    assert status.newest_version == s.version
    assert [c.version for c in status.consumers] == [s.version] * 2
    with pytest.raises(ray.exceptions.RayTaskError, match=f"version {before} is not above"):
        ray.get(s.trainers[0].publish.remote(before))


@pytest.mark.slow
def test_a_registry_killed_while_ranks_gather_does_not_hold_them(scene: BuildScene) -> None:
    s = scene(mode="staged")
    for worker in s.workers.values():
        ray.get(worker.hold_at.remote("starting"))
    publishing = s.publish()
    assert all(ray.get([w.reached.remote() for w in s.workers.values()]))
    kill(s.service.status().registry_pid)
    assert all(isinstance(_raised(publish), SyncAborted) for publish in publishing)
    ray.get([w.go_on.remote() for w in s.workers.values()])
    for _ in range(3):
        s.check_sync(["w0", "w1"])
