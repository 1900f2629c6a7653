"""One suite for all transports: same plan, same bytes, same refusals, and no hang when the other side is gone.

Two trainer ranks and two engines live as long as the module, because processes are slow to start; what each test needs
of them is opened and closed in them. The tests of the second half drive a transport themselves, against the memory of
ranks that publish for real.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import nn

from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.actors.options import RegistryOptions
from weightsync.actors.reads import read_all
from weightsync.actors.spawn import call, spawn_registry
from weightsync.actors.transport import (
    TRANSPORT_NAMES,
    Peer,
    PreparedRead,
    ReadContext,
    ReadFailedError,
    Transport,
    create_transport,
)
from weightsync.protocol.errors import StaleEpochError, SyncError
from weightsync.protocol.messages import LayoutSnapshot, PullStats, TensorMeta
from weightsync.protocol.status import SyncReport
from weightsync.service import ModuleTarget, Publisher, ServiceHandle, Subscriber

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

VERSIONS = (1, 2, 3)
CONSUMER = 5
GUARD = 0xAB


def full(version: int) -> dict[str, torch.Tensor]:
    """Every tensor of the model; each version has other bits."""
    generator = torch.Generator().manual_seed(version)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "embed.weight": random(48, 40),
        "layers.0.large": random(640, 512),
        "layers.0.column": random(24, 64, dtype=torch.bfloat16),
        "layers.0.wide_column": random(96, 1024),
        "layers.0.scale": random(33, dtype=torch.bfloat16),
        "layers.1.converted": random(20, 12),
        "layers.1.turned": random(18, 10),
        "layers.1.fp8": random(16, 32, dtype=torch.float8_e4m3fn),
        "layers.1.fp8_scale": random(16, 1),
        "layers.1.int8": torch.randint(-128, 128, (9, 7), generator=generator).to(torch.int8),
        "layers.1.empty": random(0, 8),
        "norm.step": torch.tensor(version, dtype=torch.int64),
    }


def expected(version: int, index: int) -> dict[str, torch.Tensor]:
    """What engine `index` must hold: plain slicing of the whole tensors, none of the code under test."""
    whole = full(version)
    half, quarter = slice(32 * index, 32 * (index + 1)), slice(512 * index, 512 * (index + 1))
    return {
        "embed": whole["embed.weight"],
        "large": whole["layers.0.large"][300:] if index else whole["layers.0.large"][:300],
        "column": whole["layers.0.column"][:, half].contiguous(),
        "wide_column": whole["layers.0.wide_column"][:, quarter].contiguous(),
        "scale": whole["layers.0.scale"],
        "converted": whole["layers.1.converted"].to(torch.bfloat16),
        "turned": whole["layers.1.turned"].t().contiguous(),
        "fp8": whole["layers.1.fp8"],
        "fp8_scale": whole["layers.1.fp8_scale"],
        "int8": whole["layers.1.int8"],
        "empty": whole["layers.1.empty"],
        "step": whole["norm.step"],
    }


class EngineModel(nn.Module):
    """An engine's slices of the model, filled by a loader of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        for name, tensor in expected(0, index).items():
            self.register_buffer(name, torch.zeros_like(tensor))

    def load_weights(self, weights: Any) -> None:
        half, quarter = (
            slice(32 * self._index, 32 * (self._index + 1)),
            slice(512 * self._index, 512 * (self._index + 1)),
        )
        for name, weight in weights:
            own = name.split(".")[-1] if name != "embed.weight" else "embed"
            if own == "large":
                weight = weight[300:] if self._index else weight[:300]
            elif own == "column":
                weight = weight[:, half]
            elif own == "wide_column":
                weight = weight[:, quarter]
            elif own == "turned":
                weight = weight.t()
            self.get_buffer(own).copy_(weight)


class UnevenSource(WeightSource):
    """A rank's rows when live: the first gets a third of them, the second the rest; every other name when staged."""

    def __init__(self, rank: int, world: int, staged: bool) -> None:
        self._metas = tuple(
            TensorMeta(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in full(0).items()
        )
        self._cut: dict[str, slice] = {}
        for name, tensor in full(0).items():
            rows = tensor.shape[0] if tensor.dim() else 1
            first = rows if world == 1 else rows // 3
            self._cut[name] = slice(0, first) if rank == 0 else slice(first, rows)
        self._held = tuple(list(full(0))[rank::world]) if staged else tuple(full(0))
        self._parts = {name: self._own(name, tensor).clone() for name, tensor in full(0).items()}
        self._whole = full(0)

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self._cut[name]] if tensor.dim() else tensor

    def load(self, version: int) -> None:
        """The optimiser step: new values in the same memory."""
        self._whole = full(version)
        for name, part in self._parts.items():
            part.copy_(self._own(name, self._whole[name]))

    def manifest(self) -> tuple[TensorMeta, ...]:
        return self._metas

    def shards(self) -> list[LocalShard]:
        return [
            LocalShard(name, (self._cut[name].start, *(0,) * (part.dim() - 1)) if part.dim() else (), part)
            for name, part in self._parts.items()
        ]

    def gather(self, names: Any) -> dict[str, torch.Tensor]:
        return {name: self._whole[name] for name in names if name in self._held}

    def held_names(self) -> tuple[str, ...]:
        return self._held


@ray.remote(num_cpus=0)
class Rank:
    """A trainer rank of any number of services, one after another or at once."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[UnevenSource, Publisher]] = {}

    def open(self, service: ServiceHandle, rank: int, world: int, mode: str) -> None:
        source = UnevenSource(rank, world, mode == "staged")
        self._open[service.name] = source, Publisher(service, rank, world, source, mode=mode)

    def load(self, service: str, version: int) -> None:
        self._open[service][0].load(version)

    def publish(self, service: str, version: int) -> SyncReport:
        source, publisher = self._open[service]
        source.load(version)
        return publisher.publish(version, timeout=60)

    def pids(self, service: str) -> tuple[int, int]:
        """(this process, its producer actor)"""
        actor = self._open[service][1]._actor
        return os.getpid(), ray.get(
            actor.__ray_call__.options(concurrency_group="control").remote(lambda _: os.getpid())
        )

    def refresh_mirror(self, service: str) -> None:
        """As `publish` does first; the tests that drive a transport themselves never publish."""
        source, publisher = self._open[service]
        if publisher._mirror is not None:
            publisher._mirror.refresh(source.shards())

    def close(self, service: str) -> None:
        self._open.pop(service)[1].close()


@ray.remote(num_cpus=0)
class Engine:
    """An inference worker, one service after another."""

    def open(self, service: ServiceHandle, index: int, install: str) -> None:
        self._model = EngineModel(index)
        target = ModuleTarget(self._model)
        self._subscriber = Subscriber(service, f"w{index}", target, install=install)

    def sync(self, version: int) -> int:
        return self._subscriber.sync(version, timeout=60)

    def held(self) -> dict[str, tuple[str, np.ndarray]]:
        return {name: _bits(tensor) for name, tensor in self._model.named_buffers()}

    def last_pull(self) -> PullStats | None:
        return self._subscriber.last_pull

    def close(self) -> None:
        self._subscriber.close()


def _bits(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    return f"{tensor.dtype}{tuple(tensor.shape)}", tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def _differences(held: dict[str, tuple[str, np.ndarray]], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert held.keys() == wanted.keys()
    return [
        name
        for name, tensor in wanted.items()
        if held[name][0] != _bits(tensor)[0] or not np.array_equal(held[name][1], _bits(tensor)[1])
    ]


@pytest.fixture(scope="module")
def ranks(cluster: None) -> Iterator[list[Any]]:
    members = [Rank.remote() for _ in range(2)]
    yield members
    for member in members:
        ray.kill(member)


@pytest.fixture(scope="module")
def engines(cluster: None) -> Iterator[list[Any]]:
    members = [Engine.remote() for _ in range(2)]
    yield members
    for member in members:
        ray.kill(member)


def _service(transport: str, **options: Any) -> ServiceHandle:
    """A registry without HTTP in front of it, which nothing here asks."""
    name = f"t{secrets.token_hex(3)}"
    settings = {"min_consumers": 2, "stall_timeout_s": 30.0, "long_poll_s": 1.0, **options}
    return ServiceHandle(name, spawn_registry(RegistryOptions(name, transport, "set by the test", **settings)))


@pytest.mark.parametrize("mode", ["live", "staged"])
@pytest.mark.parametrize("transport", TRANSPORT_NAMES)
def test_every_layout_arrives_bit_for_bit_version_after_version(
    transport: str, mode: str, ranks: list[Any], engines: list[Any]
) -> None:
    """Two uneven ranks to two engines, one of which installs beside the live weights and one in place."""
    service = _service(transport, verify="full")
    try:
        ray.get([rank.open.remote(service, i, 2, mode) for i, rank in enumerate(ranks)])
        opened = [engine.open.remote(service, i, ("shadow", "in_place")[i]) for i, engine in enumerate(engines)]
        ray.get(opened)
        needed = sum(_source_bytes(index) for index in range(2))
        for version in VERSIONS:
            publishing = [rank.publish.remote(service.name, version) for rank in ranks]
            assert ray.get([engine.sync.remote(version) for engine in engines]) == [version, version]
            reports = ray.get(publishing)
            assert reports[0] == reports[1]
            for report in reports:
                assert report.transport == transport
                assert report.bytes == report.needed_bytes == needed
                assert report.installed == ["w0", "w1"]
            for index, held in enumerate(ray.get([engine.held.remote() for engine in engines])):
                assert _differences(held, expected(version, index)) == []
            for pull in ray.get([engine.last_pull.remote() for engine in engines]):
                assert pull.regions_verified > 0
                assert pull.regions_repeated == 0
        if mode == "staged":
            _assert_packs_of_an_old_epoch_are_refused(service)
        ray.get([engine.close.remote() for engine in engines])
        ray.get([rank.close.remote(service.name) for rank in ranks])
        status = service.status()
        assert (status.producers, status.consumers) == ([], [])
    finally:
        service.shutdown()


def _source_bytes(index: int) -> int:
    """Bytes of the trainer's tensors that engine `index` needs, in the trainer's dtypes."""
    wanted = expected(0, index)
    return sum(t.nbytes for t in wanted.values()) + wanted["converted"].nbytes  # which is twice as wide at its source


def _assert_packs_of_an_old_epoch_are_refused(service: ServiceHandle) -> None:
    layout = call(service.registry.layout.remote())
    consumer = service.status().consumers[0].consumer_id
    for actor in call(service.registry.producer_actors.remote(layout.generation)):
        with pytest.raises(StaleEpochError):
            call(actor.serve.remote(consumer, 0, 1), 20)


# -- a transport by itself ------------------------------------------------------------------------------


@dataclass
class Wire:
    """A transport of this process, and two ranks whose memory it can read. Epoch 7 is open for CONSUMER."""

    transport: Transport
    layout: LayoutSnapshot
    peers: list[Peer]
    mortal: Any
    service: ServiceHandle
    buffer: torch.Tensor

    context = ReadContext(7, CONSUMER, stall_timeout_s=20.0)

    def shard(self, rank: int, name: str) -> tuple[int, int]:
        """(address, bytes) of a rank's part of a tensor."""
        tensor = next(t for t in self.layout.producers[rank].table if t.name == name)
        return tensor.shards[0].addr, int(np.prod(tensor.shards[0].shape)) * tensor.elsize

    def prepare(self, rank: int, src: list[int], dst: list[int], nbytes: list[int]) -> PreparedRead:
        addresses = np.array(src, dtype=np.uint64), np.array(dst, dtype=np.uint64)
        return self.transport.prepare(self.peers[rank], *addresses, np.array(nbytes, dtype=np.int64))

    def whole(self, rank: int, name: str, at: int = 0) -> PreparedRead:
        """A read of a rank's part of a tensor to offset `at` of the buffer."""
        addr, nbytes = self.shard(rank, name)
        return self.prepare(rank, [addr], [self.buffer.data_ptr() + at], [nbytes])

    def landed(self, nbytes: int, at: int = 0) -> np.ndarray:
        return self.buffer[at : at + nbytes].numpy().copy()


@pytest.fixture(scope="module", params=TRANSPORT_NAMES)
def wire(request: pytest.FixtureRequest, ranks: list[Any]) -> Iterator[Wire]:
    service, mortal = _service(request.param), Rank.remote()
    members = [ranks[0], mortal]
    ray.get([member.open.remote(service, rank, 2, "live") for rank, member in enumerate(members)])
    ray.get([member.load.remote(service.name, 4) for member in members])
    ray.get([member.refresh_mirror.remote(service.name) for member in members])
    layout = call(service.registry.layout.remote())
    actors = call(service.registry.producer_actors.remote(layout.generation))
    peers = [Peer(r, r, p.agent_metadata, a) for r, (p, a) in enumerate(zip(layout.producers, actors, strict=True))]
    for peer in peers:
        call(peer.actor.begin_sync.remote(7, [CONSUMER]))
    transport = create_transport(request.param, f"{service.name}:wire", serves=False)
    buffer = torch.zeros(2 << 20, dtype=torch.uint8)
    transport.register([buffer])
    for peer in peers:
        transport.connect(peer)
    yield Wire(transport, layout, peers, mortal, service, buffer)
    transport.close()
    ray.get(ranks[0].close.remote(service.name))
    ray.kill(mortal)
    service.shutdown()


def _part(rank: int, name: str, version: int = 4) -> np.ndarray:
    tensor = full(version)[name]
    first = tensor.shape[0] // 3
    return _bits(tensor[first:] if rank else tensor[:first])[1]


def test_runs_land_where_they_are_to_and_nowhere_else(wire: Wire) -> None:
    wire.buffer.fill_(GUARD)
    base = wire.buffer.data_ptr()
    large, size = wire.shard(1, "layers.0.large")
    small, _ = wire.shard(0, "embed.weight")
    reads = [
        wire.prepare(1, [large + 64, large + 600_000], [base + 4_096, base + 1_000_000], [500_000, 48]),
        wire.prepare(
            0, [small + 160 * row for row in range(0, 16, 2)], [base + 100 * row for row in range(8)], [31] * 8
        ),
    ]
    moved: list[int] = []
    read_all(wire.transport, reads, wire.context, moved.append)
    assert sorted(moved) == [8 * 31, 500_048]
    assert reads[0].nbytes == 500_048
    wanted = np.full(len(wire.buffer), GUARD, dtype=np.uint8)
    rows, parts = _part(0, "embed.weight"), _part(1, "layers.0.large")
    assert len(parts) == size
    wanted[4_096:504_096] = parts[64:500_064]
    wanted[1_000_000:1_000_048] = parts[600_000:600_048]
    for row in range(8):
        wanted[100 * row : 100 * row + 31] = rows[320 * row : 320 * row + 31]
    assert np.array_equal(wire.buffer.numpy(), wanted)
    wire.transport.release(reads)


def test_the_carrier_of_a_peer_that_was_read_from_is_known(wire: Wire) -> None:
    read = wire.whole(0, "embed.weight")
    read_all(wire.transport, [read], wire.context)
    carrier = wire.transport.carrier(wire.peers[0])
    if wire.transport.name == "object_store":
        assert carrier == "object store"
    else:
        assert carrier in ("cma", "shared memory", "tcp", "rdma", "rdma or cma")
    wire.transport.release([read])


def test_memory_that_was_not_published_is_refused(wire: Wire) -> None:
    wire.buffer.fill_(GUARD)
    base = wire.buffer.data_ptr()
    elsewhere = torch.zeros(4_096, dtype=torch.uint8)
    for src, nbytes in ((1 << 40, 64), (elsewhere.data_ptr(), 64), (1 << 40, 1 << 20)):
        with pytest.raises(SyncError):
            read_all(wire.transport, [wire.prepare(0, [src], [base], [nbytes])], wire.context)
    assert bool((wire.buffer == GUARD).all())


def test_a_destination_that_was_not_registered_is_refused_before_anything_is_read(wire: Wire) -> None:
    addr, _ = wire.shard(0, "embed.weight")
    foreign = torch.zeros(4_096, dtype=torch.uint8)
    end = wire.buffer.data_ptr() + wire.buffer.numel()
    for dst, nbytes in ((foreign.data_ptr(), 64), (end - 32, 64), (end + (1 << 30), 1)):
        with pytest.raises(SyncError, match="not registered"):
            wire.prepare(0, [addr], [dst], [nbytes])
    assert not foreign.any()


def test_a_stale_epoch_and_a_stranger_are_refused_where_the_producer_is_asked(wire: Wire) -> None:
    if wire.transport.reads_trainer_memory:
        pytest.skip("nobody is asked: what a stale reader has read is refused by the registry")
    wire.buffer.fill_(GUARD)
    read = wire.whole(0, "embed.weight")
    for stale in (ReadContext(6, CONSUMER), ReadContext(8, CONSUMER), ReadContext(7, CONSUMER + 1)):
        with pytest.raises(ReadFailedError, match="epoch") as refused:
            read_all(wire.transport, [read], stale)
        assert refused.value.failed == (read,)
    assert bool((wire.buffer == GUARD).all())
    wire.transport.release([read])


def test_a_closed_transport_has_nothing_left_and_closes_again(wire: Wire) -> None:
    other = create_transport(wire.transport.name, f"{wire.service.name}:other", serves=False)
    into = torch.zeros(4_096, dtype=torch.uint8)
    other.register([into])
    other.connect(wire.peers[0])
    addr, _ = wire.shard(0, "embed.weight")
    run = np.array([addr], np.uint64), np.array([into.data_ptr()], np.uint64), np.array([256], np.int64)
    read = other.prepare(wire.peers[0], *run)
    read_all(other, [read], wire.context)
    assert np.array_equal(into[:256].numpy(), _part(0, "embed.weight")[:256])
    other.close()
    other.close()
    with pytest.raises(SyncError, match="not registered"):
        other.prepare(wire.peers[0], *run)
    mine = wire.whole(0, "embed.weight")
    read_all(wire.transport, [mine], wire.context)  # whatever it shares with the closed one still works
    wire.transport.release([mine])


def test_a_stopped_rank_holds_a_read_up_no_longer_than_the_stall_timeout(wire: Wire) -> None:
    read = wire.whole(1, "layers.0.scale")
    read_all(wire.transport, [read], wire.context)
    pids = ray.get(wire.mortal.pids.remote(wire.service.name))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        wire.buffer.zero_()
        read_all(wire.transport, [read], ReadContext(7, CONSUMER, stall_timeout_s=2.0))
        assert np.array_equal(wire.landed(read.nbytes), _part(1, "layers.0.scale")), "read without its help"
    except SyncError:
        pass
    finally:
        took_s = time.monotonic() - started
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert took_s < 10
    read_all(wire.transport, [read], wire.context)
    assert np.array_equal(wire.landed(read.nbytes), _part(1, "layers.0.scale")), "and again when it goes on"
    wire.transport.release([read])


def test_a_killed_rank_fails_its_own_reads_and_no_others(wire: Wire) -> None:
    """Last, because the rank is gone then."""
    wire.buffer.zero_()
    good, bad = wire.whole(0, "embed.weight"), wire.whole(1, "layers.0.large", at=1 << 19)
    read_all(wire.transport, [bad], wire.context)
    for pid in ray.get(wire.mortal.pids.remote(wire.service.name)):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    started, moved = time.monotonic(), []
    with pytest.raises(ReadFailedError, match="rank 1") as failure:
        read_all(wire.transport, [bad, good], wire.context, moved.append)
    assert time.monotonic() - started < 10
    assert failure.value.failed == (bad,)
    assert moved == [good.nbytes]
    assert np.array_equal(wire.landed(good.nbytes), _part(0, "embed.weight"))
