"""`weightsync bench` with real processes: it measures, it notices wrong bytes, and it leaves nothing."""

from __future__ import annotations

import os

import ray
import torch

from weightsync.service import list_services
from weightsync.service.bench.cases import Case
from weightsync.service.bench.run import run_bench
from weightsync.service.bench.stage import Cast
from weightsync.service.bench.ways import all_ways
from weightsync.service.bench.ways.bare import Memcpy
from weightsync.service.bench.ways.base import Way

MB = 1_000_000


class _FlipsABit(Memcpy):
    """Delivers, but for one bit, from its third move on."""

    moves = 0

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        def flip(member: object) -> None:
            tensor = next(iter(member.tensors.values()))  # type: ignore[attr-defined]
            tensor.view(torch.int16)[-1, -1] ^= 4

        super().move(cast, version)
        self.moves += 1
        if self.moves >= 3:
            cast.each(cast.workers[-1:], flip)
        return {self.key: 1.0}


class _Raises(Memcpy):
    def move(self, cast: Cast, version: int) -> dict[str, float]:
        def fail(member: object) -> None:
            raise OSError("the link is down (injected)")

        cast.each(cast.workers, fail)
        return {}


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("weightsync")}


def test_wrong_bytes_and_errors_fail_the_bench_and_no_other_way(cluster: None) -> None:
    before, shared_memory = list_services(), _shared_memory()
    ways: dict[str, Way] = {
        **all_ways(),
        "flips": _FlipsABit("flips", "wrong on purpose"),
        "raises": _Raises("raises", "wrong on purpose"),
    }
    keys = ("flips", "bare", "raises", "live-in-place")
    case = Case(nbytes=16 * MB, consumers=2, tensor_parallel=2, ways=keys, rounds=2, repeats=1)
    result = run_bench([case], ways=ways)
    (found,) = result.cases
    assert not result.ok
    flips, raises = sorted(found.failures)
    assert flips.startswith("flips, round 2: WrongBytesError: flips did not deliver version ")
    assert flips.endswith("worker 1: wrong bytes in model.embed_tokens.weight")
    assert raises == "raises, round 1: OSError: the link is down (injected)"
    rounds = {row.way: sorted(row.seconds) for row in found.rows}
    assert rounds == {"flips": [0], "bare": [0, 1], "live-in-place": [0, 1]}
    assert list_services() == before
    assert _shared_memory() == shared_memory
    alive = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "bench" in actor["name"]]
    assert alive == []
