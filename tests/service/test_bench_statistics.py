"""Medians, quartiles, ratios within rounds, and sizes as people write them."""

from __future__ import annotations

import pytest

from weightsync.service.bench.cases import Case
from weightsync.service.bench.quantities import format_size, parse_bytes, parse_counts
from weightsync.service.bench.results import REFERENCE, CaseResult, LayoutFacts, Row
from weightsync.service.bench.statistics import paired_ratio, rotated, spread


def test_quartiles_are_those_of_the_textbook() -> None:
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.p25, found.median, found.p75) == (2.0, 3.0, 4.0)
    assert spread([7.0]).median == 7.0
    with pytest.raises(ValueError, match="empty"):
        spread([])


def test_a_ratio_is_taken_within_each_round_before_the_median_is() -> None:
    """A machine that slows down threefold in one round changes no ratio; the ratio of medians would move."""
    ours, theirs = {0: 1.0, 1: 3.0, 2: 1.0}, {0: 2.0, 1: 6.0, 3: 9.0}
    found = paired_ratio(theirs, ours)
    assert found is not None
    assert (found.p25, found.median, found.p75) == (2.0, 2.0, 2.0)
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None


def test_every_way_begins_a_round_once() -> None:
    orders = [rotated(["a", "b", "c"], turn) for turn in range(3)]
    assert [order[0] for order in orders] == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert rotated([], 5) == []


def test_shares_and_speeds_of_a_case() -> None:
    case = CaseResult(
        case=Case(nbytes=16_000_000, ways=("bare", "files"), rounds=2),
        layout=LayoutFacts(model_nbytes=16_000_000, moved_nbytes=8_000_000, tensors=1, runs=1, contiguous=True),
        rows=[
            Row(label=REFERENCE, way="bare", seconds={0: 0.004, 1: 0.008}),
            Row(label="files", way="files", seconds={0: 0.008, 1: 0.016}),
        ],
        skipped=[],
        failures=[],
    )
    files = case.rows[1]
    share, slower = case.share_of_reference(files), case.slower_than(files, REFERENCE)
    assert share is not None
    assert slower is not None
    assert (share.median, slower.median) == (0.5, 2.0)
    assert case.gbytes_per_second(files).median == pytest.approx(0.75)
    assert case.slower_than(files, "nothing") is None


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("16MB", 16_000_000), ("64KiB", 65536), ("4gb", 4_000_000_000), ("512", 512), ("1.5 MB", 1_500_000)],
)
def test_sizes_are_read_with_their_units(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MB", "16XB", "-3MB", "1 2MB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 16MB"):
        parse_bytes(text)


def test_counts_stay_within_their_bounds() -> None:
    assert parse_counts("1,2, 8", 1, 8, "--consumers") == [1, 2, 8]
    for wrong in ("0", "9", "two", "", "1,-2"):
        with pytest.raises(ValueError, match="--consumers: whole numbers from 1 to 8"):
            parse_counts(wrong, 1, 8, "--consumers")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(65536, "64 KiB"), (8 << 20, "8 MiB"), (1_000_000_000, "1 GB"), (512, "512 B")]
)
def test_sizes_are_written_round_where_they_are(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
