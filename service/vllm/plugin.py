"""What vLLM's plugin loader calls in each of its processes."""

from __future__ import annotations

BACKEND = "weightsync"


def register() -> None:
    """Make the backend known to vLLM, on both sides. Idempotent; imports neither Ray nor NIXL."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightsync.service.vllm.backend", "WeightsyncEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "weightsync.service.vllm.trainer", "WeightsyncTrainerEngine"
        )
