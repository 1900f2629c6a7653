"""Engines that convert weights as they take them in, and workers of one engine that flip together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from helpers import equal

from weightsync.actors.interfaces import WeightTarget
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import SyncError
from weightsync.service import Publisher, ServiceHandle, StateDictSource, StateDictTarget, Subscriber


class _Converting(WeightTarget):
    """Uses `plain` as it is and `packed` negated, in memory of another dtype, as an engine that packs weights does."""

    def __init__(self) -> None:
        self.plain, self.packed = torch.zeros(64, 8), torch.zeros(32, 16, dtype=torch.float64)
        self._landed = {"plain": self.plain, "packed": torch.zeros(32, 16)}
        self.failing = False
        self.seen_at_install: list[float] = []

    def record(self, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> Sequence[RecordedCopy]:
        return StateDictTarget(self._landed).record(manifest)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._landed

    def unseen(self) -> frozenset[str]:
        return frozenset({"packed"})

    def install(self) -> None:
        if self.failing:
            raise RuntimeError("out of pack")
        self.seen_at_install.append(float(self.plain[0, 0]))
        self.packed.copy_(-self._landed["packed"])

    def serves(self, source: Mapping[str, torch.Tensor]) -> bool:
        return equal({"plain": self.plain, "packed": self.packed}, _converted(source))


def _converted(source: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"plain": source["plain"].clone(), "packed": -source["packed"].double()}


def _weights() -> dict[str, torch.Tensor]:
    return {"plain": torch.arange(512.0).reshape(64, 8), "packed": torch.arange(512.0).reshape(32, 16) / 3}


@pytest.mark.parametrize("install", ["shadow", "in_place"])
def test_an_engine_that_converts(service: ServiceHandle, fresh: Callable[[], int], install: str) -> None:
    source, target, first = _weights(), _Converting(), fresh()
    publish = _Background()
    with (
        Publisher(service, 0, 1, StateDictSource(source)) as publisher,
        Subscriber(service, "w0", target, install=install) as worker,
    ):
        before = _converted({"plain": target.plain, "packed": target.packed.float()})
        for version in (first, first + 1):
            _step(source)
            publish(publisher, version)
            if install == "shadow":
                publish.done()
                assert equal({"plain": target.plain, "packed": target.packed}, before), "visible before its install"
            assert worker.sync(version, 20) == version
            publish.done()
            assert target.serves(source)
            before = _converted(source)
        assert target.seen_at_install == [1.0, 2.0], "what is not converted is there already"
        reason = "converts weights" if install == "shadow" else "in_place writes over it"
        with pytest.raises(SyncError, match=reason):
            worker.rollback()

        target.failing = True
        _step(source)
        publish(publisher, first + 2)
        with pytest.raises(SyncError, match=rf"version {first + 2} was pulled into worker .*RuntimeError: out of"):
            worker.sync(first + 2, 20)
        publish.done()
        assert (worker.version, worker.ready) == (first + 1, False)
        assert _torn(service)

        target.failing = False
        publish(publisher, first + 3)
        assert worker.sync(first + 3, 20) == first + 3
        publish.done()
        assert worker.ready
        assert target.serves(source)
        worker.confirm()
        assert not service.status().consumers[0].torn


def test_what_is_staged_stays_until_it_is_released(service: ServiceHandle, fresh: Callable[[], int]) -> None:
    source, first = _weights(), fresh()
    held, free = ({name: torch.zeros_like(tensor) for name, tensor in source.items()} for _ in range(2))
    publish = _Background()
    with (
        Publisher(service, 0, 1, StateDictSource(source)) as publisher,
        Subscriber(service, "held", StateDictTarget(held)) as one,
        Subscriber(service, "free", StateDictTarget(free)) as other,
    ):
        _step(source)
        publisher.publish(first, timeout=20)
        kept = {name: tensor.clone() for name, tensor in source.items()}
        assert one.stage(first, 20) == first
        assert equal(held, {name: torch.zeros_like(tensor) for name, tensor in source.items()})

        _step(source)
        publish(publisher, first + 1)
        assert not publish.over(within=0.5), "the next version waits for what is kept"
        assert one.sync(first, 20) == first
        assert equal(held, kept)
        publish.done()
        assert one.sync(first + 1, 20) == other.sync(first + 1, 20) == first + 1
        assert equal(held, source)
        assert equal(free, source)

        assert one.stage(None, 20) == first + 1, "what is installed already"
        one.release()
        publisher.publish(first + 2, timeout=20)
    with Subscriber(service, "in place", StateDictTarget(held), install="in_place") as worker:
        with pytest.raises(ValueError, match="only 'shadow' can be staged"):
            worker.stage(first)


class _Background:
    """A publish on another thread, whose error comes out in `done`."""

    def __call__(self, publisher: Publisher, version: int) -> None:
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(publisher, version))
        self._thread.start()

    def over(self, within: float) -> bool:
        self._thread.join(within)
        return not self._thread.is_alive()

    def done(self) -> None:
        assert self.over(30)
        if self._errors:
            raise self._errors[0]

    def _run(self, publisher: Publisher, version: int) -> None:
        try:
            publisher.publish(version, timeout=20)
        except BaseException as error:
            self._errors.append(error)


def _step(source: dict[str, torch.Tensor]) -> None:
    for tensor in source.values():
        tensor.add_(1)


def _torn(service: ServiceHandle) -> bool:
    """The registry hears of it after the worker's caller did."""
    told = threading.Event()
    for _ in range(100):
        if service.status().consumers[0].torn:
            return True
        told.wait(0.05)
    return False
