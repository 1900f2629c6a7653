"""Prometheus metrics of a service, rendered from its status at each scrape: no state, no stale members."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from weightsync.protocol.status import ServiceStatus

__all__ = ["CONTENT_TYPE", "render"]


def render(service: str, status: ServiceStatus | None) -> bytes:
    """The text exposition; only `weightsync_up 0` if the registry does not answer."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"weightsync_{name}", text, ("service", *labels), registry=registry)

    gauge("up", "1 while the registry answers").labels(service).set(status is not None)
    if status is None:
        return generate_latest(registry)
    gauge("newest_version", "newest committed version, -1 before the first").labels(service).set(
        -1 if status.newest_version is None else status.newest_version
    )
    gauge("syncs_committed", "versions committed since the registry started").labels(service).set(
        status.syncs_committed
    )
    gauge("syncs_aborted", "attempts aborted since the registry started").labels(service).set(status.syncs_aborted)
    gauge("producers", "registered trainer ranks").labels(service).set(len(status.producers))
    gauge("sync_running", "1 while an epoch is open").labels(service).set(status.epoch is not None)
    version = gauge("consumer_version", "installed version per worker, -1 before the first", ("worker",))
    ready = gauge("consumer_ready", "1 if the worker may serve", ("worker",))
    done = gauge("consumer_pulled_bytes", "bytes in place in the newest epoch", ("worker",))
    for consumer in status.consumers:
        version.labels(service, consumer.worker).set(-1 if consumer.version is None else consumer.version)
        ready.labels(service, consumer.worker).set(consumer.ready)
        done.labels(service, consumer.worker).set(consumer.bytes_done)
    if status.last_report is not None:
        report = status.last_report
        gauge("last_sync_seconds", "duration of the newest committed sync").labels(service).set(report.seconds)
        gauge("last_sync_bytes", "bytes on the wire of the newest committed sync").labels(service).set(report.bytes)
        phase = gauge("last_sync_phase_seconds", "seconds per phase of the newest committed sync", ("phase",))
        for name, seconds in report.phases.items():
            phase.labels(service, name).set(seconds)
    return generate_latest(registry)
