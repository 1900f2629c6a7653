"""Digests of regions: computed where the bytes come from, checked where they landed, before anything is flipped.

A region is what one recorded copy takes from one rank. Both sides hash its bytes in destination order, so a region
that was read again from another rank in other pieces has the same digest. xxh3 (64 bits) finds accidents, not
forgeries: whoever may publish may publish anything. The thing to watch: host memory only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from weightsync.protocol.errors import SyncError

Verify = Literal["off", "sampled", "full"]

SAMPLED_SHARE = 8
"""With `sampled`, one region in this many is checked per version, another one each time."""


class DigestMismatchError(SyncError):
    """Bytes arrived that are not the ones published, twice; the message names tensor, rank and version."""


@dataclass(frozen=True)
class Regions:
    """Runs of several regions one after the other: absolute addresses, bytes, and the runs of each region."""

    addr: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    counts: tuple[int, ...]


def digests(regions: Sequence[Regions], chosen: Sequence[Sequence[int]]) -> list[list[int]]:
    """Digests of the chosen regions of each; -1 stands for a region that was not chosen.

    The memory must be mapped into this process.
    """
    return [_digests(one, frozenset(wanted)) for one, wanted in zip(regions, chosen, strict=True)]


def _digests(regions: Regions, wanted: frozenset[int]) -> list[int]:
    found, at = [], 0
    for index, count in enumerate(regions.counts):
        found.append(_digest(regions, at, at + count) if index in wanted else -1)
        at += count
    return found


def _digest(regions: Regions, first: int, last: int) -> int:
    digest = xxhash.xxh3_64()
    for addr, nbytes in zip(regions.addr[first:last].tolist(), regions.nbytes[first:last].tolist(), strict=True):
        digest.update(memoryview((ctypes.c_char * nbytes).from_address(addr)))
    return digest.intdigest()


def differing(regions: Regions, expected: Sequence[int]) -> list[int]:
    """Indices of the regions whose digest is not the expected one; those that expect -1 are not looked at."""
    wanted = [index for index, digest in enumerate(expected) if digest >= 0]
    found = _digests(regions, frozenset(wanted))
    return [index for index in wanted if found[index] != expected[index]]


def mismatch(names: Sequence[str], rank: int, version: int) -> DigestMismatchError:
    """The error for wrong bytes of these tensors."""
    more = f" and {len(names) - 1} more regions" if len(names) > 1 else ""
    return DigestMismatchError(
        f"{names[0]!r}{more} as read from rank {rank} is not what it published as version {version}, also when read "
        "again: memory that was written during the sync, or damaged on the way; nothing of it was installed"
    )


def chosen_regions(count: int, epoch: int, verify: Verify) -> range:
    """Which of `count` regions are checked in this epoch; every one within `SAMPLED_SHARE` epochs."""
    if verify == "off":
        return range(0)
    return range(count) if verify == "full" else range(epoch % SAMPLED_SHARE, count, SAMPLED_SHARE)


class ShardDigests:
    """Digests of what consumers want to check, out of one rank's own memory.

    Args:
        memory: (address, bytes from its first to its last) of everything the rank published.
        base: address that the consumers' addresses count from; 0 if they are absolute.
    """

    def __init__(self, memory: Sequence[tuple[int, int]], base: int = 0) -> None:
        held = _joined(sorted((start, start + nbytes) for start, nbytes in memory if nbytes))
        self._starts = np.array([start for start, _ in held], dtype=np.int64)
        self._ends = np.array([end for _, end in held], dtype=np.int64)
        self._base = base
        self._wanted: dict[int, tuple[Regions, ...]] = {}

    def expect(self, wanted: dict[int, tuple[Regions, ...]]) -> None:
        """Take what each consumer will want to check.

        Raises:
            SyncError: memory that this rank has not published.
        """
        self._wanted = {}
        for consumer_id, regions in wanted.items():
            placed = tuple(Regions(one.addr + self._base, one.nbytes, one.counts) for one in regions)
            if not all(self._holds(one) for one in placed):
                raise SyncError(f"consumer {consumer_id} asks for digests of memory that this rank has not published")
            self._wanted[consumer_id] = placed

    def compute(self, live: Collection[int], epoch: int, verify: Verify) -> dict[int, list[list[int]]]:
        """Per live consumer the digests of what it checks in this epoch."""
        return {
            consumer_id: digests(regions, [chosen_regions(len(one.counts), epoch, verify) for one in regions])
            for consumer_id, regions in self._wanted.items()
            if consumer_id in live
        }

    def _holds(self, regions: Regions) -> bool:
        if not len(regions.addr):
            return True
        at = np.searchsorted(self._starts, regions.addr, side="right") - 1
        return bool((at >= 0).all() and (regions.addr + regions.nbytes <= self._ends[at]).all())


def _joined(stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending stretches of memory, those that overlap or touch made one.

    Shards of one fused tensor lie between each other, and a run may go on from one into the next.
    """
    out: list[tuple[int, int]] = []
    for start, end in stretches:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out
