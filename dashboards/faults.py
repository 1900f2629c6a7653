"""What went wrong: who was evicted and why, what was given up and why, and what the service did about it."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from weightsync.dashboards.base import blank
from weightsync.dashboards.panels import (
    COUNT,
    FACTOR,
    RATIO,
    SECONDS,
    Steps,
    bars,
    lines,
    number,
    row,
)
from weightsync.dashboards.promql import WINDOW, Query, increase, now
from weightsync.protocol import metric_names as names

SOME: Steps = ((None, "green"), (0.5, "orange"))
"""From a single event on; increases are extrapolated and may be a little less than whole."""
ANY: Steps = ((None, "green"), (0.5, "red"))
WORKERS = 'kind="consumer"'
ABORTED = 'outcome="aborted"'


def faults() -> Dashboard:
    """Reasons are codes: docs/operations.md says what each asks for."""
    ended = increase(names.SYNCS, window=WINDOW)
    dashboard = blank("faults", "Faults", "Evictions and aborts by reason, stalls, torn workers, verification.")
    dashboard.with_row(row("In the time range"))
    for title, description, metric, steps in (
        ("Syncs given up", "Whatever the reason.", names.ABORTS, ANY),
        ("Workers evicted", "Taken out of a running sync, whatever the reason.", names.EVICTIONS, SOME),
        ("Stalls", "Watchdogs that fired, for a worker or a whole sync.", names.STALLS, SOME),
        ("Ranks lost", "Died in a sync that their replicas finished.", names.LOST_RANKS, SOME),
        ("Verification failures", "Syncs given up because bytes were wrong twice.", names.VERIFICATION_FAILURES, ANY),
        ("Rejected signals", "Free signals of another epoch or a foreign consumer.", names.REJECTED, SOME),
    ):
        query = Query(increase(metric, window="$__range"), "{{service}}")
        dashboard.with_panel(number(title, description, COUNT, query, steps=steps))
    dashboard.with_panel(
        bars(
            "Evictions by reason",
            "Within the dashboard's time range. left, replaced and operator are somebody's decision.",
            COUNT,
            Query(increase(names.EVICTIONS, "reason", window="$__range"), "{{service}} {{reason}}"),
            steps=SOME,
        )
    )
    dashboard.with_panel(
        bars(
            "Aborts by reason",
            "Within the dashboard's time range. operator and shutdown are somebody's decision.",
            COUNT,
            Query(increase(names.ABORTS, "reason", window="$__range"), "{{service}} {{reason}}"),
            steps=ANY,
        )
    )

    dashboard.with_row(row("When"))
    dashboard.with_panel(
        lines(
            "Evictions",
            "Workers taken out of a sync, by reason. The survivors finish.",
            COUNT,
            Query(increase(names.EVICTIONS, "reason"), "{{service}} {{reason}}"),
            style="bars",
            stack=True,
        )
    )
    dashboard.with_panel(
        lines(
            "Aborts",
            "Syncs given up, by reason. Workers keep the version they had.",
            COUNT,
            Query(increase(names.ABORTS, "reason"), "{{service}} {{reason}}"),
            style="bars",
            stack=True,
        )
    )
    dashboard.with_panel(
        lines(
            "Part of syncs given up",
            "Of all that ended within the chosen window.",
            RATIO,
            Query(f"{increase(names.SYNCS, window=WINDOW, matchers=ABORTED)} / ({ended} > 0)", "{{service}}"),
            top=1,
        )
    )
    dashboard.with_panel(
        lines(
            "Stalls",
            "Watchdogs that fired: for a worker that held others up, or for a whole sync.",
            COUNT,
            Query(increase(names.STALLS, "who"), "{{service}} {{who}}"),
            style="bars",
            stack=True,
        )
    )
    dashboard.with_panel(
        lines(
            "Nothing has moved for",
            "In the running sync. The watchdog ends it at 0.8 of stall_timeout_s, which is 240 s by default.",
            SECONDS,
            Query(now(names.SYNC_QUIET_SECONDS), "{{service}}"),
            steps=((None, "transparent"), (60, "red")),
        )
    )
    dashboard.with_panel(
        lines(
            "Torn and not ready",
            "Workers whose live weights are half-written, and registered workers that may not serve.",
            COUNT,
            Query(now(names.TORN), "{{service}} torn"),
            Query(f"{now(names.MEMBERS, matchers=WORKERS)} - {now(names.READY)}", "{{service}} not ready"),
        )
    )

    dashboard.with_row(row("Checks and fences"))
    dashboard.with_panel(
        lines(
            "Verification",
            "Regions read twice because the first bytes were wrong, and syncs given up because the second were too.",
            COUNT,
            Query(increase(names.REPEATED), "{{service}} read twice"),
            Query(increase(names.VERIFICATION_FAILURES), "{{service}} given up"),
            style="bars",
        )
    )
    dashboard.with_panel(
        lines(
            "Signals not credited, by rank",
            "Free signals of another epoch or a foreign consumer: a straggler of a sync that is over. Harmless alone.",
            COUNT,
            Query(increase(names.PRODUCER_REJECTED, "rank"), "{{service}} rank {{rank}}"),
            style="bars",
            stack=True,
        )
    )
    dashboard.with_panel(
        lines(
            "Refused",
            "Registrations of producers and consumers, and plans of workers, that were refused.",
            COUNT,
            Query(increase(names.REFUSALS, "kind"), "{{service}} {{kind}}"),
            style="bars",
            stack=True,
        )
    )
    dashboard.with_panel(
        lines(
            "Up and paused",
            "Whether the registry answers, and whether an operator holds publishing.",
            FACTOR,
            Query(now(names.UP), "{{service}} up"),
            Query(now(names.PAUSED), "{{service}} paused"),
            top=1,
        )
    )
    return dashboard
