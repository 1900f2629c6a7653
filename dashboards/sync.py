"""One sync in depth: how far the running one is, where the time of the newest one went, and how they vary."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from weightsync.dashboards.base import blank
from weightsync.dashboards.panels import (
    BYTES,
    BYTES_PER_S,
    FACTOR,
    RATIO,
    SECONDS,
    bars,
    heat,
    lines,
    number,
    row,
    waterfall,
)
from weightsync.dashboards.promql import Query, cells, each, now, quantile
from weightsync.protocol import metric_names as names
from weightsync.protocol.status import PHASES


def sync() -> Dashboard:
    """For one service at a time; with several, they lie side by side."""
    dashboard = blank("sync", "One sync", "The running sync, the phases of the newest one, and how syncs vary.")
    dashboard.with_row(row("The running sync"))
    dashboard.with_panel(
        number(
            "Progress",
            "Bytes in place, of those the running sync moves; 0 without one.",
            RATIO,
            Query(now(names.SYNC_PROGRESS), "{{service}}"),
            span=6,
        )
    )
    dashboard.with_panel(
        number(
            "Running for",
            "Age of the running sync; 0 without one.",
            SECONDS,
            Query(now(names.SYNC_RUNNING_SECONDS), "{{service}}"),
            span=6,
        )
    )
    dashboard.with_panel(
        number(
            "Nothing has moved for",
            "In the running sync; 0 without one. `weightsync status --why` says who waits for whom.",
            SECONDS,
            Query(now(names.SYNC_QUIET_SECONDS), "{{service}}"),
            span=6,
            steps=((None, "green"), (30, "orange"), (60, "red")),
        )
    )
    dashboard.with_panel(
        number(
            "Newest version",
            "The newest committed version, -1 before the first.",
            FACTOR,
            Query(now(names.NEWEST_VERSION), "{{service}}"),
            span=6,
        )
    )
    dashboard.with_panel(
        bars(
            "In place, by worker",
            "Bytes in place of those that a sync brings this worker, in its newest sync.",
            RATIO,
            Query(f"{each(names.CONSUMER_BYTES)} / ({each(names.CONSUMER_TOTAL)} > 0)", "{{service}} {{worker}}"),
            top=1,
        )
    )
    dashboard.with_panel(
        lines(
            "Progress and standstill",
            "Age of the running sync, and how long nothing has moved in it. Two lines that rise together are a stall.",
            SECONDS,
            Query(now(names.SYNC_RUNNING_SECONDS), "{{service}} running for"),
            Query(now(names.SYNC_QUIET_SECONDS), "{{service}} quiet for"),
            steps=((None, "transparent"), (60, "red")),
        )
    )

    dashboard.with_row(row("The newest sync"))
    dashboard.with_panel(
        waterfall(
            "Phases of the newest committed sync",
            "begin: the epoch opens on every producer. pull, scatter, verify and free: those of the slowest worker. "
            "commit: the rest, until the registry has heard of everybody.",
            SECONDS,
            Query(each(names.LAST_PHASE_SECONDS), "{{phase}}"),
            rows="service",
            parts="phase",
            order=PHASES,
        )
    )
    dashboard.with_panel(
        number(
            "Duration",
            "From the last rank's publish to the commit of the newest version.",
            SECONDS,
            Query(now(names.LAST_SECONDS), "{{service}}"),
            span=8,
        )
    )
    dashboard.with_panel(
        number(
            "Bytes",
            "On the wire, all workers together, without gaps read along.",
            BYTES,
            Query(now(names.LAST_BYTES), "{{service}}"),
            span=8,
        )
    )
    dashboard.with_panel(
        number(
            "Throughput",
            "Bytes over duration.",
            BYTES_PER_S,
            Query(now(names.THROUGHPUT), "{{service}}"),
            span=8,
        )
    )
    dashboard.with_panel(
        lines(
            "Phases, sync after sync",
            "The same phases over time, stacked: their sum is the duration of the sync that was newest then.",
            SECONDS,
            Query(each(names.LAST_PHASE_SECONDS), "{{service}} {{phase}}"),
            span=24,
            stack=True,
        )
    )

    dashboard.with_row(row("How syncs vary"))
    dashboard.with_panel(
        heat(
            "Duration of syncs",
            "How many syncs took how long; all chosen services together.",
            SECONDS,
            Query(cells(names.SYNC_SECONDS), "{{le}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Phases, 95th percentile",
            "Of the syncs committed within the window. Percentiles of phases do not add up to a sync.",
            SECONDS,
            Query(quantile(0.95, names.PHASE_SECONDS), "{{service}} {{phase}}"),
        )
    )
    dashboard.with_panel(
        heat(
            "Pulls",
            "How many pulls of single workers took how long. Two bands are two kinds of worker, or of link.",
            SECONDS,
            Query(cells(names.PULL_SECONDS), "{{le}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "What trainer ranks waited for",
            "95th percentile per rank and sync. credit: a free export slot. free_barrier: the last free signal. slot: "
            "that workers read what lies in the serve slots. Where workers only read memory, ranks wait for nothing.",
            SECONDS,
            Query(quantile(0.95, names.WAIT_SECONDS), "{{service}} {{wait}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Gathering in staged syncs",
            "Median and 95th percentile of the seconds that a rank's source took to gather, per sync.",
            SECONDS,
            Query(quantile(0.5, names.GATHER_SECONDS), "{{service}} median"),
            Query(quantile(0.95, names.GATHER_SECONDS), "{{service}} 95 %"),
        )
    )
    dashboard.with_panel(
        bars(
            "Preparing a layout, 95th percentile",
            "What a member did once within the dashboard's time range, when it joined or the layout changed: recording "
            "and planning, and making its memory known to the transport.",
            SECONDS,
            Query(quantile(0.95, names.PLAN_SECONDS, window="$__range"), "{{service}} plan"),
            Query(quantile(0.95, names.REGISTRATION_SECONDS, window="$__range"), "{{service}} registration, {{kind}}"),
        )
    )
    return dashboard
