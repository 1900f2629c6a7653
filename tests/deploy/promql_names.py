"""What names a PromQL expression uses, and whether they exist. A small reader, not a parser of the language.

It takes strings and ranges away, then knows every word that is left: grouping labels, matchers, functions and
keywords, and names of series. Words it does not know are reported, so that a typing error cannot hide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from weightsync.protocol import metric_names as names

TARGET_LABELS = frozenset({"job", "instance", "namespace", "weightsync_service", "weightsync_member"})
"""What scraping adds: Prometheus itself, Kubernetes and `/sd`."""
FOREIGN = {"up": TARGET_LABELS}
"""Series that Prometheus makes."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_RANGE = re.compile(r"\[[^\]]*\]")
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_MATCHER = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")
_FUNCTION = re.compile(r"\b([a-z_]\w*)\s*(?=\()")
_NAME = re.compile(r"(?<![\w.])[a-zA-Z_:][\w:]*")
_AGGREGATION = re.compile(r"\b(sum|max|min|avg|count|quantile)\b")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_KEYWORDS = frozenset({"and", "or", "unless", "bool", "offset"})
_FUNCTIONS = frozenset(
    {
        *("sum", "max", "min", "avg", "count", "absent", "time", "label_replace"),
        *("rate", "increase", "histogram_quantile", "avg_over_time", "quantile_over_time"),
    }
)


def known_series(recorded: Iterable[str] = ()) -> dict[str, frozenset[str]]:
    """Name -> labels of every series there is; recorded ones say theirs in the first part of their name."""
    series = dict(FOREIGN)
    for metric in names.ALL:
        labels = frozenset({"service", *metric.labels}) | TARGET_LABELS
        if metric.kind == "histogram":
            for suffix, more in (("_bucket", {"le"}), ("_sum", set()), ("_count", set())):
                series[metric.full_name + suffix] = labels | more
        else:
            series[metric.full_name] = labels
    for name in recorded:
        series[name] = frozenset(name.split(":")[0].split("_")) | {"namespace"}
    return series


def series_in(expr: str) -> set[str]:
    """Names of the series that an expression reads."""
    bare = _GROUPING.sub(" ", _RANGE.sub("", _STRING.sub("", expr)))
    bare = _FUNCTION.sub(" ", re.sub(r"\{[^}]*\}", " ", bare))
    return set(_NAME.findall(_AGGREGATION.sub(" ", bare))) - _KEYWORDS


def problems(expr: str, series: dict[str, frozenset[str]]) -> list[str]:
    """What does not exist: series, labels of a matcher or a grouping, functions."""
    found: list[str] = []
    bare = _RANGE.sub("", _STRING.sub("", expr))
    used = series_in(expr)
    found += [f"no series {name}" for name in sorted(used - series.keys())]
    available = frozenset().union(*(series.get(name, frozenset()) for name in used))
    for _, labels in _GROUPING.findall(bare):
        wanted = {label.strip() for label in labels.split(",") if label.strip()}
        found += [f"no label {label} to group by" for label in sorted(wanted - available)]
    for name, matchers in _SELECTOR.findall(bare):
        wanted = set(_MATCHER.findall(matchers))
        found += [f"no label {label} on {name}" for label in sorted(wanted - series.get(name, frozenset()))]
    called = set(_FUNCTION.findall(_GROUPING.sub(" ", bare))) - _KEYWORDS
    found += [f"no function {name}" for name in sorted(called - _FUNCTIONS)]
    return found


def kept_labels(expr: str) -> set[str]:
    """Labels of the result: those of the outermost, which is the first, aggregation."""
    grouping = re.search(r"\bby\s*\(([^)]*)\)", expr)
    return {label.strip() for label in grouping[1].split(",")} if grouping else set()


def legend_labels(legend: str) -> set[str]:
    return set(_LEGEND.findall(legend))
