"""What all our dashboards have in common: variables, links to each other, alerts as annotations.

The thing to watch: uids begin with `weightsync-` and everything lies in a folder of its own, so that they live beside
the dashboards that Ray provisions for itself. The data source is a variable, so that they import anywhere.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard as model

from weightsync.dashboards.panels import DATASOURCE
from weightsync.protocol import metric_names as names

TAG = "weightsync"
WINDOWS = ("5m", "15m", "1h", "6h")


def blank(uid: str, title: str, description: str) -> builders.Dashboard:
    """A dashboard without panels; `uid` without our prefix."""
    return (
        builders.Dashboard(f"Weightsync / {title}")
        .uid(f"weightsync-{uid}")
        .description(description)
        .tags([TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .editable()
        .variables([_datasource(), _namespace(), _service(), _window()])
        .annotation(_alerts())
        .link(
            builders.DashboardLink("Weightsync")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )


def _datasource() -> builders.DatasourceVariable:
    return builders.DatasourceVariable("datasource").label("Data source").type("prometheus").multi(False)


def _namespace() -> builders.QueryVariable:
    return (
        _labels("namespace", f"label_values({names.UP.full_name}, namespace)")
        .label("Namespace")
        .description("Of Kubernetes; without it, All is the only choice and filters nothing.")
    )


def _service() -> builders.QueryVariable:
    return (
        _labels("service", f'label_values({names.UP.full_name}{{namespace=~"$namespace"}}, service)')
        .label("Service")
        .description("As given to `weightsync up --name`.")
    )


def _window() -> builders.CustomVariable:
    options = [model.VariableOption(selected=width == "15m", text=width, value=width) for width in WINDOWS]
    return (
        builders.CustomVariable("window")
        .label("Window")
        .description("Of percentiles and ratios: choose some training steps.")
        .values(",".join(WINDOWS))
        .options(options)
        .current(next(option for option in options if option.selected))
    )


def _labels(name: str, query: str) -> builders.QueryVariable:
    """Any number of a label's values. All is `.*`, which also matches series without the label."""
    everything = model.VariableOption(selected=True, text="All", value="$__all")
    return (
        builders.QueryVariable(name)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
    )


def _alerts() -> builders.AnnotationQuery:
    firing = 'ALERTS{alertname=~"Weightsync.+", alertstate="firing", service=~"$service"}'
    return (
        builders.AnnotationQuery()
        .name("Firing alerts")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("red")
        .expr(firing)
    )
