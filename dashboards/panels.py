"""Panels as our dashboards use them: same legends, same colours, a unit and a description on each.

The thing to watch: `Query.legend` and units are not optional, so that no panel shows bare label sets or bare numbers.
Sizes are those of Grafana's grid, which is 24 wide; a height of 8 is about 300 pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import (
    barchart,
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from weightsync.dashboards.promql import Query

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

SECONDS = "s"
BYTES = "decbytes"
BYTES_PER_S = "Bps"
COUNT = "short"
RATIO = "percentunit"
FACTOR = "none"
PER_SECOND = "cps"
"""Grafana's names of units. Bytes are decimal, as in reports and the command line."""

Steps = Sequence[tuple[float | None, str]]
"""Thresholds: from this value on this colour; None is minus infinity."""

PLAIN: Steps = ((None, "blue"),)
BAD_FROM_ONE: Steps = ((None, "green"), (1, "red"))
GOOD_FROM_ONE: Steps = ((None, "red"), (1, "green"))

YES_NO = {"0": ("no", "green"), "1": ("yes", "orange")}
UP_DOWN = {"0": ("down", "red"), "1": ("up", "green")}
STATES = {"0": ("not ready", "orange"), "1": ("ready", "green"), "2": ("torn", "red"), "3": ("torn", "red")}

_LINE_MODES = {"lines": common_model.GraphDrawStyle.LINE, "bars": common_model.GraphDrawStyle.BARS}


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    span: int = 12,
    stack: bool = False,
    style: str = "lines",
    steps: Steps = (),
    top: float | None = None,
) -> timeseries.Panel:
    """Something over time. `steps` draws threshold lines, `top` fixes the upper end of the axis."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(8)
        .unit(unit)
        .min(0)
        .draw_style(_LINE_MODES[style])
        .line_width(1)
        .fill_opacity(60 if style == "bars" else 30 if stack else 10)
        .show_points(common_model.VisibilityMode.AUTO)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.TABLE)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_model.TooltipDisplayMode.MULTI)
            .sort(common_model.SortOrder.DESCENDING)
        )
    )
    if stack:
        panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if steps:
        panel.thresholds(_thresholds(steps))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_model.GraphTresholdsStyleMode.DASHED))
    if top is not None:
        panel.max(top)
    return panel.targets(_targets(queries))


def number(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    span: int = 4,
    steps: Steps = PLAIN,
    words: dict[str, tuple[str, str]] | None = None,
) -> stat.Panel:
    """One number per service, coloured by thresholds, or a word for each value."""
    instant = "$__range" in query.expr  # one look at the whole range, not one at every point of it
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(4)
        .unit(unit)
        .thresholds(_thresholds(steps))
        .color_mode(common_model.BigValueColorMode.VALUE)
        .graph_mode(common_model.BigValueGraphMode.AREA)
        .text_mode(common_model.BigValueTextMode.VALUE_AND_NAME)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    if words:
        panel.mappings([_words(words)])
    return panel.targets(_targets([query], instant=instant))


def bars(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    span: int = 12,
    steps: Steps = PLAIN,
    top: float | None = None,
) -> bargauge.Panel:
    """What is true now, one horizontal bar per series."""
    panel = (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(8)
        .unit(unit)
        .min(0)
        .thresholds(_thresholds(steps))
        .orientation(common_model.VizOrientation.HORIZONTAL)
        .display_mode(common_model.BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    if top is not None:
        panel.max(top)
    return panel.targets(_targets(queries, instant=True))


def waterfall(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    rows: str,
    parts: str,
    order: Sequence[str],
    span: int = 24,
) -> barchart.Panel:
    """One horizontal bar per value of the label `rows`, made of its `parts` laid end to end in this order."""
    corner = f"{rows}\\{parts}"  # how the transformation names the column of row names
    matrix = {"columnField": parts, "rowField": rows, "valueField": "Value", "emptyValue": "zero"}
    places = {name: place for place, name in enumerate((corner, *order))}
    return (
        barchart.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(7)
        .unit(unit)
        .min(0)
        .orientation(common_model.VizOrientation.HORIZONTAL)
        .stacking(common_model.StackingMode.NORMAL)
        .show_value(common_model.VisibilityMode.AUTO)
        .x_field(corner)
        .bar_width(0.7)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.LIST)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
        .transformations(
            [
                model.DataTransformerConfig("groupingToMatrix", options=matrix),
                model.DataTransformerConfig(
                    "organize", options={"indexByName": places, "excludeByName": {}, "renameByName": {}}
                ),
            ]
        )
        .targets(_targets([query], instant=True, as_table=True))
    )


def heat(title: str, description: str, unit: str, query: Query, *, span: int = 12) -> heatmap.Panel:
    """A histogram over time. The query must keep the label `le` and nothing else."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(8)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_model.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
            .exponent(0.5)
            .fill("dark-orange")
        )
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .show_legend()
        .targets(_targets([query], heatmap=True))
    )


def states(
    title: str, description: str, query: Query, words: dict[str, tuple[str, str]], *, span: int = 24
) -> statetimeline.Panel:
    """A word per series that changes over time."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(8)
        .unit(FACTOR)
        .mappings([_words(words)])
        .merge_values(True)
        .show_value(common_model.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.LIST)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .targets(_targets([query]))
    )


class Column:
    """A column of a table: a query per row, with its unit and thresholds or words."""

    def __init__(
        self,
        title: str,
        expr: str,
        unit: str = FACTOR,
        *,
        steps: Steps = (),
        words: dict[str, tuple[str, str]] | None = None,
    ) -> None:
        self.query = Query(expr, title)
        self.unit, self.steps, self.words = unit, steps, words

    def look(self) -> list[model.DynamicConfigValue]:
        """How its cells are shown."""
        look = [model.DynamicConfigValue("unit", self.unit)]
        if self.words:
            look.append(model.DynamicConfigValue("mappings", [_words(self.words)]))
        if self.steps:
            look.append(model.DynamicConfigValue("thresholds", _thresholds(self.steps).build()))
        if self.words or self.steps:
            look.append(model.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
        return look


def rows(
    title: str, description: str, *columns: Column, keys: Sequence[str], span: int = 24, height: int = 8
) -> table.Panel:
    """A table with a row for each combination of the labels `keys`, which every column's query must keep."""
    refs = [_ref(place) for place in range(len(columns))]
    names = {f"Value #{ref}": column.query.legend for ref, column in zip(refs, columns, strict=True)}
    order = {name: place for place, name in enumerate((*keys, *names))}
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(height)
        .unit(FACTOR)
        .transformations(
            [
                model.DataTransformerConfig("merge", options={}),
                model.DataTransformerConfig(
                    "organize",
                    options={"indexByName": order, "excludeByName": {"Time": True}, "renameByName": names},
                ),
            ]
        )
        .targets(_targets([column.query for column in columns], instant=True, as_table=True))
    )
    for column in columns:
        panel.override_by_name(column.query.legend, column.look())
    return panel


def row(title: str) -> dashboard.Row:
    """A heading; what follows it on the dashboard belongs to it."""
    return dashboard.Row(title)


def _ref(place: int) -> str:
    return chr(ord("A") + place)


def _targets(
    queries: Sequence[Query], *, instant: bool = False, as_table: bool = False, heatmap: bool = False
) -> list[Any]:
    kind = PromQueryFormat.TABLE if as_table else PromQueryFormat.HEATMAP if heatmap else PromQueryFormat.TIME_SERIES
    targets = []
    for place, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(_ref(place))
        target.datasource(DATASOURCE).format(kind)
        targets.append(target.instant() if instant else target.range())
    return targets


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(value, color) for value, color in steps])
    )


def _words(words: dict[str, tuple[str, str]]) -> model.ValueMap:
    return model.ValueMap(
        {
            value: model.ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(words.items())
        }
    )
