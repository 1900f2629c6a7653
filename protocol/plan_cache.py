"""Plan once, place many times: identical layers share one plan, re-based to their own ranks and addresses.

A model has thousands of parameters and a handful of layouts. The cache keys on the two layouts and the
policy; what differs between two parameters, the ranks that play source 0..n-1 and the addresses of
the shards, is applied when runs are placed. The thing to watch: a callable policy is keyed by identity,
and must not depend on the parameter it is asked for. Nothing is ever evicted: drop the cache with
the membership it was made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.protocol.boxes import Ints
from weightsync.protocol.coverage import PlanBudget
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.holders import HolderCallable, HolderPolicy
from weightsync.protocol.lowering import SegmentRuns, lower_segments
from weightsync.protocol.maps import AffineMap
from weightsync.protocol.transfer import TransferPlan, plan_transfer


@dataclass(frozen=True)
class PlacedRuns:
    """Runs between two members: absolute source addresses, target bytes relative to the parameter."""

    source_rank: int
    target_rank: int
    src_addr: npt.NDArray[np.uint64]
    dst_byte: Ints
    nbytes: Ints


class PlanCache:
    """Plans and their runs, one for each distinct pair of layouts."""

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], TransferPlan] = {}
        self._runs: dict[tuple[int, int], list[SegmentRuns]] = {}
        # By identity first: hashing a layout of thousands of pieces for every parameter would be the cost.
        # Maps and policy are kept alive here, so that an id is never reused while it is a key.
        self._by_id: dict[tuple[object, ...], tuple[TransferPlan, tuple[object, ...]]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def plan(
        self,
        target: AffineMap,
        source: AffineMap,
        *,
        holder_policy: str | HolderPolicy | HolderCallable = "lowest",
        budget: PlanBudget | None = None,
        partial: bool = False,
    ) -> TransferPlan:
        """`plan_transfer`, or the plan made for equal layouts and options before."""
        policy_key = holder_policy if isinstance(holder_policy, str) else id(holder_policy)
        quick = (id(target), id(source), policy_key, budget, partial)
        known = self._by_id.get(quick)
        if known is not None:
            return known[0]
        key = (target, source, holder_policy, budget, partial)
        plan = self._plans.get(key)
        if plan is None:
            plan = plan_transfer(target, source, holder_policy=holder_policy, budget=budget, partial=partial)
            self._plans[key] = plan
        self._by_id[quick] = (plan, key)
        return plan

    def runs(self, plan: TransferPlan, itemsize: int) -> list[SegmentRuns]:
        """The runs of a plan of this cache at `itemsize` bytes an element, lowered once."""
        key = (id(plan), itemsize)
        if key not in self._runs:
            self._runs[key] = lower_segments(plan.segments, itemsize)
        return self._runs[key]

    def place(
        self,
        plan: TransferPlan,
        itemsize: int,
        source_addrs: Mapping[int, int],
        *,
        dst_byte: int = 0,
    ) -> list[PlacedRuns]:
        """The plan's runs at real addresses.

        Args:
            source_addrs: byte address of the parameter's shard on each source rank.
            dst_byte: added to every target byte, for a shard inside a fused parameter.

        Raises InvalidLayoutError for a source rank without an address.
        """
        out: list[PlacedRuns] = []
        for runs in self.runs(plan, itemsize):
            rank = runs.source_rank
            if rank not in source_addrs:
                raise InvalidLayoutError(
                    f"no address of the shard on source rank {rank}; known ranks are {sorted(source_addrs)}"
                )
            addr = runs.source_byte.astype(np.uint64) + np.uint64(source_addrs[rank])
            out.append(PlacedRuns(rank, runs.target_rank, addr, runs.target_byte + dst_byte, runs.nbytes))
        return out
