"""vLLM's trainer-side interface on top of a `Publisher`: for trainers that drive engines through vLLM's calls.

Every rank publishes its own shards; rank 0 also tells the engines to install, at the same time, since a publish ends
when the workers have pulled.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import ModuleSource as VllmModuleSource
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import WeightSource as VllmWeightSource

from weightsync.actors.interfaces import WeightSource
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.status import SyncReport
from weightsync.service.publisher import Publisher
from weightsync.service.sources import ModuleSource


@dataclass
class WeightsyncTrainerInitInfo(TrainerInitInfo):
    """How a trainer rank joins.

    Args:
        rank: of this process, among the ranks that publish.
        world_size: how many they are.
        service: name of the running service.
        mode: "live" or "staged", as `Publisher` takes it.
        engine_init: what each engine's workers are told, such as {"install": "in_place"}.
        first_version: number of the first `send_weights`; it counts from there.
    """

    backend: ClassVar[str] = "weightsync"

    world_size: int = 1
    service: str = "default"
    mode: str = "live"
    engine_init: dict[str, Any] | None = None
    first_version: int = 1


class WeightsyncTrainerEngine(TrainerWeightTransferEngine[WeightsyncTrainerInitInfo]):
    """One trainer rank. `send_weights` publishes a version, and returns when every engine serves it."""

    init_info_cls = WeightsyncTrainerInitInfo

    def __init__(
        self, publisher: Publisher, first_version: int, *, client: VLLMWeightSyncClient, is_sender: bool
    ) -> None:
        super().__init__(client=client, is_sender=is_sender)
        self._publisher = publisher
        self._next_version = first_version
        self.last_report: SyncReport | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: WeightsyncTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: VllmWeightSource | WeightSource | None = None,
    ) -> Self:
        """Register this rank; rank 0 lets the engines join.

        Raises:
            InvalidLayoutError: no source, or one that can only be iterated.
        """
        publisher = Publisher(init_info.service, init_info.rank, init_info.world_size, _source(source), init_info.mode)
        try:
            if init_info.is_sender:
                client.init_weight_transfer_engine({"service": init_info.service, **(init_info.engine_init or {})})
        except BaseException:
            publisher.close()
            raise
        return cls(publisher, init_info.first_version, client=client, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        """Publish the source as the next version.

        Raises:
            SyncError: as `Publisher.publish`; the next call takes the next number.
        """
        version, self._next_version = self._next_version, self._next_version + 1
        if not self.is_sender:
            self.last_report = self._publisher.publish(version)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="weightsync-publish") as thread:
            publishing = thread.submit(self._publisher.publish, version)
            self.client.start_weight_update()
            self.client.update_weights({"version": version})
            self.client.finish_weight_update(str(version))
            self.last_report = publishing.result()

    def shutdown(self) -> None:
        """Leave the service. Idempotent."""
        self._publisher.close()


def _source(source: VllmWeightSource | WeightSource | None) -> WeightSource:
    if isinstance(source, WeightSource):
        return source
    if isinstance(source, VllmModuleSource):
        return ModuleSource(source._module, buffers=False)
    raise InvalidLayoutError(
        f"weightsync publishes shards where they lie, and {type(source).__name__} can only be iterated; give it one of "
        "weightsync.service's sources, or vLLM's ModuleSource"
    )
