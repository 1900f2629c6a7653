"""What may stay silent for days is scraped as zero from the start: Prometheus sees an increase only from a zero."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weightsync.actors.meters import Meters
from weightsync.protocol import metric_names as names
from weightsync.protocol.faults import Fault
from weightsync.protocol.metric_names import Metric


def _values(meters: Meters, metric: Metric) -> dict[str | None, float]:
    """Value by the metric's own label, or None if it has none."""
    label = metric.labels[0] if metric.labels else ""
    families = text_string_to_metric_families(meters.text().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == metric.full_name]
    assert all(sample.labels["service"] == "a" for sample in samples)
    return {sample.labels.get(label): sample.value for sample in samples}


@pytest.mark.parametrize(
    ("metric", "labels"),
    [
        (names.ABORTS, set(Fault)),
        (names.EVICTIONS, set(Fault)),
        (names.STALLS, {"worker", "sync"}),
        (names.REFUSALS, {"producer", "consumer", "plan"}),
        (names.LOST_RANKS, {None}),
        (names.REPEATED, {None}),
        (names.REJECTED, {None}),
        (names.VERIFICATION_FAILURES, {None}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_fault_that_has_not_happened_is_counted_as_zero(metric: Metric, labels: set[str | None]) -> None:
    assert _values(Meters("a"), metric) == dict.fromkeys(labels, 0.0)


def test_the_first_stall_of_a_worker_is_one_more_than_zero() -> None:
    meters = Meters("a")
    before = _values(meters, names.STALLS)
    meters.evicted(Fault.STALLED)
    after = _values(meters, names.STALLS)
    assert {who: after[who] - before[who] for who in after} == {"worker": 1.0, "sync": 0.0}
