"""Settings of a service: arguments, then `WEIGHTSYNC_*` environment variables, a YAML file, these defaults."""

from __future__ import annotations

import os
from typing import Literal

import ray
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from weightsync.actors.options import RegistryOptions
from weightsync.protocol.cost_model import LinkCosts

FILE_VARIABLE = "WEIGHTSYNC_SETTINGS_FILE"
MIN_TOKEN_LENGTH = 16


class RuntimeSettings(BaseModel):
    """Settings that a running service can take over, from Serve's `user_config`. None: leave it as it is."""

    model_config = ConfigDict(extra="forbid")

    min_consumers: int | None = Field(None, ge=1)
    join_grace_s: float | None = Field(None, ge=0)
    long_poll_s: float | None = Field(None, gt=0, le=60)


class Settings(BaseSettings):
    """How a service runs. Durations are seconds, sizes bytes; wrong values are refused by name.

    Arguments win over `WEIGHTSYNC_*` environment variables, those over the YAML file that
    `WEIGHTSYNC_SETTINGS_FILE` names, that over the defaults.

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
    http_replicas: int = Field(1, ge=1, le=64, description="ingress replicas; they keep no state")
    http_read_tokens: list[SecretStr] = Field(
        default_factory=list,
        description=f"bearer tokens that may read over HTTP, of at least {MIN_TOKEN_LENGTH} characters; needed where "
        "other machines reach the ingress",
    )
    http_operate_tokens: list[SecretStr] = Field(
        default_factory=list, description="bearer tokens that may read and operate over HTTP"
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
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what the registry logs: at info two lines per sync, and members that come and go"
    )
    log_format: Literal["text", "json"] = Field("text", description="`text` is key=value")
    traces: bool = Field(
        False,
        description="send OpenTelemetry spans of each sync to where OTEL_EXPORTER_OTLP_ENDPOINT says; needs the extra "
        "`tracing`",
    )
    long_poll_s: float = Field(5.0, gt=0, le=60, description="how long an idle worker's poll of the registry parks")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get(FILE_VARIABLE)
        if path is None:
            return init_settings, env_settings
        if not os.path.isfile(path):
            raise ValueError(f"{FILE_VARIABLE} names {path!r}, which is no file")
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=path)

    @property
    def read_tokens(self) -> tuple[str, ...]:
        return tuple(token.get_secret_value() for token in self.http_read_tokens)

    @property
    def operate_tokens(self) -> tuple[str, ...]:
        return tuple(token.get_secret_value() for token in self.http_operate_tokens)

    @property
    def has_tokens(self) -> bool:
        return bool(self.http_read_tokens or self.http_operate_tokens)

    def registry_options(self, service: str, transport: str, reason: str, url: str | None) -> RegistryOptions:
        """What the registry is told. `transport` is the one chosen, and `reason` why; the cluster is connected."""
        return RegistryOptions(
            service=service,
            transport=transport,
            transport_reason=reason,
            http_url=url,
            ray_address=ray.get_runtime_context().gcs_address,
            min_consumers=self.min_consumers,
            max_consumers=self.max_consumers,
            num_serve_buffers=self.num_serve_buffers,
            gather_lookahead=self.gather_lookahead,
            stall_timeout_s=self.stall_timeout_s,
            join_grace_s=self.join_grace_s,
            verify=self.verify,
            strategy=self.strategy,
            link_costs=self.link_costs,
            chunk_bytes=self.chunk_bytes,
            max_inflight_bytes=self.max_inflight_bytes,
            staging_budget_bytes=self.staging_budget_bytes,
            long_poll_s=self.long_poll_s,
            lease_s=self.lease_s,
            log_level=self.log_level,
            log_format=self.log_format,
            traces=self.traces,
        )

    @field_validator("http_read_tokens", "http_operate_tokens")
    @classmethod
    def _long_tokens(cls, tokens: list[SecretStr]) -> list[SecretStr]:
        if any(len(token.get_secret_value()) < MIN_TOKEN_LENGTH for token in tokens):
            raise ValueError(f"a token has at least {MIN_TOKEN_LENGTH} characters; `openssl rand -hex 24` makes one")
        return tokens

    @field_validator("link_costs")
    @classmethod
    def _known_costs(cls, values: dict[str, float]) -> dict[str, float]:
        LinkCosts().overridden(values)
        return values
