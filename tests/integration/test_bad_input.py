"""Bad input is refused before anything moves, by name, and the service works afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from helpers import RowSource, equal, model

from weightsync.protocol.errors import (
    InvalidLayoutError,
    RegistrationError,
    StallError,
    SyncAborted,
    SyncError,
    TransportUnavailableError,
    VersionError,
)
from weightsync.service import (
    ModuleTarget,
    Publisher,
    ServiceHandle,
    ServiceNotFoundError,
    Settings,
    StateDictSource,
    StateDictTarget,
    Subscriber,
    connect,
    start,
)


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}


def still_works(service: ServiceHandle) -> bool:
    """A complete publish and sync with fresh members."""
    target, version = zeros(), (service.status().newest_version or 0) + 1
    with (
        Publisher(service, 0, 1, StateDictSource(model(version))) as publisher,
        Subscriber(service, "check", StateDictTarget(target)) as subscriber,
    ):
        publisher.publish(version, timeout=30)
        subscriber.sync(version, timeout=30)
    return equal(target, model(version))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({"norm.weight": torch.zeros(17)}), ["norm.weight", "shape", "(16,)", "(17,)"]),
        (
            lambda t: t.update({"layers.0.scale": t["layers.0.scale"].double()}),
            ["layers.0.scale", "dtype", "float32", "float64"],
        ),
    ],
    ids=["shape", "dtype"],
)
def test_ranks_that_disagree_are_refused_with_tensor_ranks_and_values(
    service: ServiceHandle, change: Callable[[dict[str, torch.Tensor]], None], words: list[str]
) -> None:
    other = model(1)
    change(other)
    with Publisher(service, 0, 2, RowSource(model(1), 0, 2)):
        with pytest.raises(RegistrationError) as refused:
            Publisher(service, 1, 2, RowSource(other, 1, 2))
        for word in (*words, "rank 0", "rank 1"):
            assert word in str(refused.value)
    assert still_works(service)


def test_a_missing_shard_is_refused_naming_the_hole(service: ServiceHandle, fresh: Callable[[], int]) -> None:
    version = fresh()
    incomplete = RowSource(model(1), 1, 2)
    del incomplete.parts["layers.1.attn.weight"]
    with Publisher(service, 0, 2, RowSource(model(1), 0, 2)) as first:
        outcome: list[BaseException] = []

        def publish() -> None:
            try:
                first.publish(version, timeout=20)
            except BaseException as error:
                outcome.append(error)

        waiting = threading.Thread(target=publish)
        waiting.start()
        threading.Event().wait(0.5)
        with pytest.raises(InvalidLayoutError, match=r"layers\.1\.attn\.weight.*hole from \(12, 0\) to \(24, 16\)"):
            Publisher(service, 1, 2, incomplete)
        waiting.join(20)
        assert isinstance(outcome[0], SyncAborted), "the rank that waits learns of it at once"
        assert "hole" in str(outcome[0])
        target = zeros()
        with (
            Publisher(service, 1, 2, RowSource(model(1), 1, 2)) as second,
            Subscriber(service, "w0", StateDictTarget(target)) as subscriber,
        ):
            other = threading.Thread(target=second.publish, args=(version, 30))
            other.start()
            first.publish(version, timeout=30)
            other.join(30)
            subscriber.sync(version, timeout=30)
        assert equal(target, model(1)), "the corrected rank joins, and the sync is whole"


def test_a_version_that_does_not_increase_is_refused(service: ServiceHandle, fresh: Callable[[], int]) -> None:
    first = fresh()
    with (
        Publisher(service, 0, 1, StateDictSource(model(3))) as publisher,
        Subscriber(service, "w0", StateDictTarget(zeros())) as subscriber,
    ):
        publisher.publish(first, timeout=30)
        for version in (first, first - 1, -1, "4", True, 1.5, None):
            with pytest.raises(VersionError, match=str(version)):
                publisher.publish(version, timeout=30)  # type: ignore[arg-type]
        publisher.publish(first + 1, timeout=30)
        assert subscriber.sync(first + 1, timeout=30) == first + 1


def test_ranks_that_publish_different_versions_are_refused_both(
    service: ServiceHandle, fresh: Callable[[], int]
) -> None:
    version = fresh()
    with (
        Publisher(service, 0, 2, RowSource(model(1), 0, 2)) as first,
        Publisher(service, 1, 2, RowSource(model(1), 1, 2)) as second,
        Subscriber(service, "w0", StateDictTarget(zeros())),
    ):
        outcome: list[BaseException] = []

        def publish() -> None:
            try:
                first.publish(version, timeout=20)
            except BaseException as error:
                outcome.append(error)

        waiting = threading.Thread(target=publish)
        waiting.start()
        threading.Event().wait(0.5)
        with pytest.raises(VersionError, match="disagree"):
            second.publish(version + 1, timeout=20)
        waiting.join(2)
        assert isinstance(outcome[0], VersionError)
    assert still_works(service)


def test_two_publishers_of_one_rank_are_refused(service: ServiceHandle) -> None:
    with Publisher(service, 0, 1, StateDictSource(model(1))):
        with pytest.raises(RegistrationError, match="rank 0 is claimed twice"):
            Publisher(service, 0, 1, StateDictSource(model(1)))
    assert still_works(service)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(service: ServiceHandle, rank: int, world: int) -> None:
    with pytest.raises(RegistrationError, match=f"rank {rank} is not in a world of {world}"):
        Publisher(service, rank, world, StateDictSource(model(1)))
    assert service.status().producers == []


def test_a_name_the_worker_wants_and_nobody_publishes_is_refused(service: ServiceHandle) -> None:
    with Publisher(service, 0, 1, StateDictSource(model(1))):
        with pytest.raises(InvalidLayoutError, match=r"lm_head\.weight"):
            Subscriber(service, "w0", StateDictTarget({"lm_head.weight": torch.zeros(2)}))
        with pytest.raises(InvalidLayoutError, match=r"norm\.weight.*\(3,\).*\(16,\)"):
            Subscriber(service, "w1", StateDictTarget({"norm.weight": torch.zeros(3)}))
        assert service.status().consumers == []
    assert still_works(service)


def test_a_name_the_workers_loader_does_not_know_is_refused_with_its_error(service: ServiceHandle) -> None:
    class Strict(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(16))

        def load_weights(self, weights: object) -> None:
            for name, weight in weights:  # type: ignore[attr-defined]
                {"norm.weight": self.weight}[name].data.copy_(weight)

    with (
        Publisher(service, 0, 1, StateDictSource(model(1))),
        pytest.raises(RegistrationError, match=r"embed\.weight"),
    ):
        Subscriber(service, "w0", ModuleTarget(Strict()))
    assert still_works(service)


def test_a_loader_that_needs_data_is_refused_by_name(service: ServiceHandle) -> None:
    class Scaling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(16))

        def load_weights(self, weights: object) -> None:
            for name, weight in weights:  # type: ignore[attr-defined]
                if name == "norm.weight":
                    self.weight.data.copy_(weight * 2)

    with (
        Publisher(service, 0, 1, StateDictSource(model(1))),
        pytest.raises(NotImplementedError, match=r"mul.*norm\.weight"),
    ):
        Subscriber(service, "w0", ModuleTarget(Scaling()))


def test_a_parameter_that_moved_is_refused_at_publish(service: ServiceHandle, fresh: Callable[[], int]) -> None:
    source, version = model(1), fresh()
    with (
        Publisher(service, 0, 1, StateDictSource(source)) as publisher,
        Subscriber(service, "w0", StateDictTarget(zeros())),
    ):
        publisher.publish(version, timeout=30)
        source["norm.weight"].set_(torch.zeros(16))  # type: ignore[call-overload]
        with pytest.raises(SyncError, match=r"norm\.weight.*reallocated"):
            publisher.publish(version + 1, timeout=30)
    assert still_works(service)


@pytest.mark.parametrize(
    ("source", "words"),
    [({"w": [1, 2]}, "'w' is a list"), ({"w": torch.empty(2, device="meta")}, "'w' is on the meta device")],
)
def test_what_is_no_tensor_is_refused(source: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(InvalidLayoutError, match=words):
        StateDictSource(source)


def test_an_empty_source_is_refused(service: ServiceHandle) -> None:
    with pytest.raises(InvalidLayoutError, match="empty"):
        Publisher(service, 0, 1, StateDictSource({}))


def test_waits_end_and_say_what_they_wait_for(service: ServiceHandle, fresh: Callable[[], int]) -> None:
    version = fresh()
    with Publisher(service, 0, 2, RowSource(model(1), 0, 2)) as first:
        with pytest.raises(StallError, match=r"ranks \[1\] to publish version"):
            first.publish(version, timeout=0.5)
        with Subscriber(service, "w0", StateDictTarget(zeros())) as subscriber:
            with pytest.raises(StallError, match=r"trainer ranks \[1\] have not registered"):
                subscriber.sync(timeout=0.5)
        with Publisher(service, 1, 2, RowSource(model(1), 1, 2)) as second:
            outcome: list[BaseException] = []

            def publish() -> None:
                try:
                    second.publish(version, timeout=3)
                except BaseException as error:
                    outcome.append(error)

            thread = threading.Thread(target=publish)
            thread.start()
            with pytest.raises(StallError, match=r"inference worker\(s\) to join"):
                first.publish(version, timeout=3)
            thread.join(10)
            assert isinstance(outcome[0], StallError)


def test_unknown_services_modes_and_settings_are_refused(service: ServiceHandle) -> None:
    with pytest.raises(ServiceNotFoundError, match=service.name):
        connect("nowhere")
    with pytest.raises(ValueError, match="live"):
        Publisher(service, 0, 1, StateDictSource(model(1)), mode="push")
    with pytest.raises(ValueError, match="shadow"):
        Subscriber(service, "w0", StateDictTarget(zeros()), install="later")
    with pytest.raises(ValueError, match="service name"):
        start("no/slash")
    with pytest.raises(ValueError, match="min_consumers"):
        Settings(min_consumers=0)
    with pytest.raises(ValueError, match="transprot"):
        Settings(transprot="nixl")  # type: ignore[call-arg]


def test_without_nixl_start_refuses_or_falls_back_as_set(
    cluster: None, monkeypatch: pytest.MonkeyPatch, make_service: Callable[..., ServiceHandle]
) -> None:
    from weightsync.actors import nixl_package

    monkeypatch.delitem(sys.modules, "nixl", raising=False)
    monkeypatch.setattr(nixl_package.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TransportUnavailableError) as refused:
        start("no-nixl", settings=Settings(http_port=0))
    assert "pip install nixl" in str(refused.value)
    assert "\n" not in str(refused.value)
    fallback = make_service(transport="auto")
    status = fallback.status()
    assert status.transport == "object_store"
    assert "not installed" in status.transport_reason
    assert still_works(fallback)
