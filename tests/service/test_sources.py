"""Sources say where each rank's shard lies; real FSDP2 and tensor-parallel modules are the judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.service.ports import free_port
from weightsync.service.sources import DTensorSource, ModuleSource, StateDictSource

WORLD = 4


class Mlp(nn.Module):
    """Sizes that no number of ranks divides, a buffer, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 5)
        self.tied = nn.Linear(7, 13, bias=False)
        self.tied.weight = self.up.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) + self.tied(x).sum() * self.scale.sum()


def full_model() -> Mlp:
    torch.manual_seed(7)
    return Mlp()


def _fsdp(model: Mlp) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))


def _hsdp(model: Mlp) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _tensor_parallel(model: Mlp) -> nn.Module:
    return parallelize_module(
        model, init_device_mesh("cpu", (WORLD,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def _fsdp_over_tensor_parallel(model: Mlp) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


LAYOUTS = {f.__name__.removeprefix("_"): f for f in (_fsdp, _hsdp, _tensor_parallel, _fsdp_over_tensor_parallel)}


def _rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    found: dict[str, Any] = {}
    for layout, shard in LAYOUTS.items():
        source = DTensorSource(shard(full_model()))
        found[layout] = (
            source.manifest(),
            [(s.name, s.offset, s.tensor.clone(), s.tensor.data_ptr()) for s in source.shards()],
        )
    found["partial"] = _refusal(DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (WORLD,)), [Partial()]))
    transposed = DTensor.from_local(torch.ones(4, 2).t(), init_device_mesh("cpu", (WORLD,)), [Shard(0)])
    found["transposed"] = [(s.offset, s.tensor.stride()) for s in StateDictSource({"w": transposed}).shards()]
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _refusal(tensor: DTensor) -> str:
    try:
        StateDictSource({"w": tensor}).shards()
    except UnsupportedLayoutError as error:
        return str(error)
    return "not refused"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_rank, (free_port(), str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_shard_is_the_region_it_says_and_together_they_are_the_model(
    ranks: list[dict[str, Any]], layout: str
) -> None:
    full = dict(full_model().named_parameters(remove_duplicate=False)) | {"scale": torch.ones(3)}
    covered = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    for found in ranks:
        for name, offset, local, _ in found[layout][1]:
            region = tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
            assert torch.equal(local, full[name][region]), (name, offset)
            covered[name][region] = 1
    published = {meta.name for meta in ranks[0][layout][0] if meta.alias_of is None}
    assert published >= set(full) - {"tied.weight"}
    assert all(bool(covered[name].all()) for name in published)


def test_fsdp_shards_are_parts_and_hsdp_ranks_are_replicas(ranks: list[dict[str, Any]]) -> None:
    total = sum(tensor.numel() for tensor in full_model().parameters())
    held = [sum(t.numel() for n, _, t, _ in found["fsdp"][1] if n != "scale") for found in ranks]
    assert sum(held) == total
    assert max(held) < total / 2
    hsdp = [[(n, o) for n, o, _, _ in found["hsdp"][1]] for found in ranks]
    assert hsdp[0] == hsdp[2] != hsdp[1] == hsdp[3]


@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
def test_all_ranks_say_the_same_of_the_model_and_publish_tied_weights_once(
    ranks: list[dict[str, Any]], layout: str
) -> None:
    manifests = [found[layout][0] for found in ranks]
    assert all(manifest == manifests[0] for manifest in manifests)
    assert {meta.name: meta.alias_of for meta in manifests[0]} == {
        "up.weight": None,
        "up.bias": None,
        "down.weight": None,
        "down.bias": None,
        "tied.weight": "up.weight",
        "scale": None,
    }
    assert all("tied.weight" not in {name for name, *_ in found[layout][1]} for found in ranks)


def test_what_cannot_be_read_in_place_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "'w'" in found["partial"]
        assert "Partial" in found["partial"]
        assert "staged" in found["partial"]


def test_what_is_not_contiguous_is_published_as_it_lies(ranks: list[dict[str, Any]]) -> None:
    assert [found["transposed"] for found in ranks] == [[((2 * rank, 0), (1, 2))] for rank in range(WORLD)]


def test_shards_are_the_trainers_own_memory() -> None:
    module = full_model()
    for shard in ModuleSource(module).shards():
        assert shard.tensor.data_ptr() == module.state_dict(keep_vars=True)[shard.name].data_ptr()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": [1, 2]}, "'w' is a list, not a tensor"),
        ({"w": torch.empty(2, device="meta")}, "'w' is on the meta device"),
    ],
)
def test_what_is_no_tensor_with_bytes_is_refused_by_name(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidLayoutError, match=message):
        StateDictSource(tensors)


def test_a_module_without_dtensors_is_not_a_dtensor_source() -> None:
    with pytest.raises(InvalidLayoutError, match="use ModuleSource"):
        DTensorSource(full_model())
