"""vLLM's trainer-side interface: the trainer drives the engine through a client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tests.vllm.engines import answers, following, fresh_answers, options, stop
from tests.vllm.models import build
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.service import ServiceHandle
from weightsync.service.vllm import WeightsyncTrainerInitInfo
from weightsync.service.vllm.plugin import register

Checkpoints = Callable[[str, int], Path]


class _Client:
    """Calls an engine in this process, as vLLM's clients call one elsewhere."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)


class _Iterated(WeightSource):
    def metadata(self) -> list[ParamMeta]:
        return []

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize("install", ["in_place", pytest.param("shadow", marks=pytest.mark.slow)])
def test_send_weights(
    make_service: Callable[..., ServiceHandle],
    reachable: None,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    install: str,
) -> None:
    service = make_service(stall_timeout_s=120.0)
    monkeypatch.setenv("WEIGHTSYNC_SERVICE", service.name)
    register()
    llm = LLM(**options(checkpoints("qwen3", 1)), weight_transfer_config=following())
    try:
        info = WeightsyncTrainerInitInfo(rank=0, service=service.name, engine_init={"install": install})
        with pytest.raises(InvalidLayoutError, match="_Iterated can only be iterated"):
            WeightTransferTrainerFactory.trainer_init(info, client=_Client(llm), source=_Iterated())
        model = build("qwen3", 2)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=_Client(llm), source=ModuleSource(model))
        trainer.send_weights()
        assert llm.get_weight_version() == "1"
        assert answers(llm) == fresh_answers(checkpoints("qwen3", 2))
        model.load_state_dict(build("qwen3", 3).state_dict())
        trainer.send_weights()
        assert llm.get_weight_version() == "2"
        assert answers(llm) == fresh_answers(checkpoints("qwen3", 3))
        assert trainer.last_report.version == 2
        trainer.shutdown()
    finally:
        stop(llm)
