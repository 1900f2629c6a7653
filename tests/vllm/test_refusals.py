"""What the backend refuses, at once and with a remedy; the model keeps its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tests.vllm.loaded import Loaded, load
from weightsync.protocol.errors import RegistrationError, UnsupportedLayoutError
from weightsync.service import ServiceHandle, ServiceNotFoundError
from weightsync.service.vllm import EngineFollower, WeightsyncEngine, WeightsyncInitInfo
from weightsync.service.vllm.plugin import BACKEND, register

CPU = torch.device("cpu")


@pytest.fixture
def service(make_service: Callable[..., ServiceHandle], monkeypatch: pytest.MonkeyPatch) -> ServiceHandle:
    handle = make_service()
    monkeypatch.setenv("WEIGHTSYNC_SERVICE", handle.name)
    return handle


@pytest.fixture
def loaded(checkpoints: Callable[[str, int], Path]) -> Iterator[Loaded]:
    made = load(checkpoints("llama", 1))
    parallel = made.config.parallel_config
    before = parallel.enable_eplb, parallel.distributed_executor_backend
    yield made
    parallel.enable_eplb, parallel.distributed_executor_backend = before


def engine_of(loaded: Loaded) -> WeightsyncEngine:
    """As a vLLM worker makes it."""
    register()
    register()  # each of vLLM's processes may load plugins more than once
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=BACKEND), loaded.config, CPU, loaded.model
    )
    assert isinstance(engine, WeightsyncEngine)
    return engine


def test_experts_that_move(service: ServiceHandle, loaded: Loaded) -> None:
    loaded.config.parallel_config.enable_eplb = True
    with pytest.raises(UnsupportedLayoutError, match="start the engine without --enable-eplb"):
        engine_of(loaded)


def test_no_such_service(service: ServiceHandle, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_SERVICE", "elsewhere")
    with pytest.raises(ServiceNotFoundError, match="weightsync up --name elsewhere"):
        engine_of(loaded)
    loaded.config.parallel_config.distributed_executor_backend = UniProcExecutor  # a class of the user's own
    engine = engine_of(loaded)
    with pytest.raises(ServiceNotFoundError):
        engine.init_transfer_engine(WeightsyncInitInfo())


def test_calls_before_it_has_joined(service: ServiceHandle, loaded: Loaded) -> None:
    engine = engine_of(loaded)
    for call in (engine.start_weight_update, lambda: engine.update_weights({"version": 1})):
        with pytest.raises(RegistrationError, match="has not joined a service"):
            call()
    engine.shutdown()
    assert not engine.supports_draft_weight_update


def test_workers_of_an_engine_take_the_newest_that_one_of_them_has(
    service: ServiceHandle, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks have staged, as they would gather it: they disagree twice, because newer versions come between."""
    engine = engine_of(loaded)
    gathered = iter([[3, 4], [5, 4], [5, 5]])
    asked: list[int | None] = []
    released: list[int] = []

    class _Staged:
        def stage(self, version: int | None, timeout: float | None) -> int:
            raise AssertionError("called through _everywhere only")

        def release(self) -> None:
            released.append(len(asked))

    def everywhere(step: Any, wanted: int | None, timeout_s: float | None) -> list[int]:
        asked.append(wanted)
        return next(gathered)

    monkeypatch.setattr(engine, "_everywhere", everywhere)
    assert engine._agree(_Staged(), 3, None) == 5
    assert asked == [3, 4, 5]
    assert released == [1, 2], "what is agreed upon stays"


def test_an_unknown_treatment_of_requests(service: ServiceHandle) -> None:
    with pytest.raises(ValueError, match=r"in_flight must be one of \['abort', 'drain', 'keep'\], got 'wait'"):
        EngineFollower(None, service, in_flight="wait")


def test_unknown_options_are_named(service: ServiceHandle, loaded: Loaded) -> None:
    engine = engine_of(loaded)
    with pytest.raises(ValueError, match="colour"):
        engine.parse_init_info({"colour": "red"})
    with pytest.raises(ValueError, match="install must be one of"):
        engine.init_transfer_engine(WeightsyncInitInfo(install="sideways"))
    assert service.status().consumers == []
