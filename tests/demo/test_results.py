"""A demo run is good only if every check of every version is; a bad one says which."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from weightsync.protocol.status import SyncReport
from weightsync.service.demo.results import DemoResult, VersionResult

WORKERS = ["tp0", "tp1"]
TOLERANCE = 0.05


def version_result(*, report: dict[str, Any] | None = None, **changes: Any) -> VersionResult:
    sync = {
        "service": "demo",
        "version": 3,
        "epoch": 3,
        "mode": "live",
        "transport": "nixl",
        "bytes": 100,
        "needed_bytes": 100,
        "seconds": 0.5,
        "phases": {"pull": 0.5},
        "gbytes_per_second": 2e-7,
        "installed": WORKERS,
        "evicted": [],
        "workers": {},
    }
    fields: dict[str, Any] = {
        "version": 3,
        "loss": 1.0,
        "train_seconds": 1.0,
        "unchanged_parameters": [],
        "problems": [],
        "logits_distance": 0.01,
    }
    return VersionResult(**{**fields, **changes}, report=SyncReport(**{**sync, **(report or {})}))


def test_a_version_that_passed_everything_has_no_failures() -> None:
    assert version_result().failures(TOLERANCE, WORKERS) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"problems": ["worker tp1: model.norm.weight: 1 of 64 elements differ"]}, "tp1: model.norm.weight"),
        (
            {"unchanged_parameters": ["rank 0 model.layers.0.mlp.up_proj.weight"]},
            "rank 0 model.layers.0.mlp.up_proj",
        ),
        ({"logits_distance": 0.4}, "0.4000 from the trainer's"),
        ({"logits_distance": float("nan")}, "nan from the trainer's"),
        ({"report": {"bytes": 101}}, "101 bytes on the wire, 100 needed"),
        ({"report": {"installed": ["tp0"], "evicted": ["tp1"]}}, "installed on ['tp0']"),
    ],
)
def test_each_failed_check_is_named_with_its_version(changes: dict[str, Any], words: str) -> None:
    (failure,) = version_result(**changes).failures(TOLERANCE, WORKERS)
    assert words in failure
    assert failure.startswith("version 3: ")


def demo_result(versions: list[VersionResult]) -> DemoResult:
    return DemoResult(
        size="tiny",
        parameters=1,
        mode="live",
        install="shadow",
        transport="nixl",
        trainer_ranks=2,
        tensor_parallel=2,
        versions=versions,
        logits_tolerance=TOLERANCE,
        failures=[failure for version in versions for failure in version.failures(TOLERANCE, WORKERS)],
        seconds=1.0,
    )


def test_one_failed_version_fails_the_run_and_so_do_none_at_all() -> None:
    good, bad = version_result(), version_result(logits_distance=1.0)
    assert demo_result([good, good]).ok
    assert not demo_result([good, bad]).ok
    assert not demo_result([]).ok


def test_the_json_of_a_run_reads_back_as_the_same_run() -> None:
    result = demo_result([version_result()])
    assert DemoResult.model_validate_json(result.model_dump_json()) == result
