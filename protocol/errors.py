"""Every error the protocol raises, split by what a caller may do about it.

Planning errors are `ValueError`s raised before a byte moves; sync errors are `RuntimeError`s about one
attempt. The thing to watch: an `InvalidLayoutError` means inputs contradict themselves or each other, so a
caller must never fall back to gathering; only an `UnsupportedLayoutError` allows that.

Each error takes one message, so that it survives pickling between processes unchanged.
"""

from __future__ import annotations


class WeightsyncError(Exception):
    """Base of every error this package raises on purpose."""


# -- planning: nothing has moved yet ------------------------------------------------------------------


class PlanError(WeightsyncError, ValueError):
    """A plan cannot be made from these inputs."""


class InvalidLayoutError(PlanError):
    """Inputs contradict themselves or each other (shapes, dtypes, holes, overlaps). Never fall back."""


class UnsupportedLayoutError(PlanError):
    """A legitimate layout that the planner cannot express. The caller may gather instead."""


class InvalidHolderPolicyError(PlanError):
    """A holder policy is unknown, or chose a rank that does not hold the region."""


class PlanBudgetError(PlanError):
    """Planning would exceed a budget the caller gave. Raised before the work the budget bounds."""


class UnsupportedViewError(WeightsyncError, NotImplementedError):
    """A loader did something to a weight that is not a pure view (needs data, broadcasts, ...)."""


# -- membership and input: refused before anything is touched -----------------------------------------


class RegistrationError(WeightsyncError, ValueError):
    """A member's description of itself is refused: wrong rank, shape, dtype, name or token."""


class MembershipLostError(RegistrationError):
    """The registry does not know this member (any more): its lease expired, or the registry restarted. Join again."""


class UnknownMemberError(WeightsyncError, LookupError):
    """An operator names a worker or a rank that is no member."""


class VersionError(WeightsyncError, ValueError):
    """A version does not increase, or ranks disagree about it."""


class TransportUnavailableError(WeightsyncError, RuntimeError):
    """The configured transport cannot run here; the message says what to install or set."""


# -- one sync attempt ---------------------------------------------------------------------------------


class SyncError(WeightsyncError, RuntimeError):
    """An attempt to sync a version failed."""


class StallError(SyncError, TimeoutError):
    """Nothing moved for the stall timeout, or a wait ran out; the message says who waits for whom."""


class StaleEpochError(SyncError, ValueError):
    """A message belongs to another epoch or to a consumer that is not live in this one."""


class WrongProducerError(SyncError):
    """A pull asks a producer for a name it never serves."""


class NothingRunningError(SyncError):
    """An operator names a sync, or a worker of one, that is not running."""


class SyncAborted(SyncError):
    """The attempt was given up for everyone; consumers keep the version they had."""
