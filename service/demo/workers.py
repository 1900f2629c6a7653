"""The demo's processes: trainer ranks and inference workers, each a Ray actor that takes no CPU slot."""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weightsync.protocol.status import SyncReport
from weightsync.service.demo.engine import EngineModel
from weightsync.service.demo.models import build_model, model_config
from weightsync.service.demo.reference import bit_differences, expected_parameters, logits_distance
from weightsync.service.publisher import Publisher
from weightsync.service.sources import DTensorSource
from weightsync.service.subscriber import Subscriber
from weightsync.service.targets import ModuleTarget

SEED = 20260
SEQUENCE = 12
LEARNING_RATE = 1e-3
"""AdamW moves every weight by about this much per step: 5 % of the initial standard deviation, so that the
logits of one version are far from those of the one before."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _join_group(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )


class TrainerRank:
    """One FSDP2 rank: trains, publishes, and answers for what it published."""

    def __init__(self, service: str, size: str, mode: str, rank: int, world: int, port: int) -> None:
        _join_group(rank, world, port)
        self._rank = rank
        self._config = model_config(size)
        model = build_model(size, SEED)
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        self._model = fully_shard(model, mesh=mesh, reshard_after_forward=True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, foreach=False)
        self._generator = torch.Generator().manual_seed(SEED + rank)
        self._publisher = Publisher(service, rank, world, DTensorSource(self._model), mode=mode)

    def parameters(self) -> int:
        """Elements of the whole model, tied ones once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def train_step(self) -> tuple[float, list[str]]:
        """One optimiser step on random next-token data; (loss, matrices of this rank that did not change)."""
        matrices = {name: p for name, p in self._model.named_parameters() if p.dim() > 1 and _local(p).numel()}
        before = {name: _local(p).clone() for name, p in matrices.items()}
        tokens = torch.randint(0, self._config.vocab_size, (1, SEQUENCE), generator=self._generator)
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss), [name for name, p in matrices.items() if torch.equal(before[name], _local(p))]

    def publish(self, version: int) -> SyncReport:
        return self._publisher.publish(version)

    def full_state(self) -> Any:
        """The full state dict by all-gather (a reference, not part of any sync), in the object store once."""
        full = {}
        for name, parameter in self._model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if self._rank == 0:
                full[name] = whole.detach().view(torch.int16).numpy()
        return ray.put(full) if self._rank == 0 else None

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """The trainer's own logits, float32; every rank must call it."""
        out = self._model(input_ids=tokens).logits.float()
        return out if self._rank == 0 else None

    def close(self) -> None:
        self._publisher.close()
        dist.destroy_process_group()


class InferenceWorker:
    """One tensor-parallel rank of the engine."""

    def __init__(self, service: str, size: str, install: str, rank: int, world: int, port: int) -> None:
        _join_group(rank, world, port)
        self._rank, self._world = rank, world
        self._config = model_config(size)
        self._model = EngineModel(self._config, rank, world)
        self._addresses = self._data_ptrs()
        self._subscriber = Subscriber(service, f"tp{rank}", ModuleTarget(self._model), install=install)

    def ready(self) -> None:
        """Returns once the worker is built and has joined."""

    def sync(self, version: int) -> int:
        return self._subscriber.sync(version)

    def verify(self, full: dict[str, np.ndarray]) -> list[str]:
        """Bit for bit against the reference; also that no parameter was moved in memory."""
        state = {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in full.items()}
        expected = expected_parameters(state, self._config, self._rank, self._world)
        held = dict(self._model.named_parameters())
        problems = bit_differences(held, expected)
        if self._data_ptrs() != self._addresses:
            problems.append("a parameter was reallocated")
        return problems

    def logits_distance(self, tokens: torch.Tensor, theirs: torch.Tensor) -> float:
        """How far this worker's logits are from the trainer's; every rank must call it."""
        return logits_distance(self._model(tokens), theirs)

    def close(self) -> None:
        self._subscriber.close()
        dist.destroy_process_group()

    def _data_ptrs(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self._model.named_parameters()}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


def spawn(actor_class: type, *common: Any, world: int) -> list[Any]:
    """One actor per rank; they meet at a free port of this host."""
    port = free_port()
    remote = ray.remote(num_cpus=0)(actor_class)
    return [remote.remote(*common, rank, world, port) for rank in range(world)]


def stop(actors: list[Any], timeout_s: float = 5.0) -> None:
    """Close actors in parallel, then end their processes."""
    deadline = time.monotonic() + timeout_s
    closing = [actor.close.remote() for actor in actors]
    ray.wait(closing, num_returns=len(closing), timeout=max(0.0, deadline - time.monotonic()))
    for actor in actors:
        ray.kill(actor)

