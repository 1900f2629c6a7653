"""Sources over real FSDP2 shards: experts out of a sharded stack, and adapters merged into sharded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.service.pulls import assert_equal, pull_whole
from tests.service.test_huggingface_source import model_of, saved
from tests.service.test_lora_source import merged_by_hand, wrapped
from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.service import MergedLoraSource, ShardSource, TransformersSource
from weightsync.service.ports import free_port

pytest.importorskip("transformers", minversion="5.0")
WORLD = 2
KINDS = ("mixtral", "qwen3_moe")


def _held(source: WeightSource) -> tuple[Any, Any]:
    """What a rank would publish, to be looked at by another process."""
    source.refresh()
    return source.manifest(), [(s.name, s.offset, s.tensor.clone()) for s in source.shards()]


def _rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    found = {}
    for kind in KINDS:
        model = model_of(kind)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        found[kind] = _held(TransformersSource(fully_shard(model, mesh=mesh)))
    adapted, _ = wrapped()
    found["lora"] = _held(MergedLoraSource(fully_shard(adapted, mesh=mesh)))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_rank, (free_port(), str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def sources(ranks: list[dict[str, Any]], what: str) -> list[ShardSource]:
    return [ShardSource(found[what][0], [LocalShard(*shard) for shard in found[what][1]]) for found in ranks]


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_an_fsdp_model_are_its_checkpoint_and_no_rank_holds_all(
    ranks: list[dict[str, Any]], kind: str, tmp_path: Path
) -> None:
    expected = saved(model_of(kind), tmp_path)
    assert_equal(pull_whole(sources(ranks, kind)), expected)
    total = sum(tensor.numel() for tensor in expected.values())
    held = [sum(tensor.numel() for _, _, tensor in found[kind][1]) for found in ranks]
    assert sum(held) == total
    assert max(held) < 0.7 * total


def test_adapters_are_merged_shard_by_shard(ranks: list[dict[str, Any]]) -> None:
    _, inner = wrapped()
    got, expected = pull_whole(sources(ranks, "lora")), merged_by_hand(inner)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():  # a product of a part of the rows may round otherwise than one of all
        torch.testing.assert_close(got[name], tensor, rtol=1e-2 if tensor.dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    held = [sum(tensor.numel() for _, _, tensor in found["lora"][1]) for found in ranks]
    assert sum(held) == sum(tensor.numel() for tensor in expected.values())
