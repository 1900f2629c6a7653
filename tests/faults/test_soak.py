"""Hundreds of syncs with kills among them: survivors hardly notice, requests see whole versions, nothing grows."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import ray
from fault_helpers import Scene, digest, kill
from helpers import model

SYNCS, KILLS = 300, 30
WARM_UP = 60
"""Syncs (and the kills among them) after which caches and allocators are full."""


def _held(scene: Scene) -> dict[str, Any]:
    """What the processes that live through the whole run hold, and what lies around on the node."""
    members = {"trainer": scene.trainers[0], "survivor": scene.workers["w0"]}
    held: dict[str, Any] = {
        f"{who} {what}": value
        for who, member in members.items()
        for what, value in ray.get(member.usage.remote()).items()
    }
    alive = ray.util.list_named_actors(all_namespaces=True)
    return held | {"named actors": len(alive), "shared memory files": len(os.listdir("/dev/shm"))}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_survivors_hardly_notice_kills_and_nothing_is_torn_or_leaks(
    scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    s = scene()
    chance = random.Random(7)
    kills = set(chance.sample(range(SYNCS), KILLS))
    ray.get([worker.start_reader.remote() for worker in s.workers.values()])
    first = s.version
    delays, curve, seen_by_victims = [], [], []
    for turn in range(SYNCS):
        if turn % 30 == 0:
            curve.append(_held(s))
        if turn in kills:
            point = chance.choice(["starting", "pulling", "freeing"])
            ray.get(s.workers["w1"].hold_at.remote(point))
            pid = s.pid("w1")
            seen_by_victims.append(ray.get(s.workers["w1"].stop_reader.remote()))
            publishing = s.publish()
            assert ray.get(s.workers["w1"].reached.remote())
            time.sleep(0.1)  # by now the survivor has done its part and waits for the outcome
            died = time.monotonic()
            kill(pid)
            report, _ = ray.get(publishing)[0]
            delays.append(time.monotonic() - died)
            assert (report.installed, report.evicted) == (["w0"], ["w1"])
            s.workers["w1"] = s.worker("w1")
            ray.get(s.workers["w1"].start_reader.remote())
        else:
            report, _ = ray.get(s.publish())[0]
            assert report.installed == ["w0", "w1"]
            assert ray.get(s.workers["w1"].step_to.remote(s.version)) == s.version
            assert ray.get(s.workers["w1"].holds.remote(s.version))
        assert ray.get(s.workers["w0"].step_to.remote(s.version)) == s.version
    curve.append(_held(s))
    seen = ray.get(s.workers["w0"].stop_reader.remote())
    with capsys.disabled():
        ordered = sorted(delays)
        print(
            f"\n{KILLS} kills in {SYNCS} syncs: survivors waited median {median(delays) * 1000:.0f} ms, "
            f"90 % {ordered[int(0.9 * KILLS)] * 1000:.0f} ms, worst {ordered[-1] * 1000:.0f} ms"
        )
        pairs_seen = len(seen) + sum(map(len, seen_by_victims))
        print(f"requests on all workers saw {pairs_seen} distinct (version, digest) pairs")
        for name in curve[0]:
            print(f"{name:24}", *(held[name] for held in curve))

    assert [version for version, _ in seen] == list(range(first, s.version + 1)), "requests saw every version"
    for pairs in (seen, *seen_by_victims):
        versions = [version for version, _ in pairs]
        assert versions == sorted(versions), "versions never go back"
        assert all(crc == digest(model(version)) for version, crc in pairs), "no request saw a mixture"
    assert median(delays) < 0.2
    assert max(delays) < 2.0
    warm, last = curve[WARM_UP // 30], curve[-1]
    for name in ("trainer rss", "survivor rss"):
        assert last[name] < 1.1 * warm[name], name
    for name in ("trainer fds", "survivor fds", "survivor registered_bytes", "named actors", "shared memory files"):
        assert last[name] <= warm[name] + 2, name
