"""Where trainer ranks meet before a version: all of them, with one version, or nobody goes on.

Pure state of the registry. The thing to watch: an error set here reaches every rank that waits, so it is set once
and the meeting is given up with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weightsync.actors.epochs import Epoch
from weightsync.protocol.errors import VersionError, WeightsyncError


@dataclass
class Gathering:
    """Ranks that have called publish for a version, until all are there.

    `opening` while one of them opens the epoch for all, `opened` when it is.
    """

    version: int
    ranks: set[int] = field(default_factory=set)
    opened: Epoch | None = None
    error: WeightsyncError | None = None
    opening: bool = False

    def join(self, rank: int, version: int) -> None:
        """Raises VersionError, here and in every rank that waits, if this rank publishes another version."""
        if version != self.version:
            self.error = VersionError(
                f"ranks disagree about the version: ranks {sorted(self.ranks)} publish {self.version}, "
                f"rank {rank} publishes {version}"
            )
            raise self.error
        self.ranks.add(rank)

    @property
    def decided(self) -> bool:
        """Nobody has to wait any more."""
        return self.error is not None or self.opened is not None


def check_version(rank: int, version: int, newest: int | None) -> None:
    """Raises VersionError unless `version` is a number above the newest one."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise VersionError(f"rank {rank}: a version is a non-negative integer, got {version!r}")
    if newest is not None and version <= newest:
        raise VersionError(
            f"rank {rank}: version {version} is not above {newest}, the newest one; versions strictly increase"
        )
