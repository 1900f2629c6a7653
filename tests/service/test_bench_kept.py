"""A bench that was interrupted goes on with what is missing, and with nothing that is wrong or old."""

from __future__ import annotations

import os
from pathlib import Path

from weightsync.service.bench.cases import Case
from weightsync.service.bench.kept import KEPT_FOR_S, Kept
from weightsync.service.bench.results import CaseResult, LayoutFacts, Row


def result(case: Case, failures: tuple[str, ...] = ()) -> CaseResult:
    facts = LayoutFacts(model_nbytes=1, moved_nbytes=1, tensors=1, runs=1, contiguous=True)
    return CaseResult(
        case=case,
        layout=facts,
        rows=[Row(label="x", way="bare", seconds={0: 0.5})],
        skipped=[],
        failures=list(failures),
    )


def test_what_was_measured_is_found_again_by_its_case_alone(tmp_path: Path) -> None:
    path = tmp_path / "build" / "bench.jsonl"
    one, two = Case(nbytes=1000, ways=("bare",), rounds=1), Case(nbytes=2000, ways=("bare",), rounds=1)
    first = Kept(path)
    assert first.add(result(one)) == result(one)
    again = Kept(path)
    assert again.find(one) == result(one)
    assert again.find(two) is None
    assert again.find(one.model_copy(update={"rounds": one.rounds + 1})) is None
    again.forget()
    assert Kept(path).find(one) is None


def test_failed_cut_off_and_old_results_are_measured_again(tmp_path: Path) -> None:
    path, case = tmp_path / "bench.jsonl", Case(nbytes=1000, ways=("bare",), rounds=1)
    Kept(path).add(result(case, ("wrong bytes",)))
    assert Kept(path).find(case) is None
    path.write_text(result(case).model_dump_json()[:-5])
    assert Kept(path).find(case) is None
    path.write_text(result(case).model_dump_json() + "\n")
    assert Kept(path).find(case) is not None
    old = os.stat(path).st_mtime - KEPT_FOR_S - 1
    os.utime(path, (old, old))
    assert Kept(path).find(case) is None


def test_without_a_file_nothing_is_kept() -> None:
    case = Case(nbytes=1000, ways=("bare",), rounds=1)
    kept = Kept()
    kept.add(result(case))
    kept.forget()
    assert kept.find(case) is None
