"""What watching costs: pages of a service with 500 members, and counting a sync beside the sync itself.

python tests/benchmarks/bench_service.py [--members 500] [--rounds 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import httpx
import ray
from rich.console import Console
from rich.table import Table

from weightsync.actors.chronicle import Chronicle
from weightsync.actors.epochs import Epoch
from weightsync.actors.logs import event_logger
from weightsync.protocol.messages import EpochState, LayoutSnapshot, MemberHistory, PlanFacts, PublishMode, PullStats
from weightsync.service import ServiceHandle, Settings, start

PATHS = ("/metrics", "/metrics/registry", "/v1/status", "/v1/members", "/sd", "/")
PHASES = {"pull": 0.01, "scatter": 0.001, "verify": 0.0, "free": 0.001}
_AWAY_S = 3600.0
"""Members here have no process that keeps a lease."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = Settings(http_port=0, max_consumers=options.members, lease_s=_AWAY_S)
    with start("bench-service", address="local", settings=settings) as service:
        join(service, options.members)
        pages = read_pages(service, options.rounds)
    counting = [count_syncs(workers) for workers in (4, 64, 512)]
    tables = {f"Reading a service of {options.members} workers": pages, "Counting one sync": counting}
    if options.json:
        print(json.dumps({"tables": tables}))
        return
    for title, rows in tables.items():
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
        Console().print(table)


def join(service: ServiceHandle, members: int) -> None:
    """Workers that say what real ones say when they join and plan, and then nothing."""
    registry: Any = service.registry
    names = [f"vllm-{index // 8}-rank-{index % 8}" for index in range(members)]
    grants = ray.get(
        [registry.register_consumer.remote(name, "shadow", "n" * 56, 1, MemberHistory(3)) for name in names]
    )
    facts = PlanFacts(10**9, False, {0: 10**9}, 0.1, 0.1)
    ray.get([registry.planned.remote(grant.consumer_id, grant.token, 1, facts) for grant in grants])


def read_pages(service: ServiceHandle, rounds: int) -> list[dict[str, Any]]:
    """A row per page: median and slowest milliseconds, size, and series where it has any."""
    rows = []
    with httpx.Client(base_url=str(service.status().http_url), timeout=60.0) as client:
        for path in PATHS:
            seconds, text = [], ""
            for _ in range(rounds):
                started = time.perf_counter()
                response = client.get(path)
                seconds.append(time.perf_counter() - started)
                response.raise_for_status()
                text = response.text
            series = sum(line.startswith("weightsync_") for line in text.splitlines())
            rows.append(
                {
                    "page": path,
                    "median ms": 1e3 * median(seconds),
                    "slowest ms": 1e3 * max(seconds),
                    "kB": len(text) / 1e3,
                    "series": series,
                }
            )
    return rows


def count_syncs(workers: int, rounds: int = 50) -> dict[str, Any]:
    """Milliseconds that the registry spends on counters, history and log lines of one sync."""
    chronicle = Chronicle("bench", lambda: None, event_logger("bench", "error", "text"))
    seconds = []
    for version in range(1, rounds + 1):
        epoch = finished(version, workers)
        report = epoch.report("bench")
        started = time.perf_counter()
        chronicle.opened(epoch)
        chronicle.committed(epoch, report)
        seconds.append(time.perf_counter() - started)
    return {"workers": workers, "median ms": 1e3 * median(seconds), "slowest ms": 1e3 * max(seconds)}


def finished(version: int, workers: int) -> Epoch:
    layout = LayoutSnapshot(1, PublishMode.LIVE, "nixl", (), (), (), (), (), workers)
    epoch = Epoch(version, version, layout, {index: f"w{index}" for index in range(workers)})
    stats = PullStats(10**6, 10**6, 0.012, PHASES, strategies={"direct": 10**6}, predicted_s=0.01)
    epoch.pulled = dict.fromkeys(range(workers), stats)
    epoch.close(EpochState.COMMITTED)
    return epoch


if __name__ == "__main__":
    main()
