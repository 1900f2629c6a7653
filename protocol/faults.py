"""Why a worker left a sync, or a sync was given up: a closed set of codes beside the text for people.

Codes are what metrics are labelled with and alerts select, so their number is bounded and their names stay.
"""

from __future__ import annotations

from enum import StrEnum


class Fault(StrEnum):
    """A reason. The first group ends a worker's part in a sync, the second the sync, `operator` either."""

    DIED = "died"
    """The worker's process ended."""
    LEASE = "lease"
    """The worker gave no sign of life for the lease."""
    LEFT = "left"
    """The worker closed its subscriber."""
    REPLACED = "replaced"
    """Another process registered the worker's name."""
    STALLED = "stalled"
    """Nothing moved for the patience: a worker that holds others up, or the whole sync."""
    PULL_FAILED = "pull_failed"
    """The worker's own reads failed."""
    PLAN_FAILED = "plan_failed"
    """The worker cannot pull this layout."""

    RANK_LOST = "rank_lost"
    """A trainer rank died or left, and nobody else holds what it held."""
    RANK_FAILED = "rank_failed"
    """A trainer rank raised while it published."""
    VERIFICATION = "verification"
    """Bytes did not have the digest they had at their source, twice."""
    NOBODY_LEFT = "nobody_left"
    """The last worker of the sync was evicted."""
    SHUTDOWN = "shutdown"
    """The service was stopped."""

    OPERATOR = "operator"
    """Somebody asked for it."""
