"""The data path: what travelled how, what was read along, whether predictions hold, and what links give."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from weightsync.dashboards.base import blank
from weightsync.dashboards.panels import (
    BYTES,
    BYTES_PER_S,
    COUNT,
    FACTOR,
    PER_SECOND,
    SECONDS,
    bars,
    heat,
    lines,
    row,
)
from weightsync.dashboards.promql import WINDOW, Query, cells, each, increase, quantile, rate
from weightsync.protocol import metric_names as names


def data_path() -> Dashboard:
    """Where the bytes went."""
    moved = f"({rate(names.BYTES_IN, window=WINDOW)} + {rate(names.BYTES_GAPS, window=WINDOW)})"
    dashboard = blank("data-path", "Data path", "Bytes by strategy, gaps, predictions, waits and links.")
    dashboard.with_row(row("Bytes"))
    dashboard.with_panel(
        lines(
            "Pulled, by strategy",
            "direct: each run straight into its place. packed: the trainer packs, the worker scatters. span: runs "
            "together with the gaps between them. Transports without strategies go by their own name.",
            BYTES_PER_S,
            Query(rate(names.BYTES_IN, "strategy"), "{{service}} {{strategy}}"),
            stack=True,
        )
    )
    dashboard.with_panel(
        bars(
            "Pulled in the time range, by strategy",
            "Within the dashboard's time range.",
            BYTES,
            Query(increase(names.BYTES_IN, "strategy", window="$__range"), "{{service}} {{strategy}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Moved for each byte needed",
            "1 is ideal. Gaps that spans read along and regions read twice come on top.",
            FACTOR,
            Query(f"{moved} / ({rate(names.BYTES_NEEDED, window=WINDOW)} > 0)", "{{service}}"),
            steps=((None, "transparent"), (1.5, "orange")),
        )
    )
    dashboard.with_panel(
        lines(
            "Gaps and needed bytes",
            "Bytes per second that workers needed, and those read along between them because that is faster.",
            BYTES_PER_S,
            Query(rate(names.BYTES_NEEDED), "{{service}} needed"),
            Query(rate(names.BYTES_GAPS), "{{service}} gaps"),
        )
    )

    dashboard.with_row(row("Predictions and links"))
    dashboard.with_panel(
        heat(
            "Measured over predicted",
            "Seconds that pulls took over those the cost model expected; 1 is as expected. All services together.",
            FACTOR,
            Query(cells(names.PREDICTION), "{{le}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Measured over predicted, median",
            "Far from 1, the model may pick the wrong strategy: links have changed since they were measured.",
            FACTOR,
            Query(quantile(0.5, names.PREDICTION), "{{service}}"),
            steps=((None, "orange"), (0.5, "transparent"), (2, "orange")),
        )
    )
    dashboard.with_panel(
        bars(
            "Speed of links",
            "Large reads between two nodes, as a worker measured them when it joined. One slow bar is a bad link.",
            BYTES_PER_S,
            Query(
                each(names.LINK_BYTES_PER_S),
                "{{service}} {{producer_node}} {{producer_device}} > {{consumer_node}} {{consumer_device}}",
            ),
        )
    )
    dashboard.with_panel(
        lines(
            "Prepared during syncs",
            "Registrations, connections and descriptor lists made while a sync ran. Nothing in steady state.",
            COUNT,
            Query(increase(names.PREPARED, "what"), "{{service}} {{what}}"),
            style="bars",
            stack=True,
        )
    )

    dashboard.with_row(row("Waits and checks"))
    dashboard.with_panel(
        lines(
            "Pulls of single workers",
            "Median, 95th and 99th percentile. The sync waits for the slowest.",
            SECONDS,
            Query(quantile(0.5, names.PULL_SECONDS), "{{service}} median"),
            Query(quantile(0.95, names.PULL_SECONDS), "{{service}} 95 %"),
            Query(quantile(0.99, names.PULL_SECONDS), "{{service}} 99 %"),
        )
    )
    dashboard.with_panel(
        lines(
            "What trainer ranks waited for",
            "Median per rank and sync. credit: a free export slot. free_barrier: the last free signal. slot: that "
            "workers read what lies in the serve slots.",
            SECONDS,
            Query(quantile(0.5, names.WAIT_SECONDS), "{{service}} {{wait}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Regions verified",
            "Regions per second whose digest was checked before the flip; 0 with Settings(verify='off').",
            PER_SECOND,
            Query(rate(names.VERIFIED), "{{service}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Regions read twice",
            "Because their digest was wrong the first time. Any is worth a look at memory and network.",
            COUNT,
            Query(increase(names.REPEATED), "{{service}}"),
            style="bars",
        )
    )
    return dashboard
