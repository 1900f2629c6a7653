"""What a sync costs besides its bytes: fixed time, messages, and whether anything drifts or one slow peer slows all.

Run it: `python tests/benchmarks/bench_control.py [--only fixed simulated drift slow_peer] [--json]`. Nothing is
asserted.

    fixed       a model of a few KB between P trainer ranks and C workers, all of them real processes: seconds of
                `publish` (the slowest rank's), phases of the report, calls received by registry and producers
    simulated   the real registry on one event loop, up to 512 x 512 stub members: calls, CPU seconds, latency
    drift       many versions of a few MB, 2 x 2: seconds and everything the processes hold, over time
    slow_peer   one member gets SIGSTOP for 200 ms in each sync: what the other workers' pulls take

The thing to watch: on a machine with fewer cores than processes the fixed cost is CPU time divided by cores, so
compare figures of one machine only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import psutil
import ray
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
import control_members
from control_members import Fleet, Measured, count_registry_calls
from simulated_fleet import simulate

from weightsync.service import ServiceHandle, Settings, start

SIMULATED = ((8, 8), (64, 64), (128, 128), (256, 256), (512, 512))
TINY_NBYTES = 8192
STOP_S = 0.2
CONSOLE = Console(stderr=True)


def fixed(service: ServiceHandle, shapes: list[tuple[int, int]], syncs: int, period_s: float) -> list[dict[str, Any]]:
    """A row per shape."""
    rows = []
    for ranks, workers in track(shapes, "tiny syncs", console=CONSOLE):
        fleet = Fleet(service, ranks, workers, TINY_NBYTES)
        fleet.sync(5, period_s)  # warms connections up
        fleet.counted()
        measured, cpu = with_cpu(partial(fleet.sync, syncs, period_s), syncs)
        registry, producers = fleet.counted()
        fleet.close()
        low, middle, high = quantiles([one.seconds for one in measured], n=4)
        rows.append(
            {
                "ranks": ranks,
                "workers": workers,
                "syncs": syncs,
                "seconds_p25": low,
                "seconds_median": middle,
                "seconds_p75": high,
                "cpu_seconds": cpu,
                "phases": {phase: median(one.phases[phase] for one in measured) for phase in measured[0].phases},
                "registry_calls": per_sync(registry, syncs),
                "producer_calls": per_sync(producers, syncs),
            }
        )
    return rows


class CpuClock:
    """CPU seconds of this process and everything below it, by role; other people's load does not show in it."""

    def __init__(self) -> None:
        self._at, self._used = time.monotonic(), self._read()

    def since(self) -> tuple[float, dict[str, float]]:
        """(seconds, role -> CPU seconds) since this clock was made."""
        spent: Counter[str] = Counter()
        for (role, pid), used in self._read().items():
            spent[role] += used - self._used.get((role, pid), 0.0)
        return time.monotonic() - self._at, dict(spent)

    def _read(self) -> dict[tuple[str, int], float]:
        used = {}
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used[_role(process), process.pid] = times.user + times.system
        return used


def _role(process: psutil.Process) -> str:
    """Of a process of ours or of Ray's; an actor's process names its class, and the method that runs."""
    if process.pid == os.getpid():
        return "driver"
    title = (process.cmdline() or [process.name()])[0]
    return title.removeprefix("ray::").split(".")[0].split(":")[0] if title.startswith("ray::") else process.name()


def with_cpu(work: Callable[[], list[Measured]], syncs: int) -> tuple[list[Measured], dict[str, float]]:
    """Its result, and role -> CPU seconds of a sync, beyond what the same processes take while nothing happens."""
    idle_clock = CpuClock()
    time.sleep(2)
    idle_s, idle = idle_clock.since()
    clock = CpuClock()
    result = work()
    seconds, spent = clock.since()
    return result, {role: (used - idle.get(role, 0.0) / idle_s * seconds) / syncs for role, used in spent.items()}


def per_sync(calls: Counter[str], syncs: int) -> dict[str, float]:
    return {method: round(count / syncs, 2) for method, count in calls.most_common() if method != "counted"}


def drift(service: ServiceHandle, versions: int, nbytes: int, period_s: float) -> dict[str, Any]:
    """Seconds of each version, and after every tenth of them what all processes hold."""
    fleet = Fleet(service, 2, 2, nbytes)
    fleet.sync(5, period_s)
    bucket = max(1, versions // 10)
    seconds: list[float] = []
    held = [usage()]
    for _ in track(range(versions // bucket), f"{versions} versions", console=CONSOLE):
        seconds += [one.seconds for one in fleet.sync(bucket, period_s)]
        held.append(usage())
    fleet.close()
    at = np.arange(len(held)) * bucket
    fifth = max(1, len(seconds) // 5)
    return {
        "versions": len(seconds),
        "nbytes": nbytes,
        "seconds_first_fifth": median(seconds[:fifth]),
        "seconds_last_fifth": median(seconds[-fifth:]),
        "seconds_slope_per_100": 100 * slope(np.arange(len(seconds)), seconds),
        "curve": [
            {"versions": int(n), "seconds": median(seconds[max(0, n - bucket) : n] or seconds[:bucket]), **use}
            for n, use in zip(at, held, strict=True)
        ],
        "slopes_per_100": {what: 100 * slope(at, [use[what] for use in held]) for what in held[0]},
    }


def slope(x: Any, y: list[float]) -> float:
    """Theil-Sen: the median of the slopes between all pairs, so that one late page fault is no trend."""
    x, values = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    left, right = np.triu_indices(len(x), k=1)
    return float(np.median((values[right] - values[left]) / (x[right] - x[left])))


def usage() -> dict[str, float]:
    """What this process and everything below it hold together."""
    total = Counter(processes=0, rss_mb=0.0, threads=0, fds=0)
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            with process.oneshot():
                total.update(
                    processes=1,
                    rss_mb=(process.memory_info().rss - process.memory_info().shared) / 1e6,
                    threads=process.num_threads(),
                    fds=process.num_fds(),
                )
        except psutil.NoSuchProcess:
            continue
    shared = sum(entry.stat().st_size for entry in os.scandir("/dev/shm") if entry.name.startswith("weightsync"))
    return {**total, "shm_mb": shared / 1e6}


def slow_peer(service: ServiceHandle, rounds: int, nbytes: int) -> list[dict[str, Any]]:
    """A row per kind of member: seconds of the other workers' pulls, with it stopped in each sync and without."""
    fleet = Fleet(service, 2, 3, nbytes)
    period_s, syncs = 1.0, 3
    fleet.sync(5, period_s)
    trainer, producer = ray.get(fleet.ranks[0].pids.remote())
    who = {"worker w0": ray.get(fleet.workers[0].pid.remote()), "trainer rank 0": trainer, "producer 0": producer}
    taken: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in who}
    for _ in track(range(rounds), "stopping a peer", console=CONSOLE):
        for (name, pid), stops in product(who.items(), (True, False)):
            measured = fleet.sync(syncs, period_s, pid if stops else None, STOP_S)
            others = [s for one in measured for worker, s in one.pulls.items() if worker != "w0"]
            taken[name][stops].append(median(others))
    fleet.close()
    return [
        {
            "stopped for 200 ms": name,
            "others' pulls, ms": 1e3 * median(times[True]),
            "with nobody stopped, ms": 1e3 * median(times[False]),
            "ratio, median of paired rounds": median(s / n for s, n in zip(times[True], times[False], strict=True)),
        }
        for name, times in taken.items()
    ]


def tables(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows by title, for reading."""
    found: dict[str, list[dict[str, Any]]] = {}
    if "fixed" in result:
        found["Fixed cost of a sync of 8 KB, real processes"] = [_fixed_row(row) for row in result["fixed"]]
        found["CPU ms of such a sync, by process"] = [
            {"ranks x workers": _shape(row), **_ms(row["cpu_seconds"])} for row in result["fixed"]
        ]
        for who in ("registry", "producer"):
            found[f"Calls of such a sync, {who}"] = [
                {"ranks x workers": _shape(row), **row[f"{who}_calls"]} for row in result["fixed"]
            ]
    if "simulated" in result:
        found["Registry with stub members"] = [
            {
                "ranks x workers": _shape(row),
                "workers ask": "registry only" if row["one_sided"] else "producers too",
                "registry messages": row["registry_messages"],
                "messages to producers": sum(n for name, n in row["messages"].items() if name.startswith("producer.")),
                "latency, all at once, ms": 1e3 * row["seconds_median"],
                "CPU ms, all at once": 1e3 * row["cpu_seconds"],
                "CPU ms, spread over 1 s": 1e3 * row["cpu_seconds_apart"],
                "CPU s of all joins": row["join_cpu_seconds"],
            }
            for row in result["simulated"]
        ]
    if "drift" in result:
        drifted = result["drift"]
        title = f"{drifted['versions']} versions of {drifted['nbytes'] / 1e6:g} MB, 2 x 2"
        slopes = {"seconds": drifted["seconds_slope_per_100"], **drifted["slopes_per_100"]}
        found[title] = [*drifted["curve"], {"versions": "slope per 100", **slopes}]
    if "slow_peer" in result:
        found["One slow peer, 2 ranks to 3 workers of 64 MB"] = result["slow_peer"]
    return found


def _fixed_row(row: dict[str, Any]) -> dict[str, Any]:
    calls = sum(row["registry_calls"].values()) + sum(row["producer_calls"].values())
    return {
        "ranks x workers": _shape(row),
        "median ms": 1e3 * row["seconds_median"],
        "p25": 1e3 * row["seconds_p25"],
        "p75": 1e3 * row["seconds_p75"],
        **_ms({phase: row["phases"][phase] for phase in ("begin", "pull", "free", "commit")}),
        "calls": calls,
        "CPU ms": 1e3 * sum(row["cpu_seconds"].values()),
    }


def _shape(row: dict[str, Any]) -> str:
    return f"{row['ranks']} x {row['workers']}"


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: 1e3 * taken for name, taken in seconds.items()}


def show(result: dict[str, Any]) -> None:
    console = Console()
    for title, rows in tables(result).items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = Table(*columns, title=title)
        for row in rows:
            cells = [row.get(column, "") for column in columns]
            table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
        console.print(table)


def main() -> None:
    parts = ("fixed", "simulated", "drift", "slow_peer")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--shapes", nargs="+", default=["1x1", "2x2", "4x4", "8x8"], help="P x C of `fixed`")
    parser.add_argument("--syncs", type=int, default=40)
    parser.add_argument("--period", type=float, default=0.15, help="seconds between two versions")
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--drift-mb", type=float, default=4.0)
    parser.add_argument("--json", action="store_true", help="what was measured, and `tables` of it")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if "simulated" in options.only:
        shapes = track(SIMULATED, "the registry alone", console=CONSOLE)
        result["simulated"] = [simulate(shape, one_sided, 5) for shape in shapes for one_sided in (True, False)]
    if {"fixed", "drift", "slow_peer"} & set(options.only):
        count_registry_calls()
        with start("bench-control", address="local", settings=Settings(http_port=0)) as service:
            ray.cloudpickle.register_pickle_by_value(control_members)
            if "fixed" in options.only:
                pairs = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
                result["fixed"] = fixed(service, pairs, options.syncs, options.period)
            if "drift" in options.only:
                result["drift"] = drift(service, options.versions, int(1e6 * options.drift_mb), options.period)
            if "slow_peer" in options.only:
                result["slow_peer"] = slow_peer(service, 5, 64_000_000)
    if options.json:
        print(json.dumps({**result, "tables": tables(result)}))
    else:
        show(result)


if __name__ == "__main__":
    main()
