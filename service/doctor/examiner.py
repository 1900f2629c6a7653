"""The actor that looks at its node: facts, the clock, and reads from other nodes.

Two run per node while pairs are measured: one serves memory as a trainer rank does, one reads as a worker does. They
are separate processes because that is what decides about CMA. The thing to watch: reads end with the process that
posted them, so a measurement that hangs is ended by killing the actor.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import torch

from weightsync.actors.calibration import measure_reads
from weightsync.actors.transport import Peer, Transport, create_transport
from weightsync.service.doctor.facts import NodeFacts, PairFacts, first_line
from weightsync.service.doctor.probe import probe_node
from weightsync.service.doctor.thresholds import MEASURED_BYTES

Served = tuple[bytes, int]
"""Transport metadata, and the address of the memory behind it."""


class Examiner:
    """One process on one node; a plain class that Ray wraps at spawn."""

    def __init__(self) -> None:
        self._transport: Transport | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def facts(self, resources: Mapping[str, float]) -> NodeFacts:
        return probe_node(resources)

    def now(self) -> float:
        """Wall clock, seconds since 1970."""
        return time.time()

    def serve(self) -> Served:
        """Register memory for others to read.

        Raises:
            ImportError: NIXL does not load.
        """
        return self._registered(serves=True).metadata(), self._memory.data_ptr()

    def read(self, source: str, target: str, served: Served) -> PairFacts:
        """Measure reads out of what another process serves. Failed ones are in the answer, not raised."""
        metadata, addr = served
        pair = PairFacts(source=source, target=target, nbytes=MEASURED_BYTES)
        try:
            transport = self._registered(serves=False)
            peer = Peer(session=0, rank=0, metadata=metadata, actor=None)
            transport.connect(peer)
            costs = measure_reads(transport, peer, addr, self._memory)
            carrier = transport.carrier(peer)
        except Exception as error:
            return pair.model_copy(update={"error": first_line(error)})
        return pair.model_copy(
            update={"bytes_per_s": costs.bytes_per_s, "descriptor_s": costs.descriptor_s, "carrier": carrier}
        )

    def _registered(self, serves: bool) -> Transport:
        if self._transport is None:
            transport = create_transport("nixl", f"doctor-{secrets.token_hex(4)}", serves=serves)
            self._memory = torch.ones(MEASURED_BYTES, dtype=torch.uint8)  # written: untouched pages would be one page
            transport.register([self._memory])
            self._transport = transport
        return self._transport
