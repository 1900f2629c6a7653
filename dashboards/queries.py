"""The queries of the dashboards as Prometheus would get them, read from the JSON. Needs no Grafana and no SDK.

For checks: of names and labels against the table of metrics, and of results against a real Prometheus. The thing to
watch: a variable that is not known here is an error, so that a query cannot pass unsubstituted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "json"

ALL: Mapping[str, str] = {
    "namespace": ".*",
    "service": ".*",
    "window": "15m",
    "__rate_interval": "1m",
    "__interval": "15s",
    "__range": "1h",
}
"""Variables as Grafana fills them in by default: everything chosen, the last hour, a scrape every 15 s."""

_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)\}|(?P<plain>\w+))")


@dataclass(frozen=True)
class PanelQuery:
    """One query of one panel, with all variables filled in; `legend` is the template as it is."""

    dashboard: str
    panel: str
    expr: str
    legend: str
    instant: bool


def panel_queries(folder: Path = FOLDER, variables: Mapping[str, str] = ALL) -> Iterator[PanelQuery]:
    """All queries of all dashboards in a folder; raises KeyError for a variable that has no value."""
    for path in sorted(folder.glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                expr = _VARIABLE.sub(lambda match: variables[match["braced"] or match["plain"]], target["expr"])
                yield PanelQuery(
                    board["title"], panel["title"], expr, target["legendFormat"], target.get("instant", False)
                )
