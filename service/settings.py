"""Settings of a service: arguments, then `WEIGHTSYNC_*` environment variables, then these defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from weightsync.protocol.cost_model import LinkCosts


class Settings(BaseSettings):
    """How a service runs. Durations are seconds, sizes bytes; wrong values are refused by name.

    Example:
        >>> Settings(transport="object_store", stall_timeout_s=60).transport
        'object_store'
    """

    model_config = SettingsConfigDict(env_prefix="WEIGHTSYNC_", extra="forbid", frozen=True)

    transport: Literal["auto", "nixl", "rdt", "object_store"] = Field(
        "nixl",
        description="how bytes move: `nixl` refuses to start without NIXL, as `rdt` does, Ray's own use of it; `auto` "
        "is `nixl`, or Ray's object store where NIXL does not import, and status says so",
    )
    http_host: str = Field("127.0.0.1", description="address the HTTP ingress binds to")
    http_port: int = Field(
        8000,
        ge=0,
        le=65535,
        description="port of the HTTP ingress, used when Serve is not running yet; 0 picks a free one",
    )
    min_consumers: int = Field(
        1, ge=1, description="inference workers that must be able to pull before a publish opens its epoch"
    )
    max_consumers: int = Field(
        64, ge=1, description="limit on inference workers; sizes the producers' serve thread pools"
    )
    num_serve_buffers: int = Field(
        2,
        ge=1,
        description="K: serve slots per consumer and producer in staged mode, and receive slots per worker",
    )
    gather_lookahead: int = Field(
        1, ge=0, description="L: in staged mode at most L + 1 gathered groups are resident per trainer rank"
    )
    stall_timeout_s: float = Field(
        300.0,
        gt=0,
        description="a sync in which nothing moves for this long is given up, naming who waits for whom",
    )
    lease_s: float = Field(
        10.0, gt=0, description="silence of a worker that counts as its death; a killed process is noticed at once"
    )
    verify: Literal["off", "sampled", "full"] = Field(
        "off",
        description="digests of the bytes, computed where they come from and checked where they landed before a "
        "version becomes visible: of every region, or of one in 8, another one each version",
    )
    strategy: Literal["auto", "direct", "packed", "span"] = Field(
        "auto",
        description="live mode: how slices travel. `direct` reads every contiguous run into its place, `packed` has "
        "the trainer pack them, `span` reads the gaps along; `auto` takes what measured costs say is fastest",
    )
    link_costs: dict[str, float] = Field(
        default_factory=dict,
        description="costs to assume instead of those measured between two nodes, by name: bytes_per_s, descriptor_s, "
        "control_s, pack_bytes_per_s, pack_run_s, scatter_bytes_per_s, scatter_run_s (bytes per second, seconds)",
    )
    chunk_bytes: int = Field(
        16 << 20,
        ge=64 << 10,
        description="live mode: largest packed or span chunk; sizes the slots it passes through on both sides",
    )
    max_inflight_bytes: int = Field(
        256 << 20, ge=0, description="live mode: bytes a worker has under way from one trainer rank at once; 0: any"
    )
    staging_budget_bytes: int | None = Field(
        None,
        ge=0,
        description="limit on memory that a worker, or a trainer rank, may take for slots and scratch beyond shadow "
        "weights; a plan that needs more is refused with the number, or takes a slower way where there is one",
    )
    join_grace_s: float = Field(
        30.0, ge=0, description="how long a publish waits for workers that have joined but are still planning"
    )
    long_poll_s: float = Field(5.0, gt=0, le=60, description="how long an idle worker's poll of the registry parks")

    @field_validator("link_costs")
    @classmethod
    def _known_costs(cls, values: dict[str, float]) -> dict[str, float]:
        LinkCosts().overridden(values)
        return values
