"""States of an invented service, for tests of the status page."""

from __future__ import annotations

from typing import Any

from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import ConsumerState, EpochState, PublishMode
from weightsync.protocol.status import (
    ConsumerStatus,
    EpochStatus,
    Event,
    EventKind,
    LinkStatus,
    ProducerStatus,
    ServiceStatus,
    SyncReport,
    VersionRecord,
)

NOW = 1_796_119_445.0
"""2026-12-01 10:04:05 UTC."""
GB = 1_000_000_000
PHASES = {"begin": 0.004, "pull": 0.41, "scatter": 0.05, "verify": 0.08, "free": 0.006, "commit": 0.012}


def consumer(index: int, **changes: Any) -> ConsumerStatus:
    """A worker that is on version 12."""
    fields: dict[str, Any] = {
        "worker": f"w{index}",
        "consumer_id": index,
        "state": ConsumerState.IDLE,
        "install": "shadow",
        "version": 12,
        "staged_version": None,
        "ready": True,
        "torn": False,
        "bytes_done": GB,
        "bytes_total": GB,
        "node_id": f"{index:08x}ffff",
        "pid": 4000 + index,
    }
    return ConsumerStatus(**{**fields, **changes})


def producer(rank: int, **changes: Any) -> ProducerStatus:
    fields: dict[str, Any] = {
        "rank": rank,
        "mode": PublishMode.LIVE,
        "node_id": "feedbeefcafe",
        "pid": 3000 + rank,
        "bytes_held": GB,
        "extra_bytes": 64_000_000,
        "served_bytes": 12 * GB,
    }
    return ProducerStatus(**{**fields, **changes})


def epoch(**changes: Any) -> EpochStatus:
    """Version 13, a moment after it began."""
    fields: dict[str, Any] = {
        "epoch": 14,
        "version": 13,
        "state": EpochState.OPEN,
        "seconds": 1.4,
        "quiet_seconds": 0.1,
        "progress": 0.25,
        "waiting_for": ["worker w0", "worker w1", "trainer rank 0"],
    }
    return EpochStatus(**{**fields, **changes})


def status(**changes: Any) -> ServiceStatus:
    """Two ranks, four workers, all on version 12."""
    fields: dict[str, Any] = {
        "service": "example",
        "address": "127.0.0.1:6379",
        "transport": "nixl",
        "transport_reason": "it imports",
        "http_url": "http://127.0.0.1:8000/example",
        "registry_pid": 77,
        "generation": 1,
        "world_size": 2,
        "newest_version": 12,
        "committed_at": NOW - 190,
        "epoch": None,
        "producers": [producer(0), producer(1)],
        "consumers": [consumer(index) for index in range(4)],
        "syncs_committed": 12,
        "syncs_aborted": 1,
        "last_report": report(12),
        "last_error": None,
        "events": 40,
        "links": [link()],
    }
    return ServiceStatus(**{**fields, **changes})


def syncing(**of_epoch: Any) -> ServiceStatus:
    """w0 and w1 pull version 13, w2 and w3 have it."""
    state = {"state": ConsumerState.PULLING, "waits_for": "reads from trainer rank 0"}
    return status(
        epoch=epoch(**of_epoch),
        consumers=[
            consumer(0, bytes_done=GB // 10, **state),
            consumer(1, bytes_done=GB // 2, **state),
            *(consumer(index, state=ConsumerState.PULLED, staged_version=13) for index in (2, 3)),
        ],
    )


def report(version: int, **changes: Any) -> SyncReport:
    fields: dict[str, Any] = {
        "service": "example",
        "version": version,
        "epoch": version + 1,
        "mode": PublishMode.LIVE,
        "transport": "nixl",
        "bytes": 4 * GB,
        "needed_bytes": 4 * GB,
        "seconds": sum(PHASES.values()),
        "phases": PHASES,
        "gbytes_per_second": 4 / sum(PHASES.values()),
        "installed": ["w0", "w1", "w2", "w3"],
        "evicted": [],
        "workers": {},
    }
    return SyncReport(**{**fields, **changes})


def committed(version: int, **changes: Any) -> VersionRecord:
    fields: dict[str, Any] = {
        "version": version,
        "epoch": version + 1,
        "state": EpochState.COMMITTED,
        "ended_at": NOW - 190 - 60 * (12 - version),
        "seconds": sum(PHASES.values()),
        "evicted": {},
        "fault": None,
        "error": None,
        "report": report(version),
    }
    return VersionRecord(**{**fields, **changes})


def aborted(version: int, error: str, **changes: Any) -> VersionRecord:
    outcome = {"state": EpochState.ABORTED, "fault": Fault.RANK_LOST, "error": error, "report": None}
    return committed(version, **{**outcome, **changes})


def event(number: int, kind: EventKind, text: str, **changes: Any) -> Event:
    return Event(**{"number": number, "time": NOW - 300 + number, "kind": kind, "text": text, **changes})


def link() -> LinkStatus:
    return LinkStatus(
        producer_node="feedbeefcafe",
        consumer_node="00000001ffff",
        producer_device="cpu",
        consumer_device="cpu",
        bytes_per_s=9.5e9,
        descriptor_s=2.5e-7,
        control_s=0.0004,
        pack_bytes_per_s=6e9,
        pack_run_s=1e-7,
        scatter_bytes_per_s=5e9,
        scatter_run_s=1.2e-7,
        measured=True,
    )
