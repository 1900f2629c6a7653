"""Members and lag: what each worker serves, how far behind it is, and what each trainer rank holds and gives."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from weightsync.dashboards.base import blank
from weightsync.dashboards.panels import (
    BAD_FROM_ONE,
    BYTES,
    BYTES_PER_S,
    COUNT,
    FACTOR,
    SECONDS,
    STATES,
    Column,
    lines,
    row,
    rows,
    states,
)
from weightsync.dashboards.promql import Query, each, increase, now, rate
from weightsync.protocol import metric_names as names


def members() -> Dashboard:
    """One row or line per member."""
    state = f"{each(names.CONSUMER_READY)} + 2 * {each(names.CONSUMER_TORN)}"
    dashboard = blank("members", "Members and lag", "Each worker's version, lag and state; each trainer rank's memory.")
    dashboard.with_row(row("Workers"))
    dashboard.with_panel(
        rows(
            "Workers",
            "One row per worker. A staged version lies whole beside the live one and is applied at the worker's next "
            "sync; -1 is none. Torn: half-written weights, must not serve.",
            Column("State", state, words=STATES),
            Column("Version", each(names.CONSUMER_VERSION)),
            Column("Staged", each(names.CONSUMER_STAGED)),
            Column("Versions behind", each(names.CONSUMER_LAG), steps=((None, "green"), (2, "orange"), (4, "red"))),
            Column("Time behind", each(names.CONSUMER_LAG_SECONDS), SECONDS, steps=((None, "green"), (600, "red"))),
            Column("In place", each(names.CONSUMER_BYTES), BYTES),
            Column("Of", each(names.CONSUMER_TOTAL), BYTES),
            keys=("namespace", "service", "worker"),
            height=10,
        )
    )
    dashboard.with_panel(
        states(
            "State of workers",
            "Ready: holds a whole version and may serve. Workers that write in place are torn while they are written "
            "to; elsewhere torn is what a failed attempt left behind.",
            Query(state, "{{service}} {{worker}}"),
            STATES,
        )
    )

    dashboard.with_row(row("Lag"))
    dashboard.with_panel(
        lines(
            "Versions behind",
            "Committed versions that a worker's requests do not see yet.",
            COUNT,
            Query(each(names.CONSUMER_LAG), "{{service}} {{worker}}"),
            steps=((None, "transparent"), (3, "red")),
        )
    )
    dashboard.with_panel(
        lines(
            "Time behind",
            "How long ago the first version that a worker lacks was committed; 0 if it has the newest.",
            SECONDS,
            Query(each(names.CONSUMER_LAG_SECONDS), "{{service}} {{worker}}"),
            steps=((None, "transparent"), (600, "red")),
        )
    )
    dashboard.with_panel(
        lines(
            "Versions that requests see",
            "Each worker's live version under the newest committed one.",
            FACTOR,
            Query(now(names.NEWEST_VERSION), "{{service}} newest"),
            Query(each(names.CONSUMER_VERSION), "{{service}} {{worker}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Membership",
            "Registered members and the ranks that publish together. Fewer producers than ranks: nothing can be "
            "published.",
            COUNT,
            Query(each(names.MEMBERS), "{{service}} {{kind}}"),
            Query(now(names.WORLD_SIZE), "{{service}} world size"),
        )
    )

    dashboard.with_row(row("Trainer ranks"))
    dashboard.with_panel(
        rows(
            "Trainer ranks",
            "One row per rank: what it holds of the model, what it took for slots, export ring or mirror, what was "
            "pulled out of it since it joined, and free signals that it did not credit.",
            Column("Held", each(names.PRODUCER_HELD), BYTES),
            Column("Extra memory", each(names.PRODUCER_EXTRA), BYTES),
            Column("Served", each(names.PRODUCER_SERVED), BYTES),
            Column("Groups in flight", each(names.PRODUCER_GROUPS)),
            Column("Rejected signals", each(names.PRODUCER_REJECTED), steps=BAD_FROM_ONE),
            keys=("namespace", "service", "rank"),
        )
    )
    dashboard.with_panel(
        lines(
            "Served by rank",
            "Bytes per second that workers pull out of each rank. Ranks that hold the same should share the load.",
            BYTES_PER_S,
            Query(rate(names.PRODUCER_SERVED, "rank"), "{{service}} rank {{rank}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Groups in flight",
            "Groups that were published and not freed. In staged mode at most gather_lookahead + 1.",
            COUNT,
            Query(each(names.PRODUCER_GROUPS), "{{service}} rank {{rank}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Memory of trainer ranks",
            "What weightsync takes on a rank beside the weights.",
            BYTES,
            Query(each(names.PRODUCER_EXTRA), "{{service}} rank {{rank}}"),
        )
    )
    dashboard.with_panel(
        lines(
            "Refused",
            "Registrations of producers and consumers, and plans of workers, that were refused. The event log "
            "(`weightsync watch`) has the reason.",
            COUNT,
            Query(increase(names.REFUSALS, "kind"), "{{service}} {{kind}}"),
            style="bars",
            stack=True,
        )
    )
    return dashboard
