"""Every metric of a service: name, type, labels, unit and meaning, in one table that code and documents share.

The thing to watch: labels are members (bounded by `max_consumers` and the world size) or closed sets of words,
so that the number of series is bounded; a reason's text never is a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "weightsync_"

SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""From a tiny model on one machine to the default stall timeout."""
RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


@dataclass(frozen=True)
class Metric:
    """One family. Every series also has the label `service`.

    `page` is where it is offered: the registry's own page, that of each producer or of each consumer.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    unit: str
    text: str
    page: Literal["registry", "producer", "consumer"] = "registry"
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As PromQL knows it; a histogram's samples add `_bucket`, `_sum` and `_count`."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


def _histogram(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(name, "histogram", labels, "seconds", text, buckets=SECONDS_BUCKETS)


UP = Metric("up", "gauge", (), "bool", "1 while the registry answers; the only series while it does not")
NEWEST_VERSION = Metric("newest_version", "gauge", (), "version", "newest committed version, -1 before the first")
NEWEST_VERSION_TIME = Metric(
    "newest_version_timestamp_seconds", "gauge", (), "unix seconds", "when the newest version was committed"
)
PAUSED = Metric("publishing_paused", "gauge", (), "bool", "1 while an operator holds publishing")
MEMBERS = Metric("members", "gauge", ("kind",), "members", "registered members: producer, consumer")
WORLD_SIZE = Metric("world_size", "gauge", (), "ranks", "trainer ranks that publish together, 0 before the first")
READY = Metric("ready_consumers", "gauge", (), "workers", "workers that hold a whole version and may serve")
TORN = Metric("torn_consumers", "gauge", (), "workers", "workers whose live weights an attempt left half-written")
MAX_LAG = Metric("max_lag_versions", "gauge", (), "versions", "versions that the slowest worker is behind")
MAX_LAG_SECONDS = Metric(
    "max_lag_seconds", "gauge", (), "seconds", "how long ago the oldest version was committed that some worker lacks"
)
SYNC_RUNNING = Metric("sync_running", "gauge", (), "bool", "1 while a version is being synced")
SYNC_RUNNING_SECONDS = Metric("sync_running_seconds", "gauge", (), "seconds", "age of the running sync, 0 without one")
SYNC_QUIET_SECONDS = Metric(
    "sync_quiet_seconds", "gauge", (), "seconds", "how long nothing has moved in the running sync, 0 without one"
)
SYNC_PROGRESS = Metric("sync_progress_ratio", "gauge", (), "ratio", "bytes in place of those the running sync moves")
SYNCS = Metric("syncs", "counter", ("outcome",), "syncs", "finished attempts: committed, aborted")
ABORTS = Metric("aborts", "counter", ("reason",), "syncs", "attempts given up, by reason code")
EVICTIONS = Metric("evictions", "counter", ("reason",), "workers", "workers taken out of a sync, by reason code")
STALLS = Metric("stalls", "counter", ("who",), "stalls", "stall watchdogs that fired, for a worker or a whole sync")
LOST_RANKS = Metric("lost_ranks", "counter", (), "ranks", "ranks that died in a sync which went on with their replicas")
REFUSALS = Metric(
    "refused_registrations",
    "counter",
    ("kind",),
    "members",
    "refused: registrations of a producer or a consumer; plan, a worker that cannot pull this layout",
)
SYNC_SECONDS = _histogram("sync_seconds", ("mode",), "from the last rank's publish to the commit")
PHASE_SECONDS = _histogram(
    "sync_phase_seconds",
    ("phase",),
    "parts of a committed sync: begin, pull, scatter, verify, free (the slowest worker's) and commit (the rest)",
)
PULL_SECONDS = _histogram("pull_seconds", (), "one worker's pull of one version")
WAIT_SECONDS = _histogram(
    "producer_wait_seconds",
    ("wait",),
    "what a rank waited for in one sync: credit (a free export slot), free_barrier (the last free signal), slot (that "
    "workers read what lies in their serve slots)",
)
GATHER_SECONDS = _histogram("gather_seconds", (), "one rank's gathering in one staged sync")
PLAN_SECONDS = _histogram("plan_seconds", (), "a worker's recording, planning and preparing of one layout")
REGISTRATION_SECONDS = _histogram("registration_seconds", ("kind",), "making a member's memory readable or writable")
LAST_SECONDS = Metric("last_sync_seconds", "gauge", (), "seconds", "duration of the newest committed sync")
LAST_PHASE_SECONDS = Metric(
    "last_sync_phase_seconds", "gauge", ("phase",), "seconds", "parts of the newest committed sync"
)
LAST_BYTES = Metric("last_sync_bytes", "gauge", (), "bytes", "bytes on the wire of the newest committed sync")
THROUGHPUT = Metric(
    "last_sync_bytes_per_second", "gauge", (), "bytes per second", "throughput of the newest committed sync"
)
BYTES_IN = Metric(
    "pulled_bytes", "counter", ("strategy",), "bytes", "bytes workers pulled: direct, packed, span, or the transport's"
)
BYTES_GAPS = Metric("gap_bytes", "counter", (), "bytes", "bytes read along between needed ones, where that is faster")
BYTES_NEEDED = Metric("needed_bytes", "counter", (), "bytes", "bytes of their weights that workers asked for")
VERIFIED = Metric("verified_regions", "counter", (), "regions", "regions whose digest was checked before the flip")
REPEATED = Metric("repeated_regions", "counter", (), "regions", "regions read twice: the first time was wrong")
VERIFICATION_FAILURES = Metric(
    "verification_failures", "counter", (), "syncs", "syncs given up because bytes were wrong twice"
)
REJECTED = Metric(
    "rejected_signals", "counter", (), "signals", "free signals of another epoch or a foreign consumer, not credited"
)
PREPARED = Metric(
    "prepared", "counter", ("what",), "items", "registrations, connections and descriptor lists made during syncs"
)
PREDICTION = Metric(
    "prediction_ratio",
    "histogram",
    (),
    "ratio",
    "seconds a pull took over those the cost model expected",
    buckets=RATIO_BUCKETS,
)
LINK_BYTES_PER_S = Metric(
    "link_bytes_per_second",
    "gauge",
    ("producer_node", "consumer_node", "producer_device", "consumer_device"),
    "bytes per second",
    "measured speed of large reads between two nodes",
)

CONSUMER_VERSION = Metric(
    "consumer_version", "gauge", ("worker",), "version", "version that requests see, -1 before the first", "consumer"
)
CONSUMER_STAGED = Metric(
    "consumer_staged_version",
    "gauge",
    ("worker",),
    "version",
    "whole version beside the live one, -1: none",
    "consumer",
)
CONSUMER_READY = Metric("consumer_ready", "gauge", ("worker",), "bool", "1 if the worker may serve", "consumer")
CONSUMER_TORN = Metric("consumer_torn", "gauge", ("worker",), "bool", "1 if its weights are half-written", "consumer")
CONSUMER_LAG = Metric(
    "consumer_lag_versions", "gauge", ("worker",), "versions", "committed versions it is behind", "consumer"
)
CONSUMER_LAG_SECONDS = Metric(
    "consumer_lag_seconds",
    "gauge",
    ("worker",),
    "seconds",
    "how long ago the oldest version was committed that it lacks, 0 if it has the newest",
    "consumer",
)
CONSUMER_BYTES = Metric(
    "consumer_pulled_bytes", "gauge", ("worker",), "bytes", "in place in the newest sync", "consumer"
)
CONSUMER_TOTAL = Metric("consumer_pull_bytes", "gauge", ("worker",), "bytes", "that a sync has to bring it", "consumer")
PRODUCER_HELD = Metric("producer_held_bytes", "gauge", ("rank",), "bytes", "of the model in its memory", "producer")
PRODUCER_EXTRA = Metric(
    "producer_extra_bytes", "gauge", ("rank",), "bytes", "taken for slots, export ring or mirror", "producer"
)
PRODUCER_SERVED = Metric("producer_served_bytes", "counter", ("rank",), "bytes", "pulled out of this rank", "producer")
PRODUCER_GROUPS = Metric(
    "producer_inflight_groups",
    "gauge",
    ("rank",),
    "groups",
    "published and not freed: now on its own page, the most of its newest sync on the common one",
    "producer",
)
PRODUCER_REJECTED = Metric(
    "producer_rejected_signals", "counter", ("rank",), "signals", "free signals it did not credit", "producer"
)

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
