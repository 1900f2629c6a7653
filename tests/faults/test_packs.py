"""Packs under faults: a dead worker's hold nobody up, and a dead trainer's are read elsewhere, directly."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import ray
from fault_helpers import Scene, kill

QUICK_S = 5.0
BuildScene = Callable[..., Scene]


def test_a_worker_killed_between_its_packs_costs_the_survivors_nothing(scene: BuildScene) -> None:
    s = scene(strategy="packed", num_serve_buffers=1, verify="full")
    victim = s.workers["w1"]
    ray.get(victim.hold_at.remote("pulling"))  # its first chunk is packed, more wait for the slot
    publishing = s.publish()
    assert ray.get(victim.reached.remote())
    died = time.monotonic()
    kill(s.pid("w1"))
    report, _ = ray.get(publishing)[0]
    assert time.monotonic() - died < QUICK_S
    assert (report.installed, report.evicted) == (["w0"], ["w1"])
    assert set(report.workers["w0"].strategies) == {"packed"}
    assert ray.get(s.workers["w0"].sync.remote(s.version)) == s.version
    assert ray.get(s.workers["w0"].holds.remote(s.version))
    for _ in range(3):
        s.check_sync(["w0"])
    s.set_workers(2)  # it comes back under its name, with a plan of its own
    for _ in range(3):
        s.check_sync(["w0", "w1"])


@pytest.mark.slow
def test_a_trainer_killed_while_it_packs_is_replaced_by_those_that_hold_the_same(scene: BuildScene) -> None:
    s = scene(trainers=4, mode="hsdp", strategy="packed", num_serve_buffers=1)
    s.check_rank_1_is_replaced("pulling", QUICK_S)
