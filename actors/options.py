"""How a service is set up, as every member gets to know it. `weightsync.service.Settings` is what people set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weightsync.actors.digests import Verify
from weightsync.actors.logs import Format, Level


@dataclass(frozen=True)
class RegistryOptions:
    """How a registry is set up; `weightsync.service.Settings` documents each."""

    service: str
    transport: str
    transport_reason: str
    http_url: str | None = None
    ray_address: str | None = None
    min_consumers: int = 1
    max_consumers: int = 64
    num_serve_buffers: int = 2
    gather_lookahead: int = 1
    stall_timeout_s: float = 300.0
    verify: Verify = "off"
    strategy: str = "auto"
    link_costs: Mapping[str, float] = field(default_factory=dict)
    chunk_bytes: int = 16 << 20
    max_inflight_bytes: int = 256 << 20
    staging_budget_bytes: int | None = None
    join_grace_s: float = 30.0
    long_poll_s: float = 5.0
    lease_s: float = 10.0
    log_level: Level = "info"
    log_format: Format = "text"
    traces: bool = False
