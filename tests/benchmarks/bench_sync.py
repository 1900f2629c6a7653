"""One trainer rank to one inference worker: weightsync beside the raw limit and what people do today.

Run it: `python tests/benchmarks/bench_sync.py [--mb 1024] [--tensors 24] [--rounds 7] [--json]`. All ways move the
same bytes into the same kind of destination, take turns in every round, and are compared within a round; printed
are medians. Nothing is asserted.

    raw        bare NIXL READs of the very same runs, prepared once: the limit
    weightsync live, shadow install: publish to committed, and the flip into the live tensors apart
    objects    Ray object store: the trainer puts the state dict, the worker gets and copies it
    gloo       torch.distributed broadcast over gloo, tensor by tensor
    files      safetensors through shared memory: save, load, copy
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weightsync.actors.transport import Peer, ReadContext, create_transport
from weightsync.service import Publisher, Settings, StateDictSource, StateDictTarget, Subscriber, start

FOLDER = Path("/dev/shm")
WAYS = ("raw", "weightsync", "objects", "gloo", "files")


def _tensors(mb: int, count: int, fill: bool) -> dict[str, torch.Tensor]:
    numel = mb * 1_000_000 // count // 2
    make = torch.randn if fill else torch.zeros
    return {f"layers.{i}.weight": make(numel, dtype=torch.bfloat16) for i in range(count)}


class _Side:
    """What trainer and worker share: tensors, a gloo group and a NIXL agent beside the one of weightsync."""

    def __init__(self, rank: int, mb: int, count: int, port: int) -> None:
        torch.set_num_threads(1)
        self.tensors = _tensors(mb, count, fill=rank == 0)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self.agent = create_transport("nixl", f"bench-{rank}-{secrets.token_hex(3)}", serves=rank == 0)
        self.agent.register(self.tensors.values())

    def gloo(self) -> None:
        for tensor in self.tensors.values():
            dist.broadcast(tensor, src=0)

    def checksum(self) -> int:
        return sum(int(t.view(torch.int16).to(torch.int64).sum()) for t in self.tensors.values())


@ray.remote(num_cpus=0)
class Trainer(_Side):
    def join(self, service: str) -> None:
        self._publisher = Publisher(service, 0, 1, StateDictSource(self.tensors))

    def described(self) -> tuple[bytes, list[tuple[int, int]]]:
        return self.agent.metadata(), [(t.data_ptr(), t.nbytes) for t in self.tensors.values()]

    def change(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(1)

    def publish(self, version: int) -> float:
        return self._publisher.publish(version, timeout=120).seconds

    def put(self) -> list[Any]:
        return [ray.put(t.view(torch.int16).numpy()) for t in self.tensors.values()]

    def save(self, path: str) -> None:
        from safetensors.torch import save_file

        save_file(self.tensors, path)


@ray.remote(num_cpus=0)
class Worker(_Side):
    def join(self, service: str) -> None:
        self._subscriber = Subscriber(service, "w0", StateDictTarget(self.tensors))

    def prepare(self, metadata: bytes, runs: list[tuple[int, int]]) -> None:
        peer = Peer(rank=0, session=0, metadata=metadata, actor=None)
        self.agent.connect(peer)
        source, nbytes = np.array(runs, dtype=np.uint64).T
        addr = np.array([t.data_ptr() for t in self.tensors.values()], dtype=np.uint64)
        self._read = self.agent.prepare(peer, source, addr, nbytes.astype(np.int64))

    def raw(self) -> None:
        self.agent.read([self._read], ReadContext(0, 0))

    def flip(self, version: int) -> None:
        self._subscriber.sync(version, timeout=120)

    def get(self, refs: list[Any]) -> None:
        for tensor, ref in zip(self.tensors.values(), refs, strict=True):
            tensor.view(torch.int16).copy_(torch.from_numpy(ray.get(ref)))

    def load(self, path: str) -> None:
        from safetensors.torch import load_file

        for name, tensor in load_file(path).items():
            self.tensors[name].copy_(tensor)


class Bench:
    """Both sides, and one method per way that returns seconds by step."""

    def __init__(self, mb: int, count: int, service: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.trainer, self.worker = Trainer.remote(0, mb, count, port), Worker.remote(1, mb, count, port)
        ray.get([side.join.remote(service) for side in (self.trainer, self.worker)])
        ray.get(self.worker.prepare.remote(*ray.get(self.trainer.described.remote())))
        self.version = 0

    def raw(self) -> dict[str, float]:
        return {"raw": _seconds(lambda: ray.get(self.worker.raw.remote()))}

    def weightsync(self) -> dict[str, float]:
        self.version += 1
        published = _seconds(lambda: ray.get(self.trainer.publish.remote(self.version)))
        return {
            "weightsync": published,
            "weightsync + flip": published + _seconds(lambda: ray.get(self.worker.flip.remote(self.version))),
        }

    def objects(self) -> dict[str, float]:
        return {"objects": _seconds(lambda: ray.get(self.worker.get.remote(ray.get(self.trainer.put.remote()))))}

    def gloo(self) -> dict[str, float]:
        return {"gloo": _seconds(lambda: ray.get([side.gloo.remote() for side in (self.trainer, self.worker)]))}

    def files(self) -> dict[str, float]:
        path = FOLDER / f"bench-{secrets.token_hex(4)}.safetensors"

        def move() -> None:
            ray.get(self.trainer.save.remote(str(path)))
            ray.get(self.worker.load.remote(str(path)))

        try:
            return {"files": _seconds(move)}
        finally:
            path.unlink(missing_ok=True)

    def round(self) -> dict[str, float]:
        """Every way once, on new values, each checked to have arrived."""
        seconds: dict[str, float] = {}
        for way in WAYS:
            ray.get(self.trainer.change.remote())
            seconds |= getattr(self, way)()
            sums = ray.get([side.checksum.remote() for side in (self.trainer, self.worker)])
            if sums[0] != sums[1]:
                raise SystemExit(f"{way} did not deliver the bytes")
        return seconds


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(stderr=True)
    with start("bench", address="local", settings=Settings(http_port=0)) as service:
        bench = Bench(options.mb, options.tensors, service.name)
        bench.round()  # warms every way up
        rounds = [bench.round() for _ in track(range(options.rounds), "measuring", console=console)]
    rows = [
        {
            "way": way,
            "seconds": median(r[way] for r in rounds),
            "gbytes_per_second": options.mb / 1000 / median(r[way] for r in rounds),
            "times_raw": median(r[way] / r["raw"] for r in rounds),
        }
        for way in rounds[0]
    ]
    if options.json:
        print(json.dumps({"mb": options.mb, "tensors": options.tensors, "rounds": options.rounds, "ways": rows}))
        return
    table = Table("way", "median s", "GB/s", "x raw", title=f"{options.mb} MB in {options.tensors} tensors, 1 to 1")
    for row in rows:
        table.add_row(row["way"], *(f"{row[k]:.3f}" for k in ("seconds", "gbytes_per_second", "times_raw")))
    Console().print(table)


if __name__ == "__main__":
    main()
