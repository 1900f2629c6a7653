"""The cost model adds up what it is given, spans cover exactly what they must, and wrong costs are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.protocol.cost_model import LinkCosts, RunShape, Strategy, choose, predict, spans

COSTS = LinkCosts(bytes_per_s=1e9, descriptor_s=10e-6, control_s=1e-3, pack_bytes_per_s=2e9, pack_run_s=1e-7,
                  scatter_bytes_per_s=4e9, scatter_run_s=2e-7)  # fmt: skip
SHAPE = RunShape(runs=1000, nbytes=2_000_000, spans=10, span_bytes=3_000_000)


@pytest.mark.parametrize(
    ("strategy", "consumers", "expected"),
    [
        (Strategy.DIRECT, 1, 1000 * 10e-6 + 2e-3),
        (Strategy.SPAN, 1, 10 * 10e-6 + 3e-3 + (1000 * 2e-7 + 0.5e-3)),
        (Strategy.PACKED, 1, (1000 * 1e-7 + 1e-3) + 10e-6 + 2e-3 + (1000 * 2e-7 + 0.5e-3)),
        (Strategy.PACKED, 4, 4 * (1000 * 1e-7 + 1e-3) + 10e-6 + 2e-3 + (1000 * 2e-7 + 0.5e-3)),
    ],
)
def test_predictions_add_up(strategy: Strategy, consumers: int, expected: float) -> None:
    assert predict(strategy, SHAPE, COSTS, consumers) == pytest.approx(expected)


@given(st.integers(1, 10**5), st.integers(1, 10**9), st.integers(1, 8))
def test_the_choice_is_never_beaten_by_another_prediction(runs: int, nbytes: int, consumers: int) -> None:
    shape = RunShape(runs, nbytes, max(1, runs // 7), 2 * nbytes)
    best = predict(choose(shape, COSTS, consumers), shape, COSTS, consumers)
    assert best == min(predict(strategy, shape, COSTS, consumers) for strategy in Strategy)


@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 5000)), min_size=1, max_size=30))
def test_spans_cover_the_runs_and_read_no_gap_dearer_than_a_descriptor(runs: list[tuple[int, int]]) -> None:
    src, nbytes = (np.array(column, dtype=np.int64) for column in zip(*runs, strict=True))
    starts, ends = spans(src, nbytes, COSTS)
    covered = {byte for start, end in zip(starts, ends, strict=True) for byte in range(start, end)}
    needed = {byte for start, length in runs for byte in range(start, start + length)}
    assert needed <= covered
    assert {int(starts[0]), int(ends[-1])} == {min(needed), max(needed) + 1}
    worth = COSTS.descriptor_s * COSTS.bytes_per_s
    assert all(gap > worth for gap in starts[1:] - ends[:-1])
    waste = sorted(covered - needed)
    longest = max((len(part) for part in np.split(waste, np.flatnonzero(np.diff(waste) > 1) + 1)), default=0)
    assert longest <= worth


@pytest.mark.parametrize(("values", "named"), [({"speed": 1.0}, "speed"), ({"control_s": 0.0}, "control_s")])
def test_wrong_costs_are_refused_by_name(values: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        COSTS.overridden(values)


def test_costs_set_by_hand_replace_only_themselves() -> None:
    changed = COSTS.overridden({"descriptor_s": 1e-9})
    assert changed.descriptor_s == 1e-9
    assert changed.overridden({"descriptor_s": COSTS.descriptor_s}) == COSTS
