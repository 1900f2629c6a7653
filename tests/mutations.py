"""Break the code for each invariant on purpose: the test that is named for it must fail.

Run it: `python tests/mutations.py` (or `make mutations`). Works on a copy; the tree is left alone. A mutation that no
longer applies is an error too: then the list below is out of date. Invariants are those of the sync protocol, I1 to
I11 where they can be broken in one place of pure code; the others have their tests in tests/faults.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    rule: str
    path: str
    old: str
    new: str
    test: str


MUTATIONS = (
    Mutation(
        "I1 every destination byte is written once: two pieces may overlap",
        "protocol/coverage.py",
        "        hit = find_overlap(*_corners(boxes))\n",
        "        hit = None\n",
        "tests/protocol/test_coverage.py",
    ),
    Mutation(
        "I1 one address is off by one element",
        "protocol/transfer.py",
        "np.sum((low - wanted.start[need]) * wanted.strides[need], axis=1)",
        "np.sum((low - wanted.start[need]) * wanted.strides[need], axis=1) + (need == 1)",
        "tests/protocol/test_transfer.py",
    ),
    Mutation(
        "I2 no byte is read twice: the same weight in two places",
        "actors/landings.py",
        "            if twin is not copy:",
        "            if False:",
        "tests/integration/test_sync.py::test_tied_weights_move_once_whichever_side_ties",
    ),
    Mutation(
        "I3 a group is released while a live consumer may read it",
        "protocol/ledger.py",
        "if self._live <= self._freed_by.get(group, set()):",
        "if self._live & self._freed_by.get(group, set()):",
        "tests/protocol/test_ledger_orderings.py",
    ),
    Mutation(
        "I3 a group is released twice",
        "protocol/ledger.py",
        "            self._released.add(group)\n",
        "",
        "tests/protocol/test_ledger_orderings.py",
    ),
    Mutation(
        "I4 a slot is rewritten by a pack of an earlier epoch",
        "actors/producer.py",
        'self._ledger.drain(lambda: self._slots.packs_running == 0, "packs of the epoch before to end")',
        "pass",
        "tests/actors/test_producer.py::test_a_slot_is_never_written_by_a_pack_of_an_earlier_epoch",
    ),
    Mutation(
        "I4 a slot is rewritten while it may be read",
        "actors/serve_slots.py",
        "slot = seq % self._num_slots",
        "slot = 0 * seq",
        "tests/actors/test_producer.py::test_slots_go_round_by_issue_index_not_by_execution_order",
    ),
    Mutation(
        "I5 more than L + 1 groups are resident",
        "actors/export_ring.py",
        "return len(self._slot_of) < len(self.segments)",
        "return len(self._slot_of) <= len(self.segments)",
        "tests/actors/test_export_ring.py::test_slots_come_back_in_whatever_order_groups_are_freed",
    ),
    Mutation(
        "I6 a repeated signal is credited",
        "protocol/ledger.py",
        "                and consumer_id not in freed_by\n",
        "",
        "tests/protocol/test_ledger_orderings.py",
    ),
    Mutation(
        "I7 a version may go back",
        "actors/gathering.py",
        "version <= newest",
        "version < newest - 1",
        "tests/integration/test_bad_input.py",
    ),
    Mutation(
        "I8 a torn consumer is ready",
        "actors/consumer.py",
        "return self._version is not None and not self._torn",
        "return self._version is not None",
        "tests/faults/test_consumers.py::test_an_engine_is_paused_for_an_install_only_and_stays_so_only_while_it_is_torn",
    ),
    Mutation(
        "I8 a torn engine is let run",
        "actors/pause.py",
        "if self._until or not self._paused or not self._may_run():",
        "if self._until or not self._paused:",
        "tests/actors/test_pause.py",
    ),
    Mutation(
        "I1 two copies may write the same memory",
        "actors/destinations.py",
        "    if shared is not None:\n",
        "    if False:\n",
        "tests/actors/test_destinations.py",
    ),
    Mutation(
        "I2 a lost rank's whole group is read again, not only its part",
        "actors/landings.py",
        "                src, dst, nbytes = clip_runs(src, dst, nbytes, wanted.dst_addr, wanted.nbytes)\n",
        "",
        "tests/actors/test_landings.py",
    ),
    Mutation(
        "I3 a worker frees although its digests do not match",
        "actors/digests.py",
        "found[index] != expected[index]",
        "found[index] is None",
        "tests/actors/test_digests.py",
    ),
    Mutation(
        "I10 a pause outlives its lease",
        "actors/pause.py",
        "if until <= now:",
        "if until <= 0:",
        "tests/actors/test_pause.py",
    ),
    Mutation(
        "I10 a member that stands still is never evicted",
        "actors/attribution.py",
        "if now - at > patience_s]",
        "if now - at > 1e9]",
        "tests/faults/test_consumers.py::test_a_worker_that_stands_still_is_evicted_long_before_its_lease_and_fenced",
    ),
    Mutation(
        "I10 of two members that stand still the first is evicted as if the other moved",
        "actors/attribution.py",
        "if others_move else []",
        "if len(stalled) < len(moved_at) else []",
        "tests/actors/test_attribution.py",
    ),
    Mutation(
        "I9 a signal of an old epoch counts",
        "protocol/ledger.py",
        "                epoch == self._epoch\n                and self._state",
        "                self._state",
        "tests/protocol/test_ledger_orderings.py",
    ),
    Mutation(
        "I10 a failed epoch does not reach who waits",
        "protocol/ledger.py",
        "        if self._error is not None:\n            raise self._error\n        if consumer_id is not None",
        "        if consumer_id is not None",
        "tests/protocol/test_ledger.py::test_fail_reaches_every_waiter_with_that_error",
    ),
    Mutation(
        "I11 shared memory keeps its name",
        "actors/shared_memory.py",
        "        Path(self.name.path).unlink(missing_ok=True)\n",
        "        pass\n",
        "tests/actors/test_export_ring.py::test_nothing_stays_in_shared_memory",
    ),
    Mutation(
        "a slice is packed 16 bytes before the place it is looked for",
        "actors/producer.py",
        "layout = tuple((offset, tuple(",
        "layout = tuple((max(0, offset - 16), tuple(",
        "tests/integration/test_transports.py::test_every_layout_arrives_bit_for_bit_version_after_version",
    ),
    Mutation(
        "a run is packed from 16 bytes before its place",
        "actors/packed_runs.py",
        "into[start : start + length] = memory[offset : offset + length]",
        "into[start : start + length] = memory[max(0, offset - 16) :][:length]",
        "tests/integration/test_transports.py::test_runs_land_where_they_are_to_and_nowhere_else",
    ),
    Mutation(
        "a run is lent from 16 bytes before its place",
        "actors/producer_actor.py",
        "lent = [memory[start : start + length]",
        "lent = [memory[max(0, start - 16) :][:length]",
        "tests/integration/test_transports.py::test_runs_land_where_they_are_to_and_nowhere_else",
    ),
    Mutation(
        "replay runs what is no view",
        "protocol/view_arguments.py",
        "if not isinstance(op, str) or op not in allowed:",
        "if not isinstance(op, str):",
        "tests/protocol/test_views.py",
    ),
    Mutation(
        "a worker is lost only to its lease, not to the end of its connection",
        "actors/lifelines.py",
        "            if not beats:\n",
        "            if beats is None:\n",
        "tests/actors/test_lifelines.py",
    ),
)


def _copy(folder: Path) -> None:
    for part in ("protocol", "actors", "service"):
        shutil.copytree(ROOT / part, folder / "weightsync" / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def _fails(folder: Path, test: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=180", test],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{test} could not be run: {done.stdout[-800:]}{done.stderr[-400:]}")
    return done.returncode == 1


def main() -> None:
    console, survivors = Console(highlight=False), 0
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory(prefix="ws") as name:
            folder = Path(name)
            _copy(folder)
            path = folder / "weightsync" / mutation.path
            text = path.read_text()
            if text.count(mutation.old) != 1:
                raise SystemExit(f"{mutation.rule}: {mutation.old!r} stands {text.count(mutation.old)} times in {path}")
            path.write_text(text.replace(mutation.old, mutation.new))
            with console.status(mutation.rule):
                caught = _fails(folder, mutation.test)
        survivors += not caught
        console.print(f"{'[green]caught[/]  ' if caught else '[red]survived[/]'}  {mutation.rule}", soft_wrap=True)
    raise SystemExit(1 if survivors else 0)


if __name__ == "__main__":
    main()
