"""Real engines fed by real trainers: what they answer is what a fresh engine answers that loads the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import LLM

from tests.vllm.engines import answers, following, fresh_answers, options, stop
from tests.vllm.models import read
from tests.vllm.trainers import everywhere, fsdp_trainer
from weightsync.service import Publisher, ServiceHandle, StateDictSource
from weightsync.service.vllm import OfflineEngine

Make = Callable[..., ServiceHandle]
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(autouse=True)
def one_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.fixture
def service(make_service: Make, reachable: None, monkeypatch: pytest.MonkeyPatch) -> ServiceHandle:
    handle = make_service(stall_timeout_s=120.0)
    monkeypatch.setenv("WEIGHTSYNC_SERVICE", handle.name)
    return handle


def test_tensor_parallel_engine_of_an_fsdp_trainer(
    service: ServiceHandle, checkpoints: Callable[[str, int], Path], tmp_path: Path
) -> None:
    ranks = fsdp_trainer(service.name, 2, tmp_path, "qwen2", seed=1)
    llm = LLM(**options(checkpoints("qwen2", 7), **TWO), weight_transfer_config=following())
    before = answers(llm)
    try:
        engine = OfflineEngine(llm, service, name="engine0")
        for version in (1, 2, 3):
            everywhere(ranks, "step", version)
            everywhere(ranks, "save", str(tmp_path / f"v{version}"))
            reports = everywhere(ranks, "publish", version)
            assert engine.sync(version) == version
            assert llm.get_weight_version() == str(version)
            found = answers(llm)
            assert found != before
            assert found == fresh_answers(tmp_path / f"v{version}", **TWO)
            before = found
            assert sorted(reports[0].installed) == ["engine0-dp0-rank0", "engine0-dp0-rank1"]
        engine.close()
    finally:
        stop(llm)


def test_an_engine_keeps_its_weights_if_it_cannot_join(
    service: ServiceHandle, checkpoints: Callable[[str, int], Path]
) -> None:
    weights = read(checkpoints("llama", 2))
    weights.pop("model.layers.0.mlp.down_proj.weight")
    llm = LLM(**options(checkpoints("llama", 1)), weight_transfer_config=following())
    before = answers(llm)
    try:
        with Publisher(service, 0, 1, StateDictSource(weights)):
            with pytest.raises(Exception, match=r"no published tensor is loaded into 'model\.layers\.0\.mlp"):
                OfflineEngine(llm, service, name="engine0")
            with pytest.raises(Exception, match="has not joined a service"):
                llm.start_weight_update()
        assert answers(llm) == before
    finally:
        stop(llm)
