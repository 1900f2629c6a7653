"""What the registry counts for Prometheus: durations, bytes and faults of syncs, as they end.

Members tell what they measured with calls they make anyway, so counting costs no message. States that are true
now (versions, lags, progress) are not kept here but rendered from the status at each scrape. The thing to watch:
series are per service and per closed set of words only; what is per member lives with the member and goes with it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from weightsync.protocol import metric_names as names
from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import PlanFacts, RankStats
from weightsync.protocol.metric_names import PREFIX, Metric
from weightsync.protocol.status import SyncReport

_LABELS: dict[Metric, tuple[tuple[str, ...], ...]] = {
    names.SYNCS: (("committed",), ("aborted",)),
    names.ABORTS: tuple((reason,) for reason in Fault),
    names.EVICTIONS: tuple((reason,) for reason in Fault),
    names.STALLS: (("worker",), ("sync",)),
    names.REFUSALS: (("producer",), ("consumer",), ("plan",)),
    names.REGISTRATION_SECONDS: (("producer",), ("consumer",)),
    names.PREPARED: (("registrations",), ("connections",), ("descriptor_lists",)),
}
"""Closed sets of label values of what may be rare. What every sync counts makes its own series soon enough."""


class Meters:
    """Counters and histograms of one service since its registry started."""

    def __init__(self, service: str) -> None:
        disable_created_metrics()  # one series less per counter, and nobody reads it
        self._service = service
        self._registry = CollectorRegistry()
        kept = [metric for metric in names.ALL if metric.page == "registry" and metric.kind != "gauge"]
        self._kept = {metric: family(metric, self._registry) for metric in kept}
        self._series: dict[tuple[str, ...], Any] = {}
        for metric in kept:  # an increase is only seen from a zero that was scraped before
            for labels in _LABELS.get(metric, () if metric.labels else ((),)):
                self._of(metric, *labels)

    def text(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)

    def planned(self, facts: PlanFacts) -> None:
        """A worker can pull a layout."""
        self._of(names.PLAN_SECONDS).observe(facts.plan_s)
        self._of(names.REGISTRATION_SECONDS, "consumer").observe(facts.registration_s)

    def registered(self, seconds: float) -> None:
        """A trainer rank has made its memory readable."""
        self._of(names.REGISTRATION_SECONDS, "producer").observe(seconds)

    def refused(self, kind: str) -> None:
        self._of(names.REFUSALS, kind).inc()

    def evicted(self, fault: Fault) -> None:
        self._of(names.EVICTIONS, fault).inc()
        if fault is Fault.STALLED:
            self._of(names.STALLS, "worker").inc()

    def aborted(self, fault: Fault) -> None:
        self._of(names.SYNCS, "aborted").inc()
        self._of(names.ABORTS, fault).inc()
        if fault is Fault.STALLED:
            self._of(names.STALLS, "sync").inc()
        if fault is Fault.VERIFICATION:
            self._of(names.VERIFICATION_FAILURES).inc()

    def rank_ended(self, stats: RankStats) -> None:
        """A rank has finished its part of a sync."""
        for wait, seconds in stats.waits.items():
            self._of(names.WAIT_SECONDS, wait).observe(seconds)
        if stats.gather_s:
            self._of(names.GATHER_SECONDS).observe(stats.gather_s)
        self._of(names.REJECTED).inc(stats.rejected_signals)

    def committed(self, report: SyncReport) -> None:
        self._of(names.SYNCS, "committed").inc()
        self._of(names.SYNC_SECONDS, report.mode.value).observe(report.seconds)
        self._of(names.LOST_RANKS).inc(len(report.lost_ranks))
        for phase, seconds in report.phases.items():
            self._of(names.PHASE_SECONDS, phase).observe(seconds)
        pulls, strategies, prepared = report.workers.values(), Counter[str](), Counter[str]()
        for pull in pulls:
            self._of(names.PULL_SECONDS).observe(pull.seconds)
            strategies.update(pull.strategies or {report.transport: pull.bytes_wire})
            prepared.update(pull.prepared)
            if pull.predicted_s:
                self._of(names.PREDICTION).observe(pull.phases.get("pull", pull.seconds) / pull.predicted_s)
        for strategy, nbytes in strategies.items():
            self._of(names.BYTES_IN, strategy).inc(nbytes)
        for what, count in prepared.items():
            self._of(names.PREPARED, what).inc(count)
        self._of(names.VERIFIED).inc(sum(pull.regions_verified for pull in pulls))
        self._of(names.REPEATED).inc(sum(pull.regions_repeated for pull in pulls))
        self._of(names.BYTES_GAPS).inc(report.gap_bytes)
        self._of(names.BYTES_NEEDED).inc(report.needed_bytes)

    def _of(self, metric: Metric, *labels: str) -> Any:
        series = self._series.get((metric.name, *labels))
        if series is None:  # looking a series up by labels takes longer than counting
            series = self._series[metric.name, *labels] = self._kept[metric].labels(self._service, *labels)
        return series


def family(metric: Metric, registry: CollectorRegistry) -> prometheus.Counter | Histogram:
    """The prometheus_client object of a metric, with the label `service` before its own."""
    name, labels = PREFIX + metric.name, ("service", *metric.labels)
    text = f"{metric.text} ({metric.unit})"
    if metric.kind == "counter":
        return prometheus.Counter(name, text, labels, registry=registry)
    return Histogram(name, text, labels, registry=registry, buckets=metric.buckets)
