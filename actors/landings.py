"""Where a live pull's bytes come from and land: recorded copies as runs per gather group and trainer rank.

A copy that can land in place does; one that cannot (another dtype, a transpose) is read densely into scratch and
scattered by torch, and the same weight wanted in a second place is copied there from the first. The thing to
watch: what a lost rank was to give is planned again without it, and only for the destination bytes that it was to
give; everything else keeps the source it had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from weightsync.actors.destinations import Destinations
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.lowering import clip_runs
from weightsync.protocol.messages import LayoutSnapshot
from weightsync.protocol.segments import PullPlanner, bounce_copy
from weightsync.protocol.shards import Source, build_sources, merge_shard_tables

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankRuns:
    """Runs out of one rank's memory: absolute addresses on both sides, bytes, in the order of `names`.

    `names` are (tensor, number of its runs), so that whoever finds wrong bytes can say whose they are.
    """

    src_addr: Int64
    dst_addr: Int64
    nbytes: Int64
    names: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Scatter:
    """What was read already (dense scratch, or the same weight elsewhere), and where else it goes."""

    result: Callable[[], torch.Tensor]
    copy: RecordedCopy


@dataclass(frozen=True)
class _Landing:
    """A copy as it is read, and the address its destination offsets count from."""

    copy: RecordedCopy
    base: int


_Part = tuple[str, Int64, Int64, Int64]
"""Runs of one copy from one rank: name, source addresses, destination addresses, bytes."""


class Landings:
    """One worker's copies against one layout.

    Args:
        layout: the complete model.
        copies: distinct copies with canonical source names.
        destinations: where they land.
        consumer_id: consumers take turns among exact replicas of a shard.

    Raises:
        InvalidLayoutError: no rank holds a part that a copy needs.
    """

    def __init__(
        self, layout: LayoutSnapshot, copies: Sequence[RecordedCopy], destinations: Destinations, consumer_id: int
    ) -> None:
        self._layout = layout
        self._consumer_id = consumer_id
        self._planner = PullPlanner()
        self._destinations = destinations
        self._landings: dict[int, list[_Landing]] = defaultdict(list)
        self.scatters: dict[int, list[Scatter]] = defaultdict(list)
        self.scratch: list[torch.Tensor] = []
        self._known: tuple[frozenset[int], tuple[dict[str, Source], list[int]]] | None = None
        self.runs = self._plan(copies)

    def elsewhere(self, group: int, lost: Collection[int], wanted: RankRuns) -> dict[int, RankRuns]:
        """Runs that bring the destination bytes of `wanted` from ranks that are not lost.

        Raises:
            InvalidLayoutError: some of it is held by nobody else.
        """
        sources, ranks = self._sources(lost)
        found: dict[int, list[_Part]] = defaultdict(list)
        for landing in self._landings[group]:
            name = landing.copy.src_name
            if name not in sources:
                if any(name == tensor for tensor, _ in wanted.names):
                    raise InvalidLayoutError(f"{name!r} is held by no other rank")
                continue
            for rank, src, dst, nbytes in self._lower(landing, sources[name], ranks):
                src, dst, nbytes = clip_runs(src, dst, nbytes, wanted.dst_addr, wanted.nbytes)
                if len(nbytes):
                    found[rank].append((name, src, dst, nbytes))
        replaced = {rank: _joined(parts) for rank, parts in sorted(found.items())}
        missing = int(wanted.nbytes.sum() - sum(runs.nbytes.sum() for runs in replaced.values()))
        if missing:
            raise InvalidLayoutError(f"{missing} bytes of group {group} are held by no other rank")
        return replaced

    # -- planning -------------------------------------------------------------------------------------

    def _plan(self, copies: Sequence[RecordedCopy]) -> dict[tuple[int, int], RankRuns]:
        """(group, rank) -> runs."""
        sources, ranks = self._sources(())
        group_of = _group_of_names(self._layout)
        parts: dict[tuple[int, int], list[_Part]] = defaultdict(list)
        first: dict[tuple[object, ...], RecordedCopy] = {}
        for copy in copies:
            group, source = group_of[copy.src_name], sources[copy.src_name]
            twin = first.setdefault((copy.src_name, copy.op_chain, copy.dest_dtype), copy)
            if twin is not copy:  # the same weight in two places (untied here): read once, copied here
                self.scatters[group].append(Scatter(partial(self._destinations.view_of, twin), copy))
                continue
            for rank, src, dst, nbytes in self._land(group, copy, source, ranks):
                parts[group, rank].append((copy.src_name, src, dst, nbytes))
        return {key: _joined(parts[key]) for key in sorted(parts)}

    def _land(
        self, group: int, copy: RecordedCopy, source: Source, ranks: Sequence[int]
    ) -> list[tuple[int, Int64, Int64, Int64]]:
        """Decide how a copy lands, remember it, and lower it; scratch is made where it needs some."""
        landing = _Landing(copy, self._destinations.address_of(copy))
        try:
            runs = self._lower(landing, source, ranks, refuse_small_runs=True)
        except UnsupportedLayoutError:
            dtype = dtype_from_name(source.dtype)
            bounce = bounce_copy(copy, source)
            scratch = torch.zeros(bounce.scratch_elements, dtype=dtype, device=self._destinations.view_of(copy).device)
            self.scratch.append(scratch)
            self.scatters[group].append(Scatter(partial(bounce.view, scratch), copy))
            landing = _Landing(bounce.copy, scratch.data_ptr())
            runs = self._lower(landing, source, ranks, refuse_small_runs=True)
        self._landings[group].append(landing)
        return runs

    def _lower(
        self, landing: _Landing, source: Source, ranks: Sequence[int], *, refuse_small_runs: bool = False
    ) -> list[tuple[int, Int64, Int64, Int64]]:
        """(rank, source addresses, destination addresses, bytes) of one landing."""
        return [
            (ranks[runs.session], runs.src_addr.astype(np.int64), runs.dst_byte + landing.base, runs.nbytes)
            for runs in self._planner.lower(landing.copy, source, refuse_small_runs=refuse_small_runs)
        ]

    def _sources(self, lost: Collection[int]) -> tuple[dict[str, Source], list[int]]:
        """(name -> what ranks that are not lost hold of it, rank per session)."""
        if self._known is not None and self._known[0] == frozenset(lost):  # every group of a lost rank asks
            return self._known[1]
        tables = [list(p.table) for p in self._layout.producers if p.rank not in lost]
        sources, agents, _ = build_sources(merge_shard_tables(tables, self._consumer_id))
        rank_of = {producer.agent_name: producer.rank for producer in self._layout.producers}
        self._known = frozenset(lost), (sources, [rank_of[agent] for agent in agents])
        return self._known[1]


def _joined(parts: Sequence[_Part]) -> RankRuns:
    names, src, dst, nbytes = zip(*parts, strict=True)
    return RankRuns(
        np.concatenate(src),
        np.concatenate(dst),
        np.concatenate(nbytes),
        tuple((name, len(lengths)) for name, lengths in zip(names, nbytes, strict=True)),
    )


def _group_of_names(layout: LayoutSnapshot) -> dict[str, int]:
    names = iter(layout.names)
    return {next(names): group for group, length in enumerate(layout.group_lens) for _ in range(length)}
