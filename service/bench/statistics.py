"""Medians with their spread, and ratios taken within a round before any median is.

On a machine that others use too, rounds differ more than ways do. Ways of one round saw about the same machine, so
their ratio says more than the ratio of two medians.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict


class Spread(BaseModel):
    """The middle of a sample and where its middle half lies."""

    model_config = ConfigDict(frozen=True)

    median: float
    p25: float
    p75: float


def spread(sample: Sequence[float]) -> Spread:
    """Quartiles, interpolated linearly.

    Raises:
        ValueError: an empty sample.
    """
    if not sample:
        raise ValueError("an empty sample has no median")
    p25, median, p75 = np.percentile(sample, (25, 50, 75))
    return Spread(median=float(median), p25=float(p25), p75=float(p75))


def paired_ratio(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> Spread | None:
    """Spread of the ratios within each round that both have; None if there is no such round.

    Args:
        numerator, denominator: round -> value.
    """
    ratios = [numerator[r] / denominator[r] for r in sorted(numerator.keys() & denominator.keys()) if denominator[r]]
    return spread(ratios) if ratios else None


def rotated(items: Sequence[str], turn: int) -> list[str]:
    """The same order, begun one later each turn, so that no item always follows the same idle or busy moment."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]
