"""Spans of a sync, as a collector receives them over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from weightsync.actors.spans import Spans
from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import EpochState, PublishMode
from weightsync.protocol.status import SyncReport, VersionRecord, WorkerPull


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Spans that arrived."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield spans
    server.shutdown()
    server.server_close()


def committed() -> VersionRecord:
    pull = WorkerPull(bytes_wire=100, bytes_needed=100, seconds=0.5, phases={"pull": 0.4, "scatter": 0.1})
    report = SyncReport(
        service="s",
        version=7,
        epoch=9,
        mode=PublishMode.LIVE,
        transport="nixl",
        bytes=100,
        needed_bytes=100,
        seconds=1.0,
        phases={"begin": 0.25, "pull": 0.4, "commit": 0.25},
        gbytes_per_second=1e-7,
        installed=["w0"],
        evicted=[],
        workers={"w0": pull},
    )
    return VersionRecord(
        version=7,
        epoch=9,
        state=EpochState.COMMITTED,
        ended_at=1001.0,
        seconds=1.0,
        evicted={},
        fault=None,
        error=None,
        report=report,
    )


def test_a_sync_is_a_span_with_its_parts_below_it(collector: list[Any]) -> None:
    spans = Spans("s")
    spans.send(committed())
    spans.close()
    by_name = {span.name: span for span in collector}
    assert set(by_name) == {"sync", "begin", "pull", "commit"}
    times = {name: (s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9) for name, s in by_name.items()}
    assert times == {
        "sync": (1000.0, 1001.0),
        "begin": (1000.0, 1000.25),
        "pull": (1000.25, 1000.75),
        "commit": (1000.75, 1001.0),
    }
    whole = by_name.pop("sync")
    assert all(span.parent_span_id == whole.span_id for span in by_name.values())
    about = {a.key: a.value.int_value or a.value.string_value for a in by_name["pull"].attributes}
    assert (about["weightsync.worker"], about["weightsync.bytes"]) == ("w0", 100)
    assert {a.key: a.value.int_value for a in whole.attributes} == {"weightsync.version": 7, "weightsync.epoch": 9}


def test_an_aborted_sync_is_an_error_with_its_reason(collector: list[Any]) -> None:
    spans = Spans("s")
    aborted = {"state": EpochState.ABORTED, "fault": Fault.STALLED, "error": "nothing moved", "report": None}
    spans.send(committed().model_copy(update=aborted))
    spans.close()
    (span,) = collector
    assert (span.status.code, span.status.message) == (2, "nothing moved")
    assert any(a.key == "weightsync.fault" and a.value.string_value == "stalled" for a in span.attributes)
