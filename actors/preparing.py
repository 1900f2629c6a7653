"""What a worker prepares once per layout: recorded copies, memory, registrations, connections, a pull.

Recorded again only if the model itself changed; memory and registrations stay as long as the copies do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.actors.calibration import measure_link
from weightsync.actors.destinations import Destinations, distinct_copies
from weightsync.actors.interfaces import WeightTarget
from weightsync.actors.live_pull import LivePull
from weightsync.actors.options import RegistryOptions
from weightsync.actors.spawn import call, this_node
from weightsync.actors.staged_pull import StagedPull
from weightsync.actors.transport import Device, Peer, Transport, create_transport
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.cost_model import LinkCosts
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.messages import InstallMode, LayoutSnapshot, LinkName, PlanFacts, PublishMode

Pull = LivePull | StagedPull


class Preparation:
    """One worker's.

    Args:
        registry: handle of the service's registry.
        worker: the worker's name.
        target: its weights.
        install: shadow or in_place.
        options: of the service.
    """

    def __init__(
        self, registry: Any, worker: str, target: WeightTarget, install: InstallMode, options: RegistryOptions
    ) -> None:
        self._registry = registry
        self._worker = worker
        self._target = target
        self._install = install
        self._options = options
        self._recorded: tuple[object, list[RecordedCopy]] | None = None
        self.transport: Transport | None = None
        self.destinations: Destinations | None = None

    def make(self, layout: LayoutSnapshot, consumer_id: int) -> tuple[Pull, PlanFacts]:
        """A pull for this layout, and what it took to make it. Whoever holds the pull before has closed it.

        Raises:
            PlanError: the published model cannot be loaded into the target; names the tensor.
            Exception: whatever the target's loader raises.
        """
        started = time.monotonic()
        copies = self._record(layout)
        if self.destinations is None:
            self.destinations = Destinations(self._target.tensors(), copies, self._install, self._target.unseen())
        if self.transport is None:
            name = f"{self._options.service}:{self._worker}:{secrets.token_hex(4)}"
            self.transport = create_transport(layout.transport, name, serves=False)
        registering = time.monotonic()
        self.transport.register(self.destinations.buffers.values())
        registration_s = time.monotonic() - registering
        pull = self._pull(layout, copies, consumer_id, self.destinations, self.transport)
        facts = PlanFacts(
            bytes_total=pull.bytes_total,
            needs_producers=pull.needs_producers,
            bytes_by_rank=pull.bytes_by_rank,
            plan_s=time.monotonic() - started - registration_s,
            registration_s=registration_s,
        )
        return pull, facts

    def close(self) -> None:
        """Release registrations. Idempotent."""
        if self.transport is not None:
            self.transport.close()

    def _pull(
        self,
        layout: LayoutSnapshot,
        copies: list[RecordedCopy],
        consumer_id: int,
        destinations: Destinations,
        transport: Transport,
    ) -> Pull:
        actors = call(self._registry.producer_actors.remote(layout.generation))
        peers = [
            Peer(rank, rank, producer.agent_metadata, actor, Device.of(torch.empty(0, device=producer.device)))
            for rank, (producer, actor) in enumerate(zip(layout.producers, actors, strict=True))
        ]
        common = (layout, copies, destinations, transport, peers, consumer_id)
        if layout.mode is PublishMode.STAGED:
            return StagedPull(*common, self._options.num_serve_buffers)
        for peer in peers:
            transport.connect(peer)
        device = next(iter(destinations.buffers.values())).device
        return LivePull(*common, self._options, self._link_costs(layout, peers, transport, device))

    def _link_costs(
        self, layout: LayoutSnapshot, peers: Sequence[Peer], transport: Transport, device: torch.device
    ) -> dict[int, LinkCosts]:
        """Per rank, what its link costs: as measured between the two nodes before, or now; values set by hand win."""
        costs: dict[int, LinkCosts] = {}
        for producer, peer in zip(layout.producers, peers, strict=True):
            link = LinkName(producer.node_id, this_node(), producer.device, str(device))
            known = call(self._registry.link_costs.remote(link))
            if known is None and transport.reads_trainer_memory and self._options.strategy == "auto":
                known = measure_link(transport, peer, producer, device)
                call(self._registry.measured.remote(link, known))
            costs[producer.rank] = (known or LinkCosts()).overridden(self._options.link_costs)
        return costs

    def _record(self, layout: LayoutSnapshot) -> list[RecordedCopy]:
        """The worker's distinct copies; recorded again only if the model itself changed."""
        manifest = {meta.name: (meta.dtype, meta.shape) for meta in layout.manifest}
        if self._recorded is None or self._recorded[0] != manifest:
            canonical = {meta.name: meta.alias_of or meta.name for meta in layout.manifest}
            copies = distinct_copies(self._target.record(manifest), canonical, self._target.tensors())
            if not copies:
                raise InvalidLayoutError(
                    f"worker {self._worker!r} would pull nothing: its loader uses none of the {len(manifest)} "
                    f"published names ({', '.join(list(manifest)[:3])}, ...)"
                )
            self._recorded, self.destinations = (manifest, copies), None
        return self._recorded[1]
