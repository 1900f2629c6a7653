"""Holder policies: which of the ranks that hold a region shall serve it.

A policy sees all requests of a plan at once, because reads that join and loads that balance are properties of
the whole plan. Names: `lowest`, `highest`, `rotate`, `adjacency` (the holder whose read continues another
read of the same target on both sides), `balance` (fewest elements served so far), `locality` (same node
first), and combinations such as `adjacency+balance`: the first objective decides, the next breaks its ties,
the lowest rank breaks the rest. The thing to watch: every choice is validated by
`choose_holders`, never trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from weightsync.protocol.errors import InvalidHolderPolicyError


@dataclass(frozen=True, slots=True)
class HolderRequest:
    """One region that one target rank needs, and who could serve it. Everything in elements.

    `offers[rank]` is (source offset, source strides) of the region in that rank's shard.
    """

    target_rank: int
    shape: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]
    candidates: tuple[int, ...]
    offers: Mapping[int, tuple[int, tuple[int, ...]]] = field(repr=False)

    @property
    def numel(self) -> int:
        """Elements of the region."""
        return prod(self.shape)


HolderCallable = Callable[[HolderRequest], int]


class HolderPolicy(Protocol):
    """Chooses a source rank for every request, in order."""

    def choose(self, requests: Sequence[HolderRequest]) -> list[int]: ...


class PlanState:
    """What has been chosen so far: elements served by each source, and where chosen reads begin and end."""

    def __init__(self) -> None:
        self.load: Counter[int] = Counter()
        self._starts: set[tuple[object, ...]] = set()
        self._ends: set[tuple[object, ...]] = set()
        self._targets: set[int] = set()

    def add(self, request: HolderRequest, rank: int, *, edges: bool) -> None:
        """Record that `rank` serves `request`; `edges` only where adjacency asks for them."""
        self.load[rank] += request.numel
        if edges:
            self._targets.add(request.target_rank)
            for axis in range(len(request.shape)):
                start, end = _edges(request, rank, axis)
                self._starts.add(start)
                self._ends.add(end)

    def joins(self, request: HolderRequest, rank: int) -> int:
        """How many chosen reads this one would continue if `rank` served it."""
        count = 0
        if request.target_rank not in self._targets:
            return 0
        for axis in range(len(request.shape)):
            start, end = _edges(request, rank, axis)
            count += (start in self._ends) + (end in self._starts)
        return count


def _edges(request: HolderRequest, rank: int, axis: int) -> tuple[tuple[object, ...], tuple[object, ...]]:
    offset, strides = request.offers[rank]
    shape = request.shape
    fixed = (
        rank,
        request.target_rank,
        axis,
        shape[:axis] + shape[axis + 1 :],
        strides,
        request.target_strides,
    )
    end = offset + shape[axis] * strides[axis]
    target_end = request.target_offset + shape[axis] * request.target_strides[axis]
    return (*fixed, offset, request.target_offset), (*fixed, end, target_end)


Objective = Callable[[HolderRequest, int, PlanState], int]


def lowest(request: HolderRequest, rank: int, state: PlanState) -> int:
    """Prefer the lowest rank."""
    return rank


def highest(request: HolderRequest, rank: int, state: PlanState) -> int:
    """Prefer the highest rank."""
    return -rank


def rotate(request: HolderRequest, rank: int, state: PlanState) -> int:
    """Prefer the candidate number `target_rank`, counted round and round."""
    return 0 if rank == request.candidates[request.target_rank % len(request.candidates)] else 1


def adjacency(request: HolderRequest, rank: int, state: PlanState) -> int:
    """Prefer the holder whose read continues reads already chosen."""
    return -state.joins(request, rank)


def balance(request: HolderRequest, rank: int, state: PlanState) -> int:
    """Prefer the holder that serves the fewest elements so far."""
    return state.load[rank]


@dataclass(frozen=True)
class Locality:
    """Prefer a holder on the target's node; `source_nodes[rank]` and `target_nodes[rank]` name the nodes."""

    source_nodes: Sequence[str]
    target_nodes: Sequence[str]

    def __call__(self, request: HolderRequest, rank: int, state: PlanState) -> int:
        if rank >= len(self.source_nodes) or request.target_rank >= len(self.target_nodes):
            raise InvalidHolderPolicyError(
                f"locality knows {len(self.source_nodes)} source and {len(self.target_nodes)} target nodes, "
                f"asked for source rank {rank} and target rank {request.target_rank}"
            )
        return 0 if self.source_nodes[rank] == self.target_nodes[request.target_rank] else 1


OBJECTIVES: dict[str, Objective] = {
    "lowest": lowest,
    "highest": highest,
    "rotate": rotate,
    "adjacency": adjacency,
    "balance": balance,
}


@dataclass(frozen=True)
class ObjectivePolicy:
    """Minimises `objectives` in order; ties go to the lowest rank."""

    objectives: tuple[Objective, ...]

    def choose(self, requests: Sequence[HolderRequest]) -> list[int]:
        """One rank a request. Forced choices first, then those an adjacent read decides, then large ones."""
        chosen: dict[int, int] = {}
        edges = adjacency in self.objectives
        if self.objectives[0] in (lowest, highest):  # candidates are in rank order
            end = 0 if self.objectives[0] is lowest else -1
            return [r.candidates[end] for r in requests]
        if not edges and balance not in self.objectives:
            state = PlanState()
            return [self._best(r, state) for r in requests]
        state = PlanState()
        for i, request in enumerate(requests):
            if len(request.candidates) == 1:
                chosen[i] = request.candidates[0]
                state.add(request, chosen[i], edges=edges)
        pending = [i for i in range(len(requests)) if i not in chosen]
        if edges and self.objectives[0] is adjacency:
            pending = self._settle_joined(requests, pending, chosen, state)
        for i in sorted(pending, key=lambda i: -requests[i].numel):
            chosen[i] = self._best(requests[i], state)
            state.add(requests[i], chosen[i], edges=edges)
        return [chosen[i] for i in range(len(requests))]

    def _settle_joined(
        self, requests: Sequence[HolderRequest], pending: list[int], chosen: dict[int, int], state: PlanState
    ) -> list[int]:
        # Forwards and backwards once each: a chain of neighbours settles from its fixed end in one pass.
        for ordered in (pending, list(reversed(pending))):
            for i in ordered:
                if i in chosen:
                    continue
                if len({state.joins(requests[i], rank) for rank in requests[i].candidates}) > 1:
                    chosen[i] = self._best(requests[i], state)
                    state.add(requests[i], chosen[i], edges=True)
        return [i for i in pending if i not in chosen]

    def _best(self, request: HolderRequest, state: PlanState) -> int:
        if len(request.candidates) == 1:
            return request.candidates[0]
        return min(request.candidates, key=lambda rank: (*(f(request, rank, state) for f in self.objectives), rank))


@dataclass(frozen=True)
class CallablePolicy:
    """A caller's own `(request) -> rank`, asked wherever there is a choice."""

    function: HolderCallable

    def choose(self, requests: Sequence[HolderRequest]) -> list[int]:
        """One rank a request."""
        return [r.candidates[0] if len(r.candidates) == 1 else self.function(r) for r in requests]


def resolve_policy(policy: str | HolderPolicy | HolderCallable, *, locality: Locality | None = None) -> HolderPolicy:
    """The policy object for a name (`adjacency+balance`), a policy object, or a callable `(request) -> rank`.

    Raises InvalidHolderPolicyError for an unknown name, or `locality` without nodes.
    """
    if isinstance(policy, str):
        objectives: list[Objective] = []
        for name in policy.split("+"):
            if name == "locality":
                if locality is None:
                    raise InvalidHolderPolicyError(
                        f"holder policy {policy!r} needs the nodes: resolve_policy({policy!r}, "
                        "locality=Locality(source_nodes, target_nodes))"
                    )
                objectives.append(locality)
            elif name in OBJECTIVES:
                objectives.append(OBJECTIVES[name])
            else:
                raise InvalidHolderPolicyError(
                    f"holder policy {policy!r}: {name!r} is not one of {[*OBJECTIVES, 'locality']}"
                )
        return ObjectivePolicy(tuple(objectives))
    if hasattr(policy, "choose"):
        return policy
    if callable(policy):
        return CallablePolicy(policy)
    raise InvalidHolderPolicyError(f"holder policy {policy!r} is neither a name, a policy nor a callable")


def choose_holders(policy: HolderPolicy, requests: Sequence[HolderRequest]) -> list[int]:
    """The policy's choices, validated: one per request, each among its candidates."""
    choices = policy.choose(requests)
    if len(choices) != len(requests):
        raise InvalidHolderPolicyError(f"policy gave {len(choices)} choices for {len(requests)} requests")
    for request, rank in zip(requests, choices, strict=True):
        if rank not in request.candidates:
            raise InvalidHolderPolicyError(
                f"policy chose rank {rank!r} for a region of shape {request.shape} at element "
                f"{request.target_offset} of target rank {request.target_rank}; "
                f"holders are {request.candidates}"
            )
    return choices
