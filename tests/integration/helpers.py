"""Trainer ranks and workers as real processes, and models to move between them."""

from __future__ import annotations

from typing import Any

import ray
import torch

from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.actors.spawn import call, spawn_registry
from weightsync.actors.transport import choose_transport
from weightsync.protocol.messages import TensorMeta
from weightsync.protocol.status import SyncReport
from weightsync.service import Publisher, ServiceHandle, Settings, StateDictTarget, Subscriber


def start_registry(name: str, settings: Settings) -> ServiceHandle:
    """A service as `start` makes it, but for the ingress, which takes longest and which few tests ask anything."""
    transport, reason = choose_transport(settings.transport)
    registry = spawn_registry(settings.registry_options(name, transport, reason, url=None))
    call(registry.status.remote())
    return ServiceHandle(name, registry)


def model(version: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of a small model with mixed dtypes and odd sizes; every version has other bits."""
    generator = torch.Generator().manual_seed(1000 * seed + version)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "embed.weight": random(37, 16),
        "layers.0.attn.weight": random(24, 16, dtype=torch.bfloat16),
        "layers.0.scale": random(5),
        "layers.1.attn.weight": random(24, 16, dtype=torch.bfloat16),
        "layers.1.scale": random(5),
        "layers.1.step": torch.tensor(version, dtype=torch.int64),
        "norm.weight": random(16),
    }


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class RowSource(WeightSource):
    """One rank's rows of whole tensors (dimension 0 cut evenly, the rest to the last rank), lying in memory."""

    def __init__(self, full: dict[str, torch.Tensor], rank: int, world: int) -> None:
        self._full_shape = {name: tuple(tensor.shape) for name, tensor in full.items()}
        self.parts: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}
        for name, tensor in full.items():
            if tensor.dim() == 0:
                if rank == 0:
                    self.parts[name] = ((), tensor.clone())
                continue
            rows = tensor.shape[0] // world
            start = rank * rows
            end = tensor.shape[0] if rank == world - 1 else start + rows
            self.parts[name] = ((start, *(0,) * (tensor.dim() - 1)), tensor[start:end].clone())
        self._dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in full.items()}

    def load(self, full: dict[str, torch.Tensor]) -> None:
        """The optimiser step: new values in the same memory."""
        for name, (offset, part) in self.parts.items():
            whole = full[name]
            part.copy_(whole[offset[0] : offset[0] + part.shape[0]] if part.dim() else whole)

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(name, self._dtypes[name], shape) for name, shape in self._full_shape.items())

    def shards(self) -> list[LocalShard]:
        return [LocalShard(name, offset, part) for name, (offset, part) in self.parts.items()]

    def gather(self, names: Any) -> dict[str, torch.Tensor]:
        raise NotImplementedError("rows are published live")

    def held_names(self) -> tuple[str, ...]:
        return tuple(self.parts)


@ray.remote(num_cpus=0)
class Trainer:
    """A trainer rank that publishes rows of `model(version)`."""

    def __init__(self, service: str, rank: int, world: int) -> None:
        self._source = RowSource(model(0), rank, world)
        self._publisher = Publisher(service, rank, world, self._source)

    def publish(self, version: int, timeout: float = 30.0) -> SyncReport:
        self._source.load(model(version))
        return self._publisher.publish(version, timeout)

    def close(self) -> None:
        self._publisher.close()


@ray.remote(num_cpus=0)
class Worker:
    """An inference worker that holds the whole of `model`."""

    def __init__(self, service: str, name: str, install: str = "shadow") -> None:
        self._tensors = {n: torch.zeros_like(t) for n, t in model(0).items()}
        self._addresses = {n: t.data_ptr() for n, t in self._tensors.items()}
        self._subscriber = Subscriber(service, name, StateDictTarget(self._tensors), install=install)

    def sync(self, version: int | None = None, timeout: float = 30.0) -> int:
        return self._subscriber.sync(version, timeout)

    def holds(self, version: int) -> bool:
        """Bit for bit, in the memory it had from the start."""
        same_memory = all(t.data_ptr() == self._addresses[n] for n, t in self._tensors.items())
        return same_memory and equal(self._tensors, model(version))

    def ready(self) -> bool:
        return self._subscriber.ready

    def close(self) -> None:
        self._subscriber.close()
