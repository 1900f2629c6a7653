"""What people and scripts are told: the report of one sync, and the state of a service.

Pydantic models, because they leave the program as JSON. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import ConsumerState, EpochState, PublishMode

PHASES = ("begin", "pull", "scatter", "verify", "free", "commit")
"""Parts of a sync, in the order in which they happen."""


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerPull(_Report):
    """What one inference worker moved in one sync."""

    bytes_wire: int = Field(description="bytes that crossed the transport to get here, those read twice twice")
    bytes_gaps: int = Field(0, description="bytes that spans read along on top, between those needed")
    bytes_needed: int = Field(description="bytes of the worker's parameters that the model provides")
    seconds: float = Field(description="from begin to the last byte in place")
    phases: dict[str, float] = Field(default_factory=dict, description="seconds per phase on this worker")
    regions_verified: int = Field(0, description="regions whose digest was checked before the flip")
    regions_repeated: int = Field(0, description="regions read twice, because their digest was wrong at first")
    strategies: dict[str, int] = Field(default_factory=dict, description="bytes by how they travelled")
    predicted_s: float = Field(0.0, description="what the cost model expected of reads and scatters; 0: no model")
    prepared: dict[str, int] = Field(
        default_factory=dict,
        description="registrations, connections and descriptor lists made during this sync; none in steady state",
    )
    carriers: tuple[str, ...] = Field(
        (), description="what carried the bytes below the transport: cma, shared memory, rdma, tcp, object store, ..."
    )
    extra_bytes: int = Field(0, description="memory of this worker beside its weights and their shadow")


class SyncReport(_Report):
    """The outcome of one published version; the same on every trainer rank.

    `installed` lists the workers that hold the complete version: in shadow mode it is staged beside the live
    parameters and becomes visible at the worker's next `sync()`, in in_place mode it is visible already.
    """

    service: str
    version: int
    epoch: int
    mode: PublishMode
    transport: str
    carriers: list[str] = Field(default_factory=list, description="what carried its bytes, over all workers")
    bytes: int = Field(description="bytes on the wire, all workers together; see also `gap_bytes`")
    gap_bytes: int = Field(0, description="bytes read on top, between needed ones, where that is faster (spans)")
    needed_bytes: int = Field(description="bytes the workers hold of this model, all workers together")
    seconds: float = Field(description="from the last rank's publish call to the commit")
    phases: dict[str, float] = Field(
        description="seconds: begin (epoch open on every producer), pull, scatter, verify (if on) and free (the "
        "slowest worker's), commit (the rest)"
    )
    gbytes_per_second: float = Field(description="bytes / seconds / 1e9")
    installed: list[str]
    evicted: list[str]
    lost_ranks: list[int] = Field(
        default_factory=list, description="trainer ranks that died and whose part came from other ranks"
    )
    producer_extra_bytes: dict[int, int] = Field(
        default_factory=dict, description="per trainer rank, memory for slots, export ring or mirror"
    )
    workers: dict[str, WorkerPull]


class VersionRecord(_Report):
    """One finished attempt to sync a version."""

    version: int
    epoch: int
    state: EpochState
    ended_at: float = Field(description="seconds since 1970")
    seconds: float = Field(description="from the last rank's publish call to the end")
    evicted: dict[str, str] = Field(description="worker -> why it was taken out")
    fault: Fault | None = Field(description="why it was given up; null if it was committed")
    error: str | None = Field(description="the same in words")
    report: SyncReport | None = Field(
        description="of a committed attempt; `workers` is empty where it is too long ago for details"
    )


class EventKind(StrEnum):
    """What news are about."""

    OPENED = "opened"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EVICTED = "evicted"
    JOINED = "joined"
    LEFT = "left"
    REFUSED = "refused"
    PAUSED = "paused"
    RESUMED = "resumed"


class Event(_Report):
    """Something that happened to a service."""

    number: int = Field(description="counts up by one, from 1 when the registry started")
    time: float = Field(description="seconds since 1970")
    kind: EventKind
    text: str
    version: int | None = None
    epoch: int | None = None
    member: str | None = Field(None, description="such as `worker w1` or `trainer rank 0`")
    fault: Fault | None = None


class ProducerStatus(_Report):
    rank: int
    mode: PublishMode
    node_id: str
    pid: int
    bytes_held: int
    extra_bytes: int = Field(0, description="memory for slots, export ring or mirror, in its newest sync")
    inflight_groups: int = Field(0, description="most groups published and not freed at once, in its newest sync")
    served_bytes: int = Field(0, description="pulled out of it since it joined")
    rejected_signals: int = Field(0, description="free signals it did not credit since it joined")


class ConsumerStatus(_Report):
    worker: str
    consumer_id: int
    state: ConsumerState
    install: str
    version: int | None = Field(description="version that requests see; None before the first install")
    staged_version: int | None = Field(description="complete version beside the live one, if any")
    ready: bool
    torn: bool = Field(description="an attempt left its live weights half-written")
    lag_versions: int = Field(0, description="committed versions it is behind; at most 100")
    lag_seconds: float = Field(0.0, description="since the oldest of them was committed")
    waits_for: str = Field("", description="what its pull waits for, in words")
    bytes_done: int
    bytes_total: int
    node_id: str
    pid: int
    error: str | None = None


class LinkStatus(_Report):
    """What reading over a link costs, as workers measured it."""

    producer_node: str
    consumer_node: str
    producer_device: str
    consumer_device: str
    bytes_per_s: float = Field(description="large runs")
    descriptor_s: float = Field(description="seconds per separated run, on top of its bytes")
    control_s: float = Field(description="a question and an answer between actors")
    pack_bytes_per_s: float
    pack_run_s: float
    scatter_bytes_per_s: float
    scatter_run_s: float
    measured: bool


class EpochStatus(_Report):
    epoch: int
    version: int
    state: EpochState
    seconds: float
    quiet_seconds: float = Field(0.0, description="since anything of it moved")
    progress: float = Field(0.0, description="part of its bytes that is in place, 0 to 1")
    waiting_for: list[str] = Field(description="members that have not finished, in words")


class News(_Report):
    """What changed since somebody asked last, and how far a running sync is."""

    number: int = Field(description="of the newest event; ask for those after it next time")
    events: list[Event]
    epoch: EpochStatus | None
    consumers: list[ConsumerStatus] = Field(description="those that take part in the running sync")


class ServiceStatus(_Report):
    """The state of a service at one moment."""

    service: str
    address: str | None = Field(description="Ray address")
    transport: str
    transport_reason: str
    http_url: str | None
    registry_pid: int
    generation: int = Field(description="counts changes of the trainer layout")
    world_size: int | None
    newest_version: int | None
    committed_at: float | None = Field(None, description="when the newest version was, in seconds since 1970")
    paused: str | None = Field(None, description="why an operator holds publishing; null: it goes on")
    epoch: EpochStatus | None
    producers: list[ProducerStatus]
    consumers: list[ConsumerStatus]
    syncs_committed: int
    syncs_aborted: int
    last_report: SyncReport | None
    last_error: str | None
    last_error_at: float | None = Field(None, description="when that was, in seconds since 1970")
    events: int = Field(0, description="number of the newest event")
    links: list[LinkStatus] = Field(default_factory=list, description="measured costs, by pair of nodes")
