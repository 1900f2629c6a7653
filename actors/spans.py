"""A sync as OpenTelemetry spans: `pip install 'weightsync[tracing]'`, `Settings(traces=True)`.

The registry sends them when a sync has ended, over OTLP, to where `OTEL_EXPORTER_OTLP_ENDPOINT` and the other
standard variables of its process say. The thing to watch: starts are reckoned back from durations, on this process's
clock, so that a worker's clock does not matter.
"""

from __future__ import annotations

from typing import Any

from weightsync.protocol.errors import SyncError
from weightsync.protocol.status import VersionRecord


class Spans:
    """Sends a span per attempt, with one for each phase and for each worker's pull below it.

    Raises:
        SyncError: the extra is not installed.
    """

    def __init__(self, service: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise SyncError(f"traces=True needs `pip install 'weightsync[tracing]'` ({error})") from error
        resource = Resource.create({"service.name": "weightsync", "weightsync.service": service})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("weightsync")

    def send(self, record: VersionRecord) -> None:
        """Queue the spans of a finished attempt; a thread of the SDK sends them."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        began = record.ended_at - record.seconds
        about: dict[str, Any] = {"weightsync.version": record.version, "weightsync.epoch": record.epoch}
        whole = self._tracer.start_span("sync", start_time=_ns(began), attributes=about)
        if record.fault is not None:
            whole.set_attribute("weightsync.fault", record.fault.value)
            whole.set_status(Status(StatusCode.ERROR, record.error))
        below = set_span_in_context(whole)
        if record.report is not None:
            pulled_from = began + record.report.phases.get("begin", 0.0)
            self._add("begin", began, pulled_from, below)
            self._add("commit", record.ended_at - record.report.phases.get("commit", 0.0), record.ended_at, below)
            for worker, pull in record.report.workers.items():
                more = {"weightsync.worker": worker, "weightsync.bytes": pull.bytes_wire}
                more |= {f"weightsync.seconds.{phase}": seconds for phase, seconds in pull.phases.items()}
                self._add("pull", pulled_from, pulled_from + pull.seconds, below, more)
        whole.end(_ns(record.ended_at))

    def close(self) -> None:
        """Send what is queued."""
        self._provider.shutdown()

    def _add(self, name: str, began: float, ended: float, below: Any, attributes: dict[str, Any] | None = None) -> None:
        span = self._tracer.start_span(name, context=below, start_time=_ns(began), attributes=attributes)
        span.end(_ns(ended))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
