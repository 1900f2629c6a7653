"""What Prometheus reads: the registry's counters, and gauges of what is true at the moment of a scrape.

Three kinds of pages. `/metrics` has everything; a scraper that follows `/sd` reads the registry's own page and
one per member instead, so that a member's series carry its target and end with it. The thing to watch: gauges are
made anew of the status at each scrape, so nothing of a member that left stays behind.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from weightsync.protocol import metric_names as names
from weightsync.protocol.metric_names import Metric
from weightsync.protocol.status import ConsumerStatus, ProducerStatus, ServiceStatus

__all__ = ["CONTENT_TYPE", "consumer_page", "down_page", "everything", "producer_page", "registry_page"]

REGISTRY_PAGE = "/metrics/registry"


def producer_path(rank: int) -> str:
    return f"/metrics/producers/{rank}"


def consumer_path(worker: str) -> str:
    return f"/metrics/consumers/{worker}"


class _Page:
    """Samples of one scrape, gathered by family: prometheus_client wants all of one family together."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._families: dict[Metric, Family] = {}

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        family = self._families.get(metric)
        if family is None:
            family = self._families[metric] = Family(
                metric.full_name.removesuffix("_total"), f"{metric.text} ({metric.unit})", metric.kind
            )
        values = dict(zip(("service", *metric.labels), (self._service, *labels), strict=True))
        family.add_sample(metric.full_name, values, float(value))

    def collect(self) -> Iterable[Family]:
        return self._families.values()

    def text(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        return generate_latest(registry)


def down_page(service: str) -> bytes:
    """The registry does not answer."""
    page = _Page(service)
    page.set(names.UP, 0)
    return page.text()


def everything(status: ServiceStatus, counters: bytes) -> bytes:
    """All pages in one; `counters` is what the registry's `metrics` says."""
    page = _Page(status.service)
    _registry(page, status)
    for producer in status.producers:
        _producer(page, producer)
    for consumer in status.consumers:
        _consumer(page, consumer)
    return page.text() + counters


def registry_page(status: ServiceStatus, counters: bytes) -> bytes:
    """Of the service as a whole."""
    page = _Page(status.service)
    _registry(page, status)
    return page.text() + counters


def producer_page(service: str, producer: ProducerStatus) -> bytes:
    page = _Page(service)
    _producer(page, producer)
    return page.text()


def consumer_page(service: str, consumer: ConsumerStatus) -> bytes:
    page = _Page(service)
    _consumer(page, consumer)
    return page.text()


def _registry(page: _Page, status: ServiceStatus) -> None:
    consumers, epoch, report = status.consumers, status.epoch, status.last_report
    page.set(names.UP, 1)
    page.set(names.NEWEST_VERSION, _version(status.newest_version))
    if status.committed_at is not None:
        page.set(names.NEWEST_VERSION_TIME, status.committed_at)
    page.set(names.PAUSED, status.paused is not None)
    page.set(names.MEMBERS, len(status.producers), "producer")
    page.set(names.MEMBERS, len(consumers), "consumer")
    page.set(names.WORLD_SIZE, status.world_size or 0)
    page.set(names.READY, sum(consumer.ready for consumer in consumers))
    page.set(names.TORN, sum(consumer.torn for consumer in consumers))
    page.set(names.MAX_LAG, max((consumer.lag_versions for consumer in consumers), default=0))
    page.set(names.MAX_LAG_SECONDS, max((consumer.lag_seconds for consumer in consumers), default=0.0))
    page.set(names.SYNC_RUNNING, epoch is not None)
    page.set(names.SYNC_RUNNING_SECONDS, epoch.seconds if epoch else 0.0)
    page.set(names.SYNC_QUIET_SECONDS, epoch.quiet_seconds if epoch else 0.0)
    page.set(names.SYNC_PROGRESS, epoch.progress if epoch else 0.0)
    if report is not None:
        page.set(names.LAST_SECONDS, report.seconds)
        page.set(names.LAST_BYTES, report.bytes)
        page.set(names.THROUGHPUT, report.bytes / report.seconds if report.seconds else 0.0)
        for phase, seconds in report.phases.items():
            page.set(names.LAST_PHASE_SECONDS, seconds, phase)
    for link in status.links:
        ends = (link.producer_node, link.consumer_node, link.producer_device, link.consumer_device)
        page.set(names.LINK_BYTES_PER_S, link.bytes_per_s, *ends)


def _producer(page: _Page, producer: ProducerStatus) -> None:
    rank = str(producer.rank)
    page.set(names.PRODUCER_HELD, producer.bytes_held, rank)
    page.set(names.PRODUCER_EXTRA, producer.extra_bytes, rank)
    page.set(names.PRODUCER_SERVED, producer.served_bytes, rank)
    page.set(names.PRODUCER_GROUPS, producer.inflight_groups, rank)
    page.set(names.PRODUCER_REJECTED, producer.rejected_signals, rank)


def _consumer(page: _Page, consumer: ConsumerStatus) -> None:
    worker = consumer.worker
    page.set(names.CONSUMER_VERSION, _version(consumer.version), worker)
    page.set(names.CONSUMER_STAGED, _version(consumer.staged_version), worker)
    page.set(names.CONSUMER_READY, consumer.ready, worker)
    page.set(names.CONSUMER_TORN, consumer.torn, worker)
    page.set(names.CONSUMER_LAG, consumer.lag_versions, worker)
    page.set(names.CONSUMER_LAG_SECONDS, consumer.lag_seconds, worker)
    page.set(names.CONSUMER_BYTES, consumer.bytes_done, worker)
    page.set(names.CONSUMER_TOTAL, consumer.bytes_total, worker)


def _version(version: int | None) -> int:
    return -1 if version is None else version
