"""All services at a glance: who is up, how far behind, how fast, and what went wrong lately."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from weightsync.dashboards.base import blank
from weightsync.dashboards.panels import (
    BYTES_PER_S,
    COUNT,
    FACTOR,
    GOOD_FROM_ONE,
    RATIO,
    SECONDS,
    UP_DOWN,
    YES_NO,
    Column,
    lines,
    number,
    row,
    rows,
)
from weightsync.dashboards.promql import Query, each, increase, now, quantile
from weightsync.protocol import metric_names as names

CONSUMERS = 'kind="consumer"'


def fleet() -> Dashboard:
    """One row or line per service."""
    workers = now(names.MEMBERS, matchers=CONSUMERS)
    dashboard = blank("fleet", "Fleet", "All weightsync services: state, lag, speed and faults.")
    dashboard.with_row(row("Now"))
    dashboard.with_panel(
        rows(
            "Services",
            "One row per service. Lag is that of its slowest worker: how many committed versions it has not "
            "installed, and how long ago the first of them was committed.",
            Column("Registry", now(names.UP), words=UP_DOWN),
            Column("Newest version", now(names.NEWEST_VERSION)),
            Column("Ranks", now(names.MEMBERS, matchers='kind="producer"')),
            Column("Workers", workers),
            Column("Ready", now(names.READY), steps=GOOD_FROM_ONE),
            Column("Versions behind", now(names.MAX_LAG), steps=((None, "green"), (2, "orange"), (4, "red"))),
            Column("Time behind", now(names.MAX_LAG_SECONDS), SECONDS, steps=((None, "green"), (600, "red"))),
            Column("Last sync", now(names.LAST_SECONDS), SECONDS),
            Column("Last throughput", now(names.THROUGHPUT), BYTES_PER_S),
            Column("Syncing", now(names.SYNC_RUNNING), words={"0": ("no", "text"), "1": ("yes", "blue")}),
            Column("Paused", now(names.PAUSED), words=YES_NO),
            Column("Torn", now(names.TORN), steps=((None, "green"), (1, "red"))),
            keys=("namespace", "service"),
        )
    )
    dashboard.with_panel(
        number(
            "Registries",
            "1 while a service's registry answers.",
            FACTOR,
            Query(now(names.UP), "{{service}}"),
            words=UP_DOWN,
        )
    )
    dashboard.with_panel(
        number(
            "Workers ready",
            "Part of the registered workers that hold a whole version and may serve.",
            RATIO,
            Query(f"{now(names.READY)} / {workers}", "{{service}}"),
            steps=((None, "red"), (0.5, "orange"), (1, "green")),
        )
    )
    dashboard.with_panel(
        number(
            "Age of the newest version",
            "Since it was committed. What is normal is the length of a training step.",
            SECONDS,
            Query(f"time() - {now(names.NEWEST_VERSION_TIME)}", "{{service}}"),
        )
    )
    dashboard.with_panel(
        number(
            "Nothing has moved for",
            "In the running sync; 0 without one. The watchdog gives it up at 0.8 of stall_timeout_s.",
            SECONDS,
            Query(now(names.SYNC_QUIET_SECONDS), "{{service}}"),
            steps=((None, "green"), (30, "orange"), (60, "red")),
        )
    )
    dashboard.with_panel(
        number(
            "Syncs given up",
            "Within the dashboard's time range, whatever the reason.",
            COUNT,
            Query(increase(names.ABORTS, window="$__range"), "{{service}}"),
            steps=((None, "green"), (0.5, "red")),
        )
    )
    dashboard.with_panel(
        number(
            "Workers evicted",
            "Taken out of a running sync within the dashboard's time range, whatever the reason.",
            COUNT,
            Query(increase(names.EVICTIONS, window="$__range"), "{{service}}"),
            steps=((None, "green"), (0.5, "orange")),
        )
    )

    dashboard.with_row(row("Progress"))
    dashboard.with_panel(
        lines(
            "Newest version",
            "The number of the newest committed version. A flat line is a trainer that does not publish, or cannot.",
            FACTOR,
            Query(now(names.NEWEST_VERSION), "{{service}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Syncs that ended",
            "Committed and aborted attempts between two points of the graph.",
            COUNT,
            Query(increase(names.SYNCS, "outcome"), "{{service}} {{outcome}}"),
            style="bars",
            stack=True,
        )
    )
    dashboard.with_panel(
        lines(
            "Versions behind",
            "Of each service's slowest worker. One is normal between a commit and the worker's next step.",
            COUNT,
            Query(now(names.MAX_LAG), "{{service}}"),
            steps=((None, "transparent"), (3, "red")),
        )
    )
    dashboard.with_panel(
        lines(
            "Time behind",
            "Of each service's slowest worker: how long ago the first version that it lacks was committed.",
            SECONDS,
            Query(now(names.MAX_LAG_SECONDS), "{{service}}"),
            steps=((None, "transparent"), (600, "red")),
        )
    )

    dashboard.with_row(row("Speed"))
    dashboard.with_panel(
        lines(
            "Duration of syncs",
            "From the last rank's publish to the commit: median and 95th percentile within the window, by mode.",
            SECONDS,
            Query(quantile(0.5, names.SYNC_SECONDS), "{{service}} {{mode}} median"),
            Query(quantile(0.95, names.SYNC_SECONDS), "{{service}} {{mode}} 95 %"),
        )
    )
    dashboard.with_panel(
        lines(
            "Throughput",
            "Bytes on the wire over the duration of the newest committed sync.",
            BYTES_PER_S,
            Query(now(names.THROUGHPUT), "{{service}}"),
        )
    )

    dashboard.with_row(row("Members"))
    dashboard.with_panel(
        lines(
            "Members",
            "Registered trainer ranks (producer) and inference workers (consumer).",
            COUNT,
            Query(each(names.MEMBERS), "{{service}} {{kind}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Workers that may serve",
            "Workers that hold a whole version. Workers that write in place are not ready during a sync.",
            COUNT,
            Query(now(names.READY), "{{service}} ready"),
            Query(workers, "{{service}} registered"),
        )
    )
    return dashboard
