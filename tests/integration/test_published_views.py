"""Trainer tensors under checkpoint names, through a real service: every transport and strategy brings the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.protocol.errors import SyncError, UnsupportedLayoutError
from weightsync.protocol.messages import TensorMeta
from weightsync.protocol.status import SyncReport
from weightsync.service import (
    CastSource,
    GroupedSource,
    MappedSource,
    Publisher,
    SafetensorsSource,
    ServiceHandle,
    ShardSource,
    StateDictSource,
    StateDictTarget,
    Subscriber,
)

EXPERTS, FFN, HIDDEN, GROUPS, HEAD = 4, 40, 64, 2, 8


def trainer(version: int) -> dict[str, torch.Tensor]:
    """A layer as a trainer holds it: stacked experts with gate and up fused, inputs first, and an interleaved QKV."""
    generator = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn((30, HIDDEN), generator=generator),
        "layers.0.qkv": torch.randn((GROUPS * 4 * HEAD, HIDDEN), generator=generator),
        "layers.0.experts": torch.randn((EXPERTS, HIDDEN, 2, FFN), generator=generator),
        "layers.0.router": torch.randn((EXPERTS, HIDDEN), generator=generator),
    }


def checkpoint(t: Any) -> dict[str, Any]:
    """The same under checkpoint names; runs on recording tensors and, as the oracle, on real ones."""
    heads = t["layers.0.qkv"].view(GROUPS, 4, HEAD, HIDDEN)
    out = {"embed.weight": t["embed"][:27], "head.weight": t["embed"][:27]}
    for name, part in (("q", heads[:, :2]), ("k", heads[:, 2]), ("v", heads[:, 3])):
        out[f"layers.0.{name}.weight"] = part.reshape(-1, HIDDEN)
    for expert in range(EXPERTS):
        out[f"layers.0.experts.{expert}.gate.weight"] = t["layers.0.experts"][expert, :, 0].t()
        out[f"layers.0.experts.{expert}.up.weight"] = t["layers.0.experts"][expert, :, 1].t()
    return out


def expected(version: int) -> dict[str, torch.Tensor]:
    full = trainer(version)
    return checkpoint(full) | {"layers.0.router": full["layers.0.router"]}


class Part(ShardSource):
    """One of two ranks: half of dimension 0 of everything; `load` is the optimiser step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        full = trainer(0)
        shards = []
        for name, tensor in full.items():
            half = tensor.shape[0] // 2
            shards.append(LocalShard(name, (rank * half, *(0,) * (tensor.dim() - 1)), self._cut(tensor).clone()))
        super().__init__([TensorMeta(n, "float32", tuple(t.shape)) for n, t in full.items()], shards)

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(2)[self._rank]

    def load(self, version: int) -> None:
        full = trainer(version)
        for shard in self.shards():
            shard.tensor.copy_(self._cut(full[shard.name]))


def publish(publishers: Sequence[Publisher], version: int) -> SyncReport:
    """All ranks at once; the error of one of them, if any."""
    outcome: list[Any] = []

    def run(publisher: Publisher) -> None:
        try:
            outcome.append(publisher.publish(version, 30))
        except Exception as error:
            outcome.append(error)

    threads = [threading.Thread(target=run, args=(publisher,)) for publisher in publishers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in outcome:
        if isinstance(one, Exception):
            raise one
    report: SyncReport = outcome[0]
    return report


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    "options",
    [
        {"verify": "full"},
        {"strategy": "packed", "verify": "full"},
        {"strategy": "direct"},
        {"strategy": "span"},
        {"transport": "object_store", "verify": "full"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_views_of_shards_arrive_as_torch_makes_them(
    make_service: Callable[..., ServiceHandle], stack: ExitStack, options: dict[str, Any]
) -> None:
    service = make_service(**options)
    parts = [Part(rank) for rank in range(2)]
    publishers = [
        stack.enter_context(Publisher(service, rank, 2, MappedSource(part, checkpoint)))
        for rank, part in enumerate(parts)
    ]
    held = {name: torch.zeros(tensor.shape) for name, tensor in expected(0).items()}
    worker = stack.enter_context(Subscriber(service, "w", StateDictTarget(held)))
    for version in (1, 2, 3):
        for part in parts:
            part.load(version)
        report = publish(publishers, version)
        assert worker.sync(version, 30) == version
        for name, tensor in expected(version).items():
            assert torch.equal(held[name], tensor), (name, version)
        tied = held["head.weight"].nbytes
        assert report.bytes == sum(tensor.nbytes for tensor in held.values()) - tied, "a tied weight moves once"


def test_masters_are_served_cast_and_what_cannot_be_read_in_place_is(
    make_service: Callable[..., ServiceHandle], stack: ExitStack
) -> None:
    """Every second column falls into elements: refused as it lies, published as a dense copy."""
    service = make_service()
    full = {"w": torch.randn(2000, 6)}
    source = MappedSource(StateDictSource(full), lambda t: {"even": t["w"].view(2000, 3, 2)[:, :, 0]})
    with pytest.raises(UnsupportedLayoutError, match=r"'even'.*mode='staged'"):
        Publisher(service, 0, 1, source)
    publisher = stack.enter_context(Publisher(service, 0, 1, CastSource(source, torch.bfloat16)))
    held = {"even": torch.zeros(2000, 3, dtype=torch.bfloat16)}
    worker = stack.enter_context(Subscriber(service, "w", StateDictTarget(held)))
    for version in (1, 2, 3):
        full["w"].add_(1.25)
        publisher.publish(version, 30)
        worker.sync(version, 30)
        assert torch.equal(held["even"], full["w"][:, ::2].to(torch.bfloat16))


def _staged_views() -> WeightSource:
    return MappedSource(StateDictSource(trainer(5)), checkpoint)


def _exporter() -> WeightSource:
    tensors = expected(5)
    metadata = [
        TensorMeta(name, "float32", tuple(t.shape), "embed.weight" if name == "head.weight" else None)
        for name, t in tensors.items()
    ]

    def export() -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        for group in GroupedSource(metadata, lambda: ()).groups:
            for name in group:
                yield [name], [tensors[name].contiguous()]

    return GroupedSource(metadata, export)


@pytest.mark.parametrize("source", [_staged_views, _exporter], ids=["views", "exporter"])
def test_staged_publishing_of_views_and_exporters(
    make_service: Callable[..., ServiceHandle], stack: ExitStack, source: Callable[[], WeightSource]
) -> None:
    service = make_service()
    publisher = stack.enter_context(Publisher(service, 0, 1, source(), mode="staged"))
    held = {name: torch.zeros(tensor.shape) for name, tensor in expected(5).items()}
    worker = stack.enter_context(Subscriber(service, "w", StateDictTarget(held)))
    for version in (1, 2, 3):
        for tensor in held.values():
            tensor.zero_()
        publisher.publish(version, 30)
        assert worker.sync(version, 30) == version
        for name, tensor in expected(5).items():
            assert torch.equal(held[name], tensor), name


def test_a_checkpoint_is_published_without_a_trainer(
    make_service: Callable[..., ServiceHandle], stack: ExitStack, tmp_path: Path
) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in expected(3).items() if name != "head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    service = make_service()
    source = SafetensorsSource(tmp_path, aliases={"head.weight": "embed.weight"})
    publisher = stack.enter_context(Publisher(service, 0, 1, source))
    held = {name: torch.zeros(tensor.shape) for name, tensor in expected(3).items()}
    worker = stack.enter_context(Subscriber(service, "w", StateDictTarget(held)))
    publisher.publish(1, 30)
    worker.sync(1, 30)
    assert all(torch.equal(held[name], tensor) for name, tensor in expected(3).items())


def test_a_view_whose_trainer_tensor_moved_is_refused_by_its_name(
    make_service: Callable[..., ServiceHandle], stack: ExitStack
) -> None:
    service = make_service()
    base = {"w": torch.nn.Parameter(torch.randn(8, 4))}
    source = MappedSource(StateDictSource(base), lambda t: {"upper": t["w"][4:]})
    publisher = stack.enter_context(Publisher(service, 0, 1, source))
    stack.enter_context(Subscriber(service, "w", StateDictTarget({"upper": torch.zeros(4, 4)})))
    publisher.publish(1, 30)
    base["w"].data = base["w"].data.clone()
    with pytest.raises(SyncError, match=r"'upper'.*reallocated"):
        publisher.publish(2, 30)
