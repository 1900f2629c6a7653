"""The ways a bench can compare, by the key that `--ways` takes. A new one is a line here."""

from __future__ import annotations

from weightsync.service.bench.ways.bare import BareOneRun, BareRuns, Memcpy
from weightsync.service.bench.ways.base import Way
from weightsync.service.bench.ways.groups import GlooBroadcast
from weightsync.service.bench.ways.modelexpress import ModelExpress
from weightsync.service.bench.ways.mooncake import Mooncake
from weightsync.service.bench.ways.ray_direct import IntoTargets, PackedPull
from weightsync.service.bench.ways.stores import ObjectStore, Safetensors
from weightsync.service.bench.ways.weightsync import Weightsync


def all_ways() -> dict[str, Way]:
    """Fresh ones, in the order of the tables."""
    ways: list[Way] = [
        BareRuns("bare", "bare NIXL READs of the same runs, prepared once: the limit"),
        BareOneRun("bare-one-run", "bare NIXL READs of as many bytes, one large run per trainer"),
        Memcpy("memcpy", "a copy of as many bytes within the worker"),
        Weightsync("live", "weightsync live, shadow", "publish, pull beside the live weights, flip"),
        Weightsync(
            "live-in-place", "weightsync live, in place", "publish, pull into the live weights", install="in_place"
        ),
        *(
            Weightsync(f"live-{strategy}", f"weightsync live, {strategy}", about, install="in_place", strategy=strategy)
            for strategy, about in (
                ("direct", "a descriptor per run, whatever it costs"),
                ("packed", "packed by the trainer, scattered here"),
                ("span", "gaps between runs read along, scattered here"),
            )
        ),
        Weightsync(
            "staged", "weightsync staged, in place", "gather, pack, read, scatter", mode="staged", install="in_place"
        ),
        PackedPull("rdt-packed", "Ray Direct Transport in the pattern of vLLM's sharded pull"),
        IntoTargets("rdt-targets", "Ray Direct Transport, whole tensors into registered targets"),
        Mooncake("mooncake", "Mooncake's transfer engine over TCP, the same runs"),
        ModelExpress("modelexpress", "ModelExpress's reshard planner and NIXL transport"),
        GlooBroadcast("gloo", "torch.distributed broadcast of shards, sliced by the workers"),
        ObjectStore("objects", "Ray's object store, sliced by the workers"),
        Safetensors("files", "safetensors files in shared memory, sliced by the workers"),
    ]
    return {way.key: way for way in ways}
