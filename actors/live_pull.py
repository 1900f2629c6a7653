"""Live mode: runs read one-sidedly out of trainer memory, straight to where the parameter wants them.

Planned once per layout (`Landings`), one prepared read for each gather group and producer. A version then only
posts those. If a rank is lost while others hold what it held, its reads are replaced by reads from them and the
sync goes on; so are, once, reads whose bytes have the wrong digest. The thing to watch: a free signal follows the
last read of the group it frees, never precedes it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import ray
import torch

from weightsync.actors.attempt import Attempt
from weightsync.actors.destinations import Destinations
from weightsync.actors.digests import Regions, Verify, differing, mismatch
from weightsync.actors.landings import Landings, RankRuns
from weightsync.actors.transport import Peer, PreparedRead, ReadFailedError, Transport
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import InvalidLayoutError, SyncError
from weightsync.protocol.messages import LayoutSnapshot, PullStats

log = logging.getLogger("weightsync.consumer")


@dataclass(frozen=True)
class _Read:
    """What one rank gives of one group."""

    runs: RankRuns
    prepared: PreparedRead

    @property
    def rank(self) -> int:
        return self.prepared.peer.rank


class LivePull:
    """A prepared live pull of one worker.

    Args:
        layout: the complete model.
        copies: distinct copies with canonical source names.
        destinations: where they land.
        transport: this worker's transport, connected to `peers`.
        peers: per rank, where its memory is.
        consumer_id: consumers take turns among exact replicas of a shard.
        verify: which digests are checked after the reads.
    """

    def __init__(
        self,
        layout: LayoutSnapshot,
        copies: Sequence[RecordedCopy],
        destinations: Destinations,
        transport: Transport,
        peers: Sequence[Peer],
        consumer_id: int,
        verify: Verify = "off",
    ) -> None:
        self._layout = layout
        self._verify = verify
        self._destinations = destinations
        self._transport = transport
        self._peers = peers
        self._lost: set[int] = set()
        """Ranks this worker could not read from; until the layout changes it does not try again."""
        self._landings = Landings(layout, copies, destinations, consumer_id)
        transport.register(self._landings.scratch)
        self._reads: dict[int, list[_Read]] = defaultdict(list)
        for (group, rank), runs in self._landings.runs.items():
            self._reads[group].append(self._prepare(rank, runs))
        if verify != "off":
            self._expect_digests(consumer_id)
        self.bytes_total = sum(read.prepared.nbytes for reads in self._reads.values() for read in reads)
        self.bytes_needed = needed_bytes(copies, layout)

    def run(self, attempt: Attempt) -> PullStats:
        """Pull one version. Returns when every byte is in place and every owner has its free signals."""
        phases = {"pull": 0.0, "scatter": 0.0, "verify": 0.0, "free": 0.0}
        for group in sorted(self._reads.keys() | self._landings.scatters.keys()):
            attempt.waiting(f"reads of group {group}")
            with timed(phases, "pull"):
                self._read_group(group, attempt)
            with timed(phases, "scatter"):
                self._scatter(group)
        if self._verify != "off":
            with timed(phases, "verify"):
                self._check_digests(attempt)
        attempt.waiting("free signals to arrive")
        with timed(phases, "free"):
            self._free_all(attempt)
        return attempt.stats(self.bytes_needed, phases)

    def close(self) -> None:
        """Give the prepared reads back."""
        self._transport.release(read.prepared for reads in self._reads.values() for read in reads)
        self._reads.clear()

    # -- reading --------------------------------------------------------------------------------------

    def _read_group(self, group: int, attempt: Attempt) -> None:
        """Every byte of a group; what a lost rank was to give comes from whoever else holds it."""
        pending = self._reads.get(group, [])
        failure: ReadFailedError | None = None
        while pending:
            try:
                pending = [found for read in pending for found in self._reachable(group, read)]
            except InvalidLayoutError as hole:
                self._lost.clear()  # they may answer next time
                raise SyncError(f"{failure or 'a rank was lost'}; {hole}") from failure
            try:
                self._transport.read([read.prepared for read in pending], attempt.context, attempt.moved)
                return
            except ReadFailedError as error:
                failure, failed = error, {id(read) for read in error.failed}
            pending = [read for read in pending if id(read.prepared) in failed]
            for rank in sorted({read.rank for read in pending}):
                attempt.rank_failed(rank)
                self._lost.add(rank)

    def _reachable(self, group: int, read: _Read) -> list[_Read]:
        """The read itself, or, if its rank is lost, those that take its place from now on."""
        if read.rank not in self._lost:
            return [read]
        found = self._landings.elsewhere(group, self._lost, read.runs)
        replacements = [self._prepare(rank, runs) for rank, runs in found.items()]
        self._reads[group] = [kept for kept in self._reads[group] if kept is not read] + replacements
        self._transport.release([read.prepared])
        return replacements

    def _prepare(self, rank: int, runs: RankRuns) -> _Read:
        src, dst = runs.src_addr.astype(np.uint64), runs.dst_addr.astype(np.uint64)
        return _Read(runs, self._transport.prepare(self._peers[rank], src, dst, runs.nbytes))

    # -- digests --------------------------------------------------------------------------------------

    def _groups_of(self, rank: int) -> list[int]:
        return [group for group, holder in self._landings.runs if holder == rank]

    def _expect_digests(self, consumer_id: int) -> None:
        """Tell every producer which of its bytes will be checked, region by region."""
        told = []
        for rank in sorted({rank for _, rank in self._landings.runs}):
            wanted = [self._landings.runs[group, rank] for group in self._groups_of(rank)]
            regions = tuple(Regions(runs.src_addr, runs.nbytes, _counts(runs)) for runs in wanted)
            told.append(self._peers[rank].actor.expect_digests.remote(consumer_id, regions))
        ray.get(told)

    def _check_digests(self, attempt: Attempt) -> None:
        """Every region that is due in this epoch.

        Raises:
            DigestMismatchError: the bytes of a region are wrong, and were again when it was read once more.
        """
        context = attempt.context
        for rank in sorted({rank for _, rank in self._landings.runs}):
            attempt.waiting(f"digests of rank {rank}")
            reply = self._peers[rank].actor.digests.remote(context.consumer_id, context.epoch)
            try:
                expected = ray.get(reply)
            except ray.exceptions.RayActorError as error:
                _check_gone(rank, error, attempt)
                log.warning("epoch %d: what rank %d gave before it died is not verified", context.epoch, rank)
                continue
            for group, own in zip(self._groups_of(rank), expected, strict=True):
                self._check_group(group, rank, own, attempt)

    def _check_group(self, group: int, rank: int, expected: Sequence[int], attempt: Attempt) -> None:
        runs = self._landings.runs[group, rank]
        landed = Regions(runs.dst_addr, runs.nbytes, _counts(runs))
        attempt.regions_verified += sum(digest >= 0 for digest in expected)
        wrong = differing(landed, expected)
        if not wrong:
            return
        attempt.regions_repeated += len(wrong)
        self._read_again(group, rank, attempt)
        wrong = differing(landed, expected)
        if wrong:
            raise mismatch([runs.names[index][0] for index in wrong], rank, attempt.version)

    def _read_again(self, group: int, rank: int, attempt: Attempt) -> None:
        """A rank's part of a group once more, from other holders if there are any."""
        runs = self._landings.runs[group, rank]
        try:
            found = self._landings.elsewhere(group, {*self._lost, rank}, runs)
        except InvalidLayoutError:
            found = {rank: runs}
        reads = [self._prepare(holder, part).prepared for holder, part in found.items()]
        try:
            self._transport.read(reads, attempt.context, attempt.moved)
        finally:
            self._transport.release(reads)
        self._scatter(group)

    # -- after the reads ------------------------------------------------------------------------------

    @torch.no_grad()
    def _scatter(self, group: int) -> None:
        for scatter in self._landings.scatters.get(group, ()):
            self._destinations.view_of(scatter.copy).copy_(scatter.result())

    def _free_all(self, attempt: Attempt) -> None:
        """One message per producer: live groups stay in the trainer anyway, so there is nothing to hurry."""
        context = attempt.context
        signals = {
            peer.rank: peer.actor.free_groups.remote(
                self._layout.rank_groups[peer.rank], context.consumer_id, context.epoch
            )
            for peer in self._peers
        }
        for rank, signal in signals.items():
            try:
                ray.get(signal)
            except ray.exceptions.RayActorError as error:
                _check_gone(rank, error, attempt)


def _check_gone(rank: int, error: ray.exceptions.RayActorError, attempt: Attempt) -> None:
    """Its producer does not answer: that is nothing to wait for if the epoch goes on without the rank.

    Raises:
        SyncError: it does not, or the rank is a member still.
    """
    if not attempt.rank_failed(rank):
        raise SyncError(f"rank {rank}'s producer does not answer ({error})") from error


def _counts(runs: RankRuns) -> tuple[int, ...]:
    return tuple(count for _, count in runs.names)


def needed_bytes(copies: Sequence[RecordedCopy], layout: LayoutSnapshot) -> int:
    """Bytes of the model that these copies take, a slice that feeds several places counted once."""
    dtype_of = {meta.name: dtype_from_name(meta.dtype) for meta in layout.manifest}
    distinct = {(copy.src_name, copy.op_chain): copy for copy in copies}
    return sum(copy.numel * dtype_of[copy.src_name].itemsize for copy in distinct.values())


class timed:
    """Adds the seconds of a block to one phase."""

    def __init__(self, phases: dict[str, float], phase: str) -> None:
        self._phases, self._phase = phases, phase

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._phases[self._phase] += time.monotonic() - self._started
