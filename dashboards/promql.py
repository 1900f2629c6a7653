"""Pieces of PromQL over the metrics of a service. Names and labels come from the table, so that neither can be wrong.

The thing to watch: a service has one registry, so its series are taken with `max by`, never summed over targets. A
service that is scraped twice, by a proxy of each node for one, then shows the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.protocol.metric_names import Metric

FILTER = 'namespace=~"$namespace", service=~"$service"'
"""What every selector starts with; `$namespace` is `.*` for All, which matches series without that label."""
BY_SERVICE = "namespace, service"
WINDOW = "$window"
"""Of percentiles and ratios. A version comes once per training step, so Grafana's own interval mostly sees none."""


@dataclass(frozen=True)
class Query:
    """One query of a panel; `legend` may name labels that survive the aggregation, as `{{service}}`."""

    expr: str
    legend: str


def series(metric: Metric, matchers: str = "", suffix: str = "") -> str:
    """The selector of a metric. `suffix` is that of a histogram's samples: `_bucket`, `_sum`, `_count`."""
    wanted = ", ".join(part for part in (FILTER, matchers) if part)
    return f"{metric.full_name}{suffix}{{{wanted}}}"


def by(labels: tuple[str, ...] = ()) -> str:
    """The labels a result keeps."""
    return ", ".join((BY_SERVICE, *labels))


def now(metric: Metric, *labels: str, matchers: str = "") -> str:
    """A gauge, per service and these labels."""
    return f"max by ({by(labels)}) ({series(metric, matchers)})"


def each(metric: Metric, matchers: str = "") -> str:
    """A gauge, per service and each of its labels."""
    return now(metric, *metric.labels, matchers=matchers)


def rate(metric: Metric, *labels: str, window: str = "$__rate_interval") -> str:
    """A counter's growth per second."""
    return _grown("rate", metric, labels, window)


def increase(metric: Metric, *labels: str, window: str = "$__rate_interval", matchers: str = "") -> str:
    """A counter's growth within a window: between two points of a graph, or within `$__range`."""
    return _grown("increase", metric, labels, window, matchers)


def quantile(share: float, metric: Metric, window: str = WINDOW) -> str:
    """A quantile of what a histogram observed within a window, for each of its labels."""
    buckets = f"max by ({by((*metric.labels, 'le'))}) (rate({series(metric, suffix='_bucket')}[{window}]))"
    return f"histogram_quantile({share:g}, {buckets})"


def cells(metric: Metric) -> str:
    """Counts per bucket of a histogram, all services and labels together: the cells of a heatmap."""
    counts = f"increase({series(metric, suffix='_bucket')}[$__rate_interval])"
    return f"sum by (le) (max by ({by((*metric.labels, 'le'))}) ({counts}))"


def _grown(function: str, metric: Metric, labels: tuple[str, ...], window: str, matchers: str = "") -> str:
    """First per series, then added up where labels are left out that the metric has."""
    grown = f"max by ({by(metric.labels)}) ({function}({series(metric, matchers)}[{window}]))"
    return grown if set(labels) == set(metric.labels) else f"sum by ({by(labels)}) ({grown})"
