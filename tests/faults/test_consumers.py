"""Inference workers that die, hang, come late or come back: the others finish, and nobody waits for a watchdog."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import ray
from fault_helpers import PausingDriver, Scene, kill

from weightsync.protocol.errors import SyncError

QUICK_S = 5.0
"""Far above what a survivor waits for on a busy machine, far below the lease (20 s) and the watchdog (60 s)."""

BuildScene = Callable[..., Scene]

VERIFY = {"starting": "off", "pulling": "off", "freeing": "full"}
"""Point of a sync -> setting it exists with: workers that only read memory send no free signals."""


# One moment stands for all in the default run; between free signals `test_packs` kills a worker.
@pytest.mark.parametrize(
    ("install", "point"),
    [
        ("shadow", "pulling"),
        pytest.param("shadow", "starting", marks=pytest.mark.slow),
        pytest.param("shadow", "freeing", marks=pytest.mark.slow),
        pytest.param("in_place", "pulling", marks=pytest.mark.slow),
        pytest.param("in_place", "starting", marks=pytest.mark.slow),
        pytest.param("in_place", "freeing", marks=pytest.mark.slow),
    ],
)
def test_a_worker_killed_in_a_sync_costs_the_survivors_nothing_but_its_absence(
    scene: BuildScene, install: str, point: str
) -> None:
    s = scene(install=install, verify=VERIFY[point])
    victim = s.workers["w1"]
    ray.get(victim.hold_at.remote(point))
    publishing = s.publish()
    syncing = [w.sync.remote(s.version) for w in s.workers.values()]
    assert ray.get(victim.reached.remote())
    died = time.monotonic()
    kill(s.pid("w1"))
    report, _ = ray.get(publishing)[0]
    assert time.monotonic() - died < QUICK_S
    assert report.installed == ["w0"]
    assert report.evicted == ["w1"]
    assert ray.get(syncing[0]) == s.version
    assert ray.get(s.workers["w0"].holds.remote(s.version))
    for _ in range(3):
        s.check_sync(["w0"])
    assert [c.worker for c in s.service.status().consumers] == ["w0"]


@pytest.mark.slow
def test_two_of_four_killed_at_once(scene: BuildScene) -> None:
    s = scene(workers=4)
    for name in ("w1", "w3"):
        ray.get(s.workers[name].hold_at.remote("pulling"))
    publishing = s.publish()
    assert all(ray.get([s.workers[name].reached.remote() for name in ("w1", "w3")]))
    pids = [s.pid(name) for name in ("w1", "w3")]
    died = time.monotonic()
    for pid in pids:
        kill(pid)
    report, _ = ray.get(publishing)[0]
    assert time.monotonic() - died < QUICK_S
    assert (report.installed, report.evicted) == (["w0", "w2"], ["w1", "w3"])
    for _ in range(3):
        s.check_sync(["w0", "w2"])


def test_a_killed_worker_that_restarts_under_its_name_gets_the_newest_version(scene: BuildScene) -> None:
    s = scene()
    kill(s.pid("w1"))
    s.workers["w1"] = s.worker("w1")
    assert ray.get(s.workers["w1"].state.remote()) == (None, False), "not ready before a version is installed"
    for _ in range(3):
        s.check_sync(["w0", "w1"])


def test_the_only_worker_killed_aborts_and_the_next_version_reaches_its_successor(scene: BuildScene) -> None:
    s = scene(workers=1)
    ray.get(s.workers["w0"].hold_at.remote("pulling"))
    publishing = s.publish()
    assert ray.get(s.workers["w0"].reached.remote())
    kill(s.pid("w0"))
    for publish in publishing:
        with pytest.raises(
            ray.exceptions.RayTaskError, match=rf"version {s.version} .* was aborted: worker w0: its process ended"
        ):
            ray.get(publish, timeout=QUICK_S)
    s.workers["w0"] = s.worker("w0")
    for _ in range(3):
        s.check_sync(["w0"])


@pytest.mark.parametrize("point", ["pulling", pytest.param("freeing", marks=pytest.mark.slow)])
def test_a_stopped_worker_is_evicted_by_its_lease_and_fenced_when_it_goes_on(scene: BuildScene, point: str) -> None:
    s = scene(lease_s=3.0, stall_timeout_s=10.0, verify=VERIFY[point])
    ray.get(s.workers["w1"].hold_at.remote(point))
    publishing = s.publish()
    assert ray.get(s.workers["w1"].reached.remote())
    pid = s.pid("w1")
    os.kill(pid, signal.SIGSTOP)
    try:
        report, seconds = ray.get(publishing)[0]
        assert seconds < 3.0 + QUICK_S
        assert (report.installed, report.evicted) == (["w0"], ["w1"])
        for _ in range(2):
            s.check_sync(["w0"])
    finally:
        os.kill(pid, signal.SIGCONT)
    ray.get(s.workers["w1"].go_on.remote())
    newest = s.version
    deadline = time.monotonic() + 20
    while len(s.service.status().consumers) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    version, _ = ray.get(s.workers["w1"].state.remote())
    assert version == newest - 3, "nothing of an epoch it was evicted from was installed"
    for _ in range(3):
        s.check_sync(["w0", "w1"])


def test_a_worker_that_stands_still_is_evicted_long_before_its_lease_and_fenced(scene: BuildScene) -> None:
    s = scene(lease_s=3.0, stall_timeout_s=10.0)
    ray.get(s.workers["w1"].hold_at.remote("pulling"))
    report, seconds = ray.get(s.publish())[0]
    assert seconds < 10.0 + QUICK_S
    assert (report.installed, report.evicted) == (["w0"], ["w1"])
    ray.get(s.workers["w1"].go_on.remote())
    without = f"version {s.version} .* was committed without worker 'w1': it stalled: worker w1 is pulling: 0 B of"
    with pytest.raises(ray.exceptions.RayTaskError, match=without):
        ray.get(s.workers["w1"].sync.remote(s.version, 10.0))
    assert ray.get(s.workers["w1"].state.remote()) == (s.version - 1, True)
    for _ in range(3):
        s.check_sync(["w0", "w1"])


@pytest.mark.slow
def test_a_worker_evicted_while_it_writes_in_place_is_ready_nowhere(scene: BuildScene) -> None:
    s = scene(install="in_place", lease_s=3.0, stall_timeout_s=10.0)
    ray.get(s.workers["w1"].hold_at.remote("pulling"))
    syncing = [w.sync.remote(s.version + 1) for w in s.workers.values()]
    report, _ = ray.get(s.publish())[0]
    assert (report.installed, report.evicted) == (["w0"], ["w1"])
    ray.get(s.workers["w1"].go_on.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="without worker 'w1': it stalled"):
        ray.get(syncing[1], timeout=QUICK_S)
    assert ray.get(s.workers["w1"].state.remote()) == (s.version - 1, False)
    assert {c.worker: c.ready for c in s.service.status().consumers} == {"w0": True, "w1": False}
    for _ in range(3):
        s.check_sync(["w0", "w1"])
    assert {c.worker: c.ready for c in s.service.status().consumers} == {"w0": True, "w1": True}


@pytest.mark.slow
def test_a_worker_whose_read_hangs_takes_part_no_more_and_holds_nobody_up(scene: BuildScene) -> None:
    s = scene()
    ray.get(s.workers["w1"].break_next_pull.remote(hangs=True))
    report, seconds = ray.get(s.publish())[0]
    assert seconds < QUICK_S
    assert (report.installed, report.evicted) == (["w0"], ["w1"])
    for _ in range(3):
        s.check_sync(["w0"])
    assert [c.worker for c in s.service.status().consumers] == ["w0"]
    with pytest.raises(ray.exceptions.RayTaskError, match="it may still write, so this worker must be restarted"):
        ray.get(s.workers["w1"].sync.remote(s.version, 5.0))
    assert ray.get(s.workers["w1"].holds.remote(s.version - 4)), "what requests see was never touched"
    ray.get(s.workers.pop("w1").close.remote())
    s.workers["w1"] = s.worker("w1")
    s.check_sync(["w0", "w1"])


@pytest.mark.parametrize(
    ("verify", "ranks_wait"),
    [
        ("off", "trainer ranks 0, 1 wait until worker w0, worker w1 have read version"),
        pytest.param(
            "full", "trainer rank 1 waits for free signals: group 0 by worker w0, worker w1;", marks=pytest.mark.slow
        ),
    ],
)
def test_when_nobody_moves_the_sync_is_given_up_saying_who_waits_for_whom(
    scene: BuildScene, verify: str, ranks_wait: str
) -> None:
    s = scene(lease_s=3.0, stall_timeout_s=10.0, verify=verify)
    for worker in s.workers.values():
        ray.get(worker.hold_at.remote("pulling"))
    publishing = s.publish()
    for publish in publishing:
        nothing = r"nothing moved for 8 s: worker w0 is pulling: 0 B of 4.0 kB"
        with pytest.raises(ray.exceptions.RayTaskError, match=nothing) as stalled:
            ray.get(publish, timeout=10.0 + QUICK_S)
        assert ranks_wait in str(stalled.value)
    ray.get([w.go_on.remote() for w in s.workers.values()])
    for _ in range(3):
        s.check_sync(["w0", "w1"])


@pytest.mark.slow
def test_a_slow_sync_that_moves_trips_no_watchdog(scene: BuildScene) -> None:
    s = scene(lease_s=3.0, stall_timeout_s=10.0)
    ray.get([w.slow_down.remote(1.6) for w in s.workers.values()])
    publishing = s.publish()
    _, seconds = ray.get(publishing, timeout=30)[0]
    assert seconds > 10.0, "slower than the watchdog's timeout"
    assert ray.get([w.sync.remote(s.version) for w in s.workers.values()]) == [s.version] * 2
    assert all(ray.get([w.holds.remote(s.version) for w in s.workers.values()]))


def test_an_engine_paused_by_a_driver_that_dies_goes_on_by_itself(scene: BuildScene) -> None:
    s = scene(workers=1)
    worker, lease_s = s.workers["w0"], 2.0
    driver = PausingDriver.remote(worker, lease_s)
    pid = ray.get(driver.pid.remote())
    time.sleep(1.5 * lease_s)
    assert ray.get(worker.engine.remote())[0], "the driver renews its lease"
    s.check_sync(["w0"])
    assert ray.get(worker.engine.remote())[0], "an install does not end somebody else's pause"
    kill(pid)
    died = time.monotonic()
    while ray.get(worker.engine.remote())[0]:
        assert time.monotonic() - died < lease_s + QUICK_S
        time.sleep(0.05)
    for _ in range(3):
        s.check_sync(["w0"])
    assert not ray.get(worker.engine.remote())[0]


def test_an_engine_is_paused_for_an_install_only_and_stays_so_only_while_it_is_torn(scene: BuildScene) -> None:
    s = scene(install="in_place")
    before = ray.get([w.engine.remote() for w in s.workers.values()])
    assert not any(paused for paused, _ in before)
    ray.get([w.hold_at.remote("pulling") for w in s.workers.values()])
    syncing = [w.sync.remote(s.version + 1) for w in s.workers.values()]
    publishing = s.publish()
    assert all(ray.get([w.reached.remote() for w in s.workers.values()]))
    now = ray.get([w.engine.remote() for w in s.workers.values()])
    assert now == [(True, pauses + 1) for _, pauses in before], "held while their weights are written"
    kill(ray.get(s.trainers[1].pid.remote()))
    with pytest.raises(ray.exceptions.RayTaskError, match="was aborted"):
        ray.get(publishing[0], timeout=QUICK_S)
    ray.get([w.go_on.remote() for w in s.workers.values()])
    for ref in syncing:
        with pytest.raises(ray.exceptions.RayTaskError):
            ray.get(ref, timeout=QUICK_S)
    assert ray.get(s.workers["w0"].state.remote()) == (s.version - 1, False), "torn is not ready"
    assert ray.get(s.workers["w0"].engine.remote())[0], "and computes nothing"
    assert [c.ready for c in s.service.status().consumers] == [False, False]
    s.replace_trainer(1)
    for _ in range(3):
        s.check_sync(["w0", "w1"])
    assert ray.get(s.workers["w0"].state.remote()) == (s.version, True)
    assert not ray.get(s.workers["w0"].engine.remote())[0]


@pytest.mark.parametrize(
    ("verify", "ranks_wait"),
    [
        ("off", "trainer ranks 0, 1 wait until worker w1 has read version"),
        pytest.param(
            "full",
            "trainer rank 0 waits for free signals: group 0 by worker w1; group 1 by worker w1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_late_joiner_plans_while_a_sync_runs_and_takes_part_in_the_next(
    scene: BuildScene, verify: str, ranks_wait: str
) -> None:
    s = scene(verify=verify)
    ray.get(s.workers["w1"].hold_at.remote("pulling"))
    publishing = s.publish()
    assert ray.get(s.workers["w1"].reached.remote())
    s.workers["w2"] = s.worker("w2")
    why = "\n".join(s.service.why())
    assert "worker w1 is pulling: 0 B of 4.0 kB are in place" in why
    assert ranks_wait in why
    assert "workers w0 hold version" in why
    ray.get(s.workers["w1"].go_on.remote())
    report, _ = ray.get(publishing)[0]
    assert report.installed == ["w0", "w1"]
    assert report.evicted == []
    assert s.service.why() == []
    for _ in range(3):
        s.check_sync(["w0", "w1", "w2"])


def test_a_worker_whose_own_pull_fails_is_evicted_and_takes_part_again(scene: BuildScene) -> None:
    s = scene()
    ray.get(s.workers["w1"].break_next_pull.remote())
    publishing = s.publish()
    report, seconds = ray.get(publishing)[0]
    assert seconds < QUICK_S
    assert (report.installed, report.evicted) == (["w0"], ["w1"])
    with pytest.raises(ray.exceptions.RayTaskError) as failed:
        ray.get(s.workers["w1"].sync.remote(s.version, 1.0))
    assert isinstance(failed.value.cause, SyncError)
    for _ in range(3):
        s.check_sync(["w0", "w1"])
