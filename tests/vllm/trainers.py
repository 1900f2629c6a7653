"""Trainer ranks as processes: FSDP2 over gloo, real optimiser steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import save_file

from weightsync.service import DTensorSource, Publisher


@ray.remote(num_cpus=0)
class FsdpRank:
    """One rank of an FSDP2 trainer. `rendezvous` is a file that all ranks share."""

    def __init__(self, service: str, rank: int, world: int, rendezvous: str, kind: str, seed: int) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from tests.vllm.models import build

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (world,))
        self._rank = rank
        self._model = build(kind, seed)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.02, foreach=False)
        self._publisher = Publisher(service, rank, world, DTensorSource(self._model, buffers=False))

    def step(self, seed: int) -> float:
        """One optimiser step on random tokens; the loss."""
        generator = torch.Generator().manual_seed(100 * seed + self._rank)
        tokens = torch.randint(3, 250, (2, 32), generator=generator)
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)

    def publish(self, version: int) -> Any:
        return self._publisher.publish(version)

    def save(self, folder: str) -> None:
        """A checkpoint of the weights as they are; a collective, written by rank 0."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        whole = get_model_state_dict(self._model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self._rank == 0:
            if self._model.config.tie_word_embeddings:
                whole.pop("lm_head.weight", None)
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in whole.items()}, path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(self._model.config.to_dict(), default=str))

    def close(self) -> None:
        self._publisher.close()


def fsdp_trainer(service: str, world: int, folder: Path, kind: str, seed: int) -> list[Any]:
    """All ranks; their constructors run at once."""
    rendezvous = folder / f"rendezvous-{service}"
    return [FsdpRank.remote(service, rank, world, str(rendezvous), kind, seed) for rank in range(world)]


def everywhere(ranks: list[Any], method: str, *arguments: Any) -> list[Any]:
    """Call a method on every rank at once."""
    return ray.get([getattr(rank, method).remote(*arguments) for rank in ranks])
