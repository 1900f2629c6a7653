"""The demo's processes: trainer ranks and inference workers, each a Ray actor that takes no CPU slot."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from weightsync.protocol.status import SyncReport
from weightsync.service.demo.engine import EngineModel
from weightsync.service.demo.models import build_model, init_parameters, model_config
from weightsync.service.demo.reference import bit_differences, expected_parameters, logits_distance
from weightsync.service.ports import free_port
from weightsync.service.publisher import Publisher
from weightsync.service.sources import DTensorSource
from weightsync.service.subscriber import Subscriber
from weightsync.service.targets import ModuleTarget

SEED = 20260
SEQUENCE = 12
LEARNING_RATE = 1e-3
"""AdamW moves every weight by about this much per step: 5 % of the initial standard deviation, so that the
logits of one version are far from those of the one before."""
VECTOR_LEARNING_RATE = 1e-2
"""For norms and biases. Norms start at exactly 1, where a step of `LEARNING_RATE` rounds away in bfloat16:
every norm of every version would stay alike, and one that was not delivered again could not be seen."""

_KEEP_MEMORY = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(100 << 30),
}
"""Huge pages, and freed memory stays with the process: FSDP frees and takes a gigabyte per step, and first-touch
page faults were most of a step's time here (7 to 9 s a step without, 5 to 6 s with)."""


def _join_group(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)


class TrainerRank:
    """One FSDP2 rank: trains, publishes, and answers for what it published."""

    def __init__(self, service: str, size: str, mode: str, rank: int, world: int, port: int) -> None:
        _join_group(rank, world, port)
        self._rank = rank
        self._config = model_config(size)
        model = build_model(size)
        mesh = init_device_mesh("cpu", (world,))
        # Gathering over gloo is what a step costs here, so it is done once per step, not again for backward.
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        self._model = fully_shard(model, mesh=mesh, reshard_after_forward=False)
        init_parameters(((name, _local(p)) for name, p in self._model.named_parameters()), SEED + rank)
        self._optimizer = torch.optim.AdamW(_parameter_groups(self._model), fused=True)
        self._before: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(SEED + rank)
        self._publisher = Publisher(service, rank, world, DTensorSource(self._model), mode=mode)

    def parameters(self) -> int:
        """Elements of the whole model, tied ones once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def train_step(self) -> tuple[float, list[str]]:
        """One optimiser step on random next-token data; (loss, parameters of this rank left unchanged)."""
        held = {name: p for name, p in self._model.named_parameters() if _local(p).numel()}
        for name, p in held.items():
            self._before.setdefault(name, torch.empty_like(_local(p))).copy_(_local(p))
        tokens = torch.randint(0, self._config.vocab_size, (1, SEQUENCE), generator=self._generator)
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item(), [name for name, p in held.items() if torch.equal(self._before[name], _local(p))]

    def publish(self, version: int) -> SyncReport:
        return self._publisher.publish(version)

    @torch.no_grad()
    def reference(self, tokens: torch.Tensor) -> tuple[Any, torch.Tensor] | None:
        """What the workers are checked against: the full state dict (in the object store) and logits, float32.

        Both come from FSDP's own all-gather, which no sync has any part in. Every rank must call it; rank 0
        answers.
        """
        logits = self._model(input_ids=tokens).logits.float()
        answer = None
        if self._rank == 0:
            answer = ray.put({name: _as_array(p) for name, p in self._model.named_parameters()}), logits
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return answer

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


def _parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors, each with a step that is large enough to show in bfloat16."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "lr": LEARNING_RATE},
        {"params": [p for p in parameters if p.dim() == 1], "lr": VECTOR_LEARNING_RATE},
    ]


def _local(parameter: Any) -> torch.Tensor:
    shard: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return shard.detach()


def _as_array(parameter: torch.Tensor) -> np.ndarray:
    """The bits of a bfloat16 tensor, not copied and unknown to torch.

    `Tensor.numpy()` would make the storage unresizable, and FSDP frees by resizing. Only valid until then.
    """
    bits = (ctypes.c_int16 * parameter.numel()).from_address(parameter.data_ptr())
    return np.ctypeslib.as_array(bits).reshape(parameter.shape)


def spawn(actor_class: type, *common: Any, world: int) -> list[Any]:
    """One actor per rank; they meet at a free port of this host."""
    port = free_port()
    remote: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": _KEEP_MEMORY})(actor_class)
    return [remote.remote(*common, rank, world, port) for rank in range(world)]


def stop(actors: list[Any], timeout_s: float = 5.0) -> None:
    """Close actors in parallel, then end their processes."""
    deadline = time.monotonic() + timeout_s
    closing = [actor.close.remote() for actor in actors]
    ray.wait(closing, num_returns=len(closing), timeout=max(0.0, deadline - time.monotonic()))
    for actor in actors:
        ray.kill(actor)
