"""The worker's side of vLLM's weight transfer calls.

    init     join the service: record the model's loader, plan, register memory
    start    nothing; pulls go on while the engine computes
    update   the workers of this engine agree on a version that each has beside its live weights, then all flip
    finish   nothing

The thing to watch: vLLM makes these calls on all workers of an engine at once, at a step boundary. Between agreeing
and flipping nothing can fail but a layer's own conversion, so an engine never serves two versions at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.protocol.errors import RegistrationError, SyncError, UnsupportedLayoutError
from weightsync.protocol.messages import InstallMode
from weightsync.service.api import connect
from weightsync.service.settings_variables import SERVICE_VARIABLE
from weightsync.service.subscriber import Subscriber
from weightsync.service.vllm.target import VllmTarget


@dataclass
class WeightsyncInitInfo(WeightTransferInitInfo):
    """How an engine joins.

    Args:
        service: name of the running service; None takes `WEIGHTSYNC_SERVICE`, else "default".
        engine: this engine's name in the service. Give a restarted engine the name it had, so that it replaces its
            predecessor at once; None takes vLLM's instance id.
        install: "shadow" pulls while the engine generates, and takes memory for the weights once more; "in_place"
            pulls while it is paused, and a failed pull leaves it not ready.
        allow_partial: accept parameters that no published tensor fills.
    """

    service: str | None = None
    engine: str | None = None
    install: str = "shadow"
    allow_partial: bool = False


@dataclass
class WeightsyncUpdateInfo(WeightTransferUpdateInfo):
    """Which version to install.

    Args:
        version: this one, or a newer one; None takes the newest.
        timeout_s: how long to wait for it, in seconds; None takes the service's stall timeout.
    """

    version: int | None = None
    timeout_s: float | None = None


class WeightsyncEngine(WeightTransferEngine[WeightsyncInitInfo, WeightsyncUpdateInfo]):
    """The backend in one worker process.

    Raises:
        ConnectionError, ServiceNotFoundError: no Ray cluster, or no such service; says how to start one. Not
            looked for under an executor class of the user's own, which may bring Ray up later.
        UnsupportedLayoutError: experts that move between ranks.
    """

    init_info_cls = WeightsyncInitInfo
    update_info_cls = WeightsyncUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._subscriber: Subscriber | None = None
        self._in_place = False
        if self.parallel_config.enable_eplb:
            raise UnsupportedLayoutError(
                "expert load balancing (enable_eplb) moves experts between ranks while the engine runs, and pulls are "
                "planned once; start the engine without --enable-eplb"
            )
        if not isinstance(self.parallel_config.distributed_executor_backend, type):
            connect(default_service())

    @property
    def subscriber(self) -> Subscriber:
        """This worker's membership.

        Raises:
            RegistrationError: it has not joined.
        """
        if self._subscriber is None:
            raise RegistrationError(
                "this engine has not joined a service: call init_weight_transfer_engine first, or give it to an "
                "EngineFollower"
            )
        return self._subscriber

    def init_transfer_engine(self, init_info: WeightsyncInitInfo) -> None:
        """Join; a second call leaves first. The engine keeps its weights if this raises.

        Raises:
            ValueError: an install mode that does not exist.
            PlanError: the model's loader, or the published model, does not fit; names the parameter.
        """
        self.shutdown()
        target = VllmTarget(self.model, self.vllm_config, self.device, allow_partial=init_info.allow_partial)
        service = connect(init_info.service or default_service())
        self._subscriber = Subscriber(service, self.worker_name(init_info.engine), target, init_info.install)
        self._in_place = InstallMode(init_info.install) is InstallMode.IN_PLACE

    def worker_name(self, engine: str | None) -> str:
        """Unique in the service: the engine's name, the data-parallel rank and the rank in it."""
        parallel = self.parallel_config
        engine = engine or self.vllm_config.instance_id
        return f"{engine}-dp{parallel.data_parallel_index}-rank{parallel.rank}"

    def start_weight_update(self) -> None:
        """Nothing to prepare.

        Raises:
            RegistrationError: it has not joined a service.
        """
        _ = self.subscriber

    def receive_weights(self, update_info: WeightsyncUpdateInfo) -> None:
        """Install a version on all workers of this engine, or on none.

        Raises:
            SyncError: a worker does not have it; all keep what they had. With install="in_place", or where a layer's
                conversion failed, the worker is torn, which the message says.
        """
        subscriber, wanted, timeout_s = self.subscriber, update_info.version, update_info.timeout_s
        try:
            if not self._in_place:
                wanted = self._agree(subscriber, wanted, timeout_s)
            self._everywhere(subscriber.sync, wanted, timeout_s)
        finally:
            subscriber.release()
        subscriber.confirm()

    def _agree(self, subscriber: Subscriber, wanted: int | None, timeout_s: float | None) -> int:
        """A version that every worker of this engine has beside its live weights, and keeps there."""
        while True:
            staged = self._everywhere(subscriber.stage, wanted, timeout_s)
            if len(set(staged)) == 1:
                return staged[0]
            subscriber.release()  # a newer one came between, and all can have it
            wanted = max(staged)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Leave the service. Idempotent."""
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()

    def _everywhere(
        self, step: Callable[[int | None, float | None], int], wanted: int | None, timeout_s: float | None
    ) -> list[int]:
        """Do a step, and learn what came of it on every worker of this engine.

        Raises:
            SyncError: it failed somewhere, on every worker then.
        """
        outcome: int | str
        try:
            outcome = step(wanted, timeout_s)
        except Exception as error:  # whatever it is: the others wait for this worker's word
            outcome = f"{type(error).__name__}: {error}"
        world = get_world_group()
        outcomes: list[Any] = [None] * world.world_size
        if world.world_size == 1:
            outcomes = [outcome]
        else:
            torch.distributed.all_gather_object(outcomes, outcome, group=world.cpu_group)
        failed = [f"rank {rank}: {said}" for rank, said in enumerate(outcomes) if isinstance(said, str)]
        if failed:
            raise SyncError(f"{len(failed)} of {len(outcomes)} workers of this engine failed; {failed[0]}")
        return outcomes


def default_service() -> str:
    """The service that this process's environment names."""
    return os.environ.get(SERVICE_VARIABLE) or "default"
