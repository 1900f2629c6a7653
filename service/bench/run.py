"""A bench, start to finish.

    1. refuse, before anything is started, what does not fit into memory or is no layout
    2. per case: members take the layout; in each round every way takes one turn, begun one further each round
    3. a turn: open; one move that warms up; then moves of new versions, each checked bit for bit; close
    4. medians per round, and from those everything else

A way that fails or delivers wrong bytes is out for the rest of its case and the bench does not succeed; the others
go on. The thing to watch: only `Way.move` is timed, and new values and checks lie between moves.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median

import ray

from weightsync.protocol.errors import WeightsyncError
from weightsync.service.bench.cases import Case
from weightsync.service.bench.facts import machine_facts, package_versions
from weightsync.service.bench.kept import Kept
from weightsync.service.bench.layout import Layout
from weightsync.service.bench.memory import available_memory, available_shared_memory, held_memory
from weightsync.service.bench.quantities import format_size
from weightsync.service.bench.results import BenchResult, CaseResult, LayoutFacts, Row, Skipped
from weightsync.service.bench.stage import Cast, Stage
from weightsync.service.bench.statistics import rotated
from weightsync.service.bench.ways import Way, all_ways
from weightsync.service.interrupts import Interrupts

_SHARE = 0.85
"""Of the memory that is free, at most so much is taken."""
_PROCESS_BYTES = 250_000_000
"""A member's or an actor's process with torch and Ray loaded."""

Progress = Callable[[str, int], None]
"""Told what is done now, and how many turns are over since the last call."""


class WrongBytesError(WeightsyncError):
    """A way did not deliver the version it was to move."""


def run_bench(
    cases: Sequence[Case],
    *,
    ways: Mapping[str, Way] | None = None,
    interrupts: Interrupts | None = None,
    command: str | None = None,
    progress: Progress = lambda text, turns: None,
    kept: Kept | None = None,
) -> BenchResult:
    """Measure; starts Ray if this process is not connected to one, and leaves nothing behind.

    Args:
        ways: by key; None takes `all_ways()`.
        interrupts: what Ctrl-C and SIGTERM do, and note.
        command: the command line, for the record.
        kept: cases that need not be measured again, and where new ones are noted.
    """
    known = all_ways() if ways is None else ways
    kept = kept or Kept()
    started, begun = datetime.now(UTC), time.monotonic()
    machine, packages = machine_facts(), package_versions()
    planned, refused = [], []
    for case in cases:
        try:
            planned.append((case, admitted(case)))
        except ValueError as problem:
            refused.append(f"{case.title}: {problem}")
            progress(f"skipped: {refused[-1]}", case.rounds * len(case.ways))
    results: list[CaseResult] = []
    if planned:
        progress("starting Ray and a service ...", 0)
        interrupts = interrupts or Interrupts()
        with Stage(interrupts) as stage, interrupts.raised():  # again: Ray has put a handler of its own in place
            for case, layout in planned:
                found = kept.find(case)
                if found is not None:
                    progress(f"{case.title}: measured before", case.rounds * len(case.ways))
                results.append(found or kept.add(_Measurement(stage, case, layout, known, progress).run()))
    return BenchResult(
        command=command or shlex.join(["weightsync", *sys.argv[1:]]),
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - begun,
        machine=machine,
        packages=packages,
        cases=results,
        refused=refused,
    )


def admitted(case: Case) -> Layout:
    """The layout of a case that can be measured here.

    Raises:
        ValueError: there is no such layout, or its tensors alone do not fit into memory.
    """
    layout = case.layout()
    problem = _too_large(_base_nbytes(layout), 0)
    if problem:
        raise ValueError(problem)
    return layout


def _base_nbytes(layout: Layout) -> int:
    """Trainers' and workers' own tensors and processes."""
    members = layout.producers + layout.consumers
    return layout.nbytes + layout.wanted_nbytes + members * _PROCESS_BYTES


def _too_large(memory: int, shared_memory: int) -> str | None:
    """Why so many bytes cannot be taken, in one line; None if they can."""
    free, free_shared = int(available_memory() * _SHARE), int(available_shared_memory() * _SHARE)
    if memory + shared_memory > free:
        return f"needs {(memory + shared_memory) / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB may be taken here"
    if shared_memory > free_shared:
        return f"needs {format_size(shared_memory)} in /dev/shm, {format_size(free_shared)} may be taken there"
    return None


class _Measurement:
    """One case."""

    def __init__(self, stage: Stage, case: Case, layout: Layout, known: Mapping[str, Way], progress: Progress) -> None:
        self._stage, self._case, self._layout, self._progress = stage, case, layout, progress
        self._ways = {key: known[key] for key in case.ways}
        self._seconds: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self._extra: dict[str, int] = {}
        self._skipped: list[Skipped] = []
        self._failures: list[str] = []

    def run(self) -> CaseResult:
        case, layout = self._case, self._layout
        self._skip_what_cannot_run()
        for round_number in range(case.rounds):
            for key in rotated(list(self._ways), round_number):
                self._progress(f"{case.title}: round {round_number + 1}/{case.rounds}, {key}", 0)
                self._turn(self._ways[key], round_number)
                self._progress(f"{case.title}: round {round_number + 1}/{case.rounds}, {key}", 1)
        order = list(case.ways)
        rows = [
            Row(label=label, way=key, seconds=seconds, extra_bytes=self._extra.get(key))
            for (key, label), seconds in sorted(self._seconds.items(), key=lambda item: order.index(item[0][0]))
        ]
        return CaseResult(
            case=case,
            layout=LayoutFacts(
                model_nbytes=layout.nbytes,
                moved_nbytes=layout.wanted_nbytes,
                tensors=len(layout.tensors),
                runs=layout.runs,
                contiguous=layout.contiguous,
            ),
            rows=rows,
            skipped=self._skipped,
            failures=self._failures,
        )

    def _skip_what_cannot_run(self) -> None:
        base = _base_nbytes(self._layout)
        for key, way in list(self._ways.items()):
            needs = way.needs(self._layout)
            reason = way.refusal(self._layout) or _too_large(base + needs.memory, needs.shared_memory)
            if reason:
                self._skipped.append(Skipped(way=key, reason=reason))
                self._leave_out(key, self._case.rounds)

    def _leave_out(self, key: str, turns: int) -> None:
        del self._ways[key]
        self._progress(f"{self._case.title}: {key} is left out", turns)

    def _turn(self, way: Way, round_number: int) -> None:
        try:
            cast = self._stage.own_cast(self._layout) if way.own_members else self._stage.cast(self._layout)
            with cast as members:
                measured = self._measure(way, members)
        except (WeightsyncError, ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
            self._failures.append(f"{way.key}, round {round_number + 1}: {_first_line(error)}")
            self._leave_out(way.key, self._case.rounds - round_number - 1)
            if not isinstance(error, WrongBytesError):
                self._stage.replace_members()
            return
        for label in measured[0]:
            self._seconds[way.key, label][round_number] = median(move[label] for move in measured)

    def _measure(self, way: Way, cast: Cast) -> list[dict[str, float]]:
        """Seconds by label of each move that counts."""
        before = held_memory()
        way.open(cast)
        try:
            self._move(way, cast)
            measured = [self._move(way, cast) for _ in range(self._case.repeats)]
            self._extra[way.key] = max(self._extra.get(way.key, 0), held_memory() - before)
        except Exception:
            with contextlib.suppress(Exception):
                way.close(cast)
            raise
        way.close(cast)  # not after Ctrl-C: members may be busy, and end anyway
        return measured

    def _move(self, way: Way, cast: Cast) -> dict[str, float]:
        version = self._stage.next_version()
        way.set_version(cast, version)
        taken = way.move(cast, version)
        wrong = way.wrong(cast, version)
        if wrong:
            raise WrongBytesError(f"{way.key} did not deliver version {version}: {'; '.join(wrong)}")
        return taken


def _first_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0] if text else 'no message'}"
