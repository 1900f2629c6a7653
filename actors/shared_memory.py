"""Memory that two processes of one node map: how a producer actor sees what its trainer rank exports.

A segment is a file in /dev/shm that its creator unlinks as soon as the other side has mapped it, so that even
a kill -9 leaves nothing behind. The thing to watch: the mapping lives as long as any tensor over it does.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from weightsync.protocol.errors import SyncError

_FOLDER = Path("/dev/shm")
_PREFIX = "weightsync-"


@dataclass(frozen=True)
class SegmentName:
    """What the other process needs to map a segment."""

    path: str
    nbytes: int


class SharedSegment:
    """A mapped segment; `memory` is a uint8 tensor over all of it."""

    def __init__(self, path: Path, nbytes: int, create: bool) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, nbytes)  # fails here, not with SIGBUS at first touch
            mapped = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            if create:
                path.unlink(missing_ok=True)
            raise SyncError(
                f"cannot map {nbytes} bytes of shared memory ({error.strerror}); enlarge /dev/shm or use a "
                "smaller look-ahead"
            ) from error
        finally:
            os.close(descriptor)
        self.name = SegmentName(str(path), nbytes)
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)

    @classmethod
    def create(cls, label: str, nbytes: int) -> SharedSegment:
        """Make a new segment of `nbytes` (at least 1 is allocated)."""
        path = _FOLDER / f"{_PREFIX}{label}-{secrets.token_hex(4)}"
        return cls(path, max(nbytes, 1), create=True)

    @classmethod
    def attach(cls, name: SegmentName) -> SharedSegment:
        """Map a segment another process made."""
        return cls(Path(name.path), name.nbytes, create=False)

    def unlink(self) -> None:
        """Take the name away; both mappings stay valid. Idempotent."""
        Path(self.name.path).unlink(missing_ok=True)
