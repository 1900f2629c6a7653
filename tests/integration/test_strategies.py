"""Every strategy brings the same bits, prepares once, keeps to its budget, and survives what peers do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
from helpers import RowSource

from weightsync.actors.interfaces import WeightTarget
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import PlanBudgetError
from weightsync.protocol.status import SyncReport
from weightsync.service import Publisher, ServiceHandle, StateDictSource, StateDictTarget, Subscriber

HIDDEN, INNER, TP = 96, 640, 2
STRATEGIES = [
    "auto",
    "packed",
    pytest.param("direct", marks=pytest.mark.slow),
    pytest.param("span", marks=pytest.mark.slow),
]


def weights(version: int) -> dict[str, torch.Tensor]:
    """Two layers: a matrix that is cut by columns, one by rows, one that changes its dtype, one that is transposed."""
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for layer in range(2):
        for name, shape in (("down", (HIDDEN, INNER)), ("up", (INNER, HIDDEN)), ("head", (64, 48)), ("odd", (50, 33))):
            tensors[f"layers.{layer}.{name}"] = torch.randn(shape, generator=generator)
    return tensors


class Slices(WeightTarget):
    """One tensor-parallel rank of the model."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.held: dict[str, torch.Tensor] = {}
        for name, full in weights(0).items():
            self.held[name] = torch.zeros_like(self.cut(name, full).contiguous())

    def cut(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a whole tensor, by plain torch."""
        kind = name.rsplit(".", 1)[-1]
        if kind == "down":
            return full.chunk(TP, 1)[self._rank]
        if kind == "up":
            return full.chunk(TP, 0)[self._rank]
        return full.to(torch.bfloat16) if kind == "head" else full.t()

    def record(self, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> Sequence[RecordedCopy]:
        copies = []
        for name, tensor in self.held.items():
            kind, half = name.rsplit(".", 1)[-1], self._rank * INNER // TP
            chain = {
                "down": (("narrow", (1, half, INNER // TP), ()),),
                "up": (("narrow", (0, half, INNER // TP), ()),),
                "head": (),
                "odd": (("t", (), ()),),
            }[kind]
            copies.append(RecordedCopy(name, chain, name, 0, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype))
        return copies

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.held

    def holds(self, version: int) -> bool:
        return all(torch.equal(held, self.cut(n, weights(version)[n])) for n, held in self.held.items())


class Fleet:
    """Two row-sharded trainer ranks and two tensor-parallel workers, all in this process."""

    def __init__(self, service: ServiceHandle, stack: ExitStack) -> None:
        self._service, self._stack = service, stack
        self.sources = [RowSource(weights(0), rank, 2) for rank in range(2)]
        self.publishers = [self._publisher(rank) for rank in range(2)]
        self.targets = [Slices(rank) for rank in range(TP)]
        self.workers = [
            stack.enter_context(Subscriber(service, f"tp{rank}", target)) for rank, target in enumerate(self.targets)
        ]

    def _publisher(self, rank: int) -> Publisher:
        return self._stack.enter_context(Publisher(self._service, rank, 2, self.sources[rank]))

    def restart_trainer(self, rank: int) -> None:
        """Other memory, another producer, another agent."""
        self.publishers[rank].close()
        self.sources[rank] = RowSource(weights(0), rank, 2)
        self.publishers[rank] = self._publisher(rank)

    def publish(self, version: int) -> SyncReport:
        reports: list[SyncReport] = []
        for source in self.sources:
            source.load(weights(version))
        threads = [
            threading.Thread(target=lambda p=publisher: reports.append(p.publish(version, 30)))  # type: ignore[misc]
            for publisher in self.publishers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in self.workers:
            assert worker.sync(version, 30) == version
        assert all(target.holds(version) for target in self.targets)
        return reports[0]


@contextmanager
def fleet(service: ServiceHandle) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(service, stack)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_versions_bit_for_bit_and_nothing_prepared_after_the_first(
    make_service: Callable[..., ServiceHandle], strategy: str
) -> None:
    service = make_service(strategy=strategy, min_consumers=TP, chunk_bytes=64 << 10, verify="full")
    with fleet(service) as members:
        reports = [members.publish(version) for version in (1, 2, 3)]
        for worker in reports[0].workers.values():
            assert set(worker.strategies) == ({strategy} if strategy != "auto" else set(worker.strategies))
            assert sum(worker.strategies.values()) == worker.bytes_needed
            assert worker.predicted_s > 0
            assert len(worker.carriers) == 1
            assert worker.carriers[0] in ("cma", "shared memory", "tcp", "rdma", "rdma or cma")
            assert worker.regions_verified > 0
            assert worker.bytes_wire == worker.bytes_needed
            assert (worker.bytes_gaps > 0) == (worker.strategies.get("span", 0) > 0)
        for report in reports[1:]:
            assert [worker.prepared for worker in report.workers.values()] == [{}, {}]
        packs = any("packed" in worker.strategies for worker in reports[2].workers.values())
        assert any(reports[2].producer_extra_bytes.values()) == packs

        members.restart_trainer(1)  # addresses, peer and layout change: prepared anew, once
        members.publish(4)
        assert [worker.prepared for worker in members.publish(5).workers.values()] == [{}, {}]


@pytest.mark.slow
def test_limits_on_what_is_under_way_change_no_bit(make_service: Callable[..., ServiceHandle]) -> None:
    service = make_service(min_consumers=TP, max_inflight_bytes=10_000, num_serve_buffers=1, strategy="span")
    with fleet(service) as members:
        for version in (1, 2, 3):
            members.publish(version)


def test_a_budget_is_kept_or_refused_with_the_number_needed(make_service: Callable[..., ServiceHandle]) -> None:
    scratch = 2 * (64 * 48 + 50 * 33) * 4
    service = make_service(min_consumers=TP, staging_budget_bytes=scratch - 1)
    with ExitStack() as stack:
        stack.enter_context(Publisher(service, 0, 1, RowSource(weights(0), 0, 1)))
        with pytest.raises(PlanBudgetError, match=f"need {scratch} bytes of scratch"):
            Subscriber(service, "tp0", Slices(0))
    budget = scratch + 4 * (64 << 10)
    roomy = make_service(min_consumers=TP, staging_budget_bytes=budget, strategy="packed")
    with fleet(roomy) as members:
        report = members.publish(1)
        assert all(scratch < worker.extra_bytes <= budget for worker in report.workers.values())
        assert all(0 < extra <= budget for extra in report.producer_extra_bytes.values())


def test_a_trainer_that_may_not_take_the_memory_refuses_to_pack(make_service: Callable[..., ServiceHandle]) -> None:
    """Its budget holds the slots of some of its workers: the others read another way, or are told the number."""
    scratch = 2 * (64 * 48 + 50 * 33) * 4
    budget = scratch + 2 * (64 << 10)
    eager = {"descriptor_s": 1.0, "pack_bytes_per_s": 1e15, "control_s": 1e-9, "pack_run_s": 1e-15}
    service = make_service(staging_budget_bytes=budget, link_costs=eager)
    forced = make_service(staging_budget_bytes=budget, strategy="packed")
    with ExitStack() as stack:
        source = RowSource(weights(1), 0, 1)
        publisher = stack.enter_context(Publisher(service, 0, 1, source))
        targets = [Slices(index % TP) for index in range(4)]
        for index, target in enumerate(targets):
            stack.enter_context(Subscriber(service, f"w{index}", target))
        report = publisher.publish(1, 30)
        packs = ["packed" in report.workers[f"w{index}"].strategies for index in range(4)]
        assert packs[0]
        assert not packs[3]
        assert 0 < report.producer_extra_bytes[0] <= budget
    with ExitStack() as stack:
        stack.enter_context(Publisher(forced, 0, 1, source))
        with pytest.raises(PlanBudgetError, match=r"rank 0 would need \d+ bytes"):
            [stack.enter_context(Subscriber(forced, f"w{i}", target)) for i, target in enumerate(targets)]


def test_measured_costs_are_in_the_status_and_those_set_by_hand_win(make_service: Callable[..., ServiceHandle]) -> None:
    service = make_service(link_costs={"descriptor_s": 1e-12})
    source = {"w": torch.randn(1024, 1024)}
    held = {"w": torch.zeros(1024, 1024)}
    with (
        Publisher(service, 0, 1, StateDictSource(source)) as publisher,
        Subscriber(service, "w0", StateDictTarget(held)),
    ):
        (link,) = service.status().links
        assert link.measured
        assert 1e7 < link.bytes_per_s < 1e12
        assert 0 < link.descriptor_s < 1e-2
        report = publisher.publish(1, 30)
        assert report.workers["w0"].strategies == {"direct": source["w"].nbytes}
