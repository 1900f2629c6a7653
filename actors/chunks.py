"""What a live pull is cut into: chunks of runs of one gather group and trainer rank, each with its strategy.

    1. per tensor the cost model picks a strategy; packing must also earn the question it costs
    2. the runs of one strategy are cut into chunks of bounded size, long runs too
    3. packed and span chunks of a rank take turns in K bounce slots, sized for the largest of them

The thing to watch: chunk `j` of a rank's bounced chunks uses slot `j % K`, so it may be started only when chunk
`j - K` was scattered; the rank's own slots for packed chunks are safe for the same reason (I4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from weightsync.actors.landings import Int64, RankRuns
from weightsync.protocol.cost_model import LinkCosts, RunShape, Strategy, choose, predict, spans
from weightsync.protocol.errors import PlanBudgetError

SMALLEST_SLOT_BYTES = 64 << 10
_ALIGNMENT = 16
_NOTHING: Int64 = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class ChunkDraft:
    """Runs that travel together. For bounced ones: what is read (addresses, bytes) and where each run then lies.

    They are empty for a direct chunk, and what is read for a packed one: its one address is known once it is packed.
    """

    group: int
    rank: int
    strategy: Strategy
    runs: RankRuns
    predicted_s: float
    read_addr: Int64
    read_nbytes: Int64
    read_offset: Int64
    """Of each read in the bounce slot."""
    run_offset: Int64
    """Of each run in the bounce slot."""
    bounce_bytes: int

    @property
    def gap_bytes(self) -> int:
        """Bytes that a span reads and nobody needs."""
        return int(self.read_nbytes.sum() - self.runs.nbytes.sum()) if self.strategy is Strategy.SPAN else 0


@dataclass(frozen=True)
class Cutting:
    """How chunks are made.

    Args:
        strategy: auto, or one for everything.
        chunk_bytes: largest bounced chunk.
        direct_bytes: largest direct chunk; 0 for no limit.
        num_slots: K.
        consumers: that pull from the same ranks.
        budget_bytes: limit on this worker's slots; None for none.
    """

    strategy: str = "auto"
    chunk_bytes: int = 16 << 20
    direct_bytes: int = 64 << 20
    num_slots: int = 2
    consumers: int = 1
    budget_bytes: int | None = None

    def slot_cap(self, ranks: int) -> int:
        """Largest slot this worker may have for each of `ranks` ranks; 0 if there is no room for any.

        Raises:
            PlanBudgetError: none, and the strategy needs slots.
        """
        if self.budget_bytes is None:
            return self.chunk_bytes
        cap = min(self.chunk_bytes, self.budget_bytes // max(1, self.num_slots * ranks))
        if cap >= SMALLEST_SLOT_BYTES:
            return cap
        if self.strategy in (Strategy.PACKED, Strategy.SPAN):
            needed = SMALLEST_SLOT_BYTES * self.num_slots * ranks
            raise PlanBudgetError(
                f"strategy {self.strategy} needs at least {needed} bytes of slots here, and {self.budget_bytes} of "
                "staging_budget_bytes are left; raise it, or use strategy auto or direct"
            )
        return 0


def cut(
    runs: Mapping[tuple[int, int], RankRuns],
    costs: Mapping[int, LinkCosts],
    extents: Mapping[int, Int64],
    cutting: Cutting,
) -> list[ChunkDraft]:
    """Chunks of a whole pull, by group, then rank.

    Args:
        runs: (group, rank) -> runs.
        costs: per rank, of the link to it.
        extents: per rank, ascending first addresses of what it published; a span never crosses one.

    Raises:
        PlanBudgetError: see `Cutting.slot_cap`.
    """
    cap = cutting.slot_cap(len({rank for _, rank in runs}))
    out: list[ChunkDraft] = []
    for (group, rank), own in sorted(runs.items()):
        for strategy, part in _by_strategy(own, costs[rank], extents[rank], cutting, cap):
            drafter = _Drafter(group, rank, costs[rank], extents[rank], cutting.consumers)
            if strategy is Strategy.DIRECT:
                out += [drafter.direct(piece) for piece in split(part, cutting.direct_bytes)]
            else:
                gap = costs[rank].descriptor_bytes if strategy is Strategy.SPAN else 0.0
                # a third: a piece that straddles, gaps and alignment fit into the rest
                pieces = split(_by_source(part), max(cap, SMALLEST_SLOT_BYTES) // 3, gap)
                out += [drafter.span(p) if strategy is Strategy.SPAN else drafter.packed(p) for p in pieces]
    return out


def _by_strategy(
    runs: RankRuns, costs: LinkCosts, extents: Int64, cutting: Cutting, cap: int
) -> list[tuple[Strategy, RankRuns]]:
    """The runs of each strategy that is used for any of the tensors."""
    if cutting.strategy != "auto":
        return [(Strategy(cutting.strategy), runs)]
    if not cap:
        return [(Strategy.DIRECT, runs)]
    tensors = each_tensor(runs)
    shapes = [_shape(part, costs, extents) for part in tensors]
    chosen = [choose(shape, costs, cutting.consumers) for shape in shapes]
    if Strategy.PACKED in chosen:
        others = [choose(shape, costs.without_packing()) for shape in shapes]
        packed = [index for index, strategy in enumerate(chosen) if strategy is Strategy.PACKED]
        gained = sum(
            predict(others[i], shapes[i], costs) - predict(Strategy.PACKED, shapes[i], costs, cutting.consumers)
            for i in packed
        )
        if gained < costs.control_s:
            chosen = [
                other if strategy is Strategy.PACKED else strategy
                for strategy, other in zip(chosen, others, strict=True)
            ]
    return [
        (strategy, joined([part for part, own in zip(tensors, chosen, strict=True) if own is strategy]))
        for strategy in Strategy
        if strategy in chosen
    ]


@dataclass(frozen=True)
class _Drafter:
    """Makes chunks of one group and rank."""

    group: int
    rank: int
    costs: LinkCosts
    extents: Int64
    consumers: int

    def direct(self, runs: RankRuns) -> ChunkDraft:
        return direct_draft(self.group, self.rank, runs, self._predicted_s(Strategy.DIRECT, runs))

    def span(self, runs: RankRuns) -> ChunkDraft:
        starts, ends = _bounded_spans(runs, self.costs, self.extents)
        room = -(-(ends - starts + _ALIGNMENT) // _ALIGNMENT) * _ALIGNMENT
        offsets = np.cumsum(room) - room + starts % _ALIGNMENT  # so that wide lanes stay aligned
        of_run = np.searchsorted(starts, runs.src_addr, side="right") - 1
        run_offset = offsets[of_run] + runs.src_addr - starts[of_run]
        return self._draft(Strategy.SPAN, runs, (starts, ends - starts, offsets, run_offset), int(room.sum()))

    def packed(self, runs: RankRuns) -> ChunkDraft:
        run_offset = np.cumsum(runs.nbytes) - runs.nbytes
        return self._draft(Strategy.PACKED, runs, (_NOTHING, _NOTHING, _NOTHING, run_offset), int(runs.nbytes.sum()))

    def _draft(
        self, strategy: Strategy, runs: RankRuns, reads: tuple[Int64, Int64, Int64, Int64], bounce_bytes: int
    ) -> ChunkDraft:
        return ChunkDraft(
            self.group, self.rank, strategy, runs, self._predicted_s(strategy, runs), *reads, bounce_bytes
        )

    def _predicted_s(self, strategy: Strategy, runs: RankRuns) -> float:
        return predict(strategy, _shape(runs, self.costs, self.extents), self.costs, self.consumers)


def direct_draft(group: int, rank: int, runs: RankRuns, predicted_s: float = 0.0) -> ChunkDraft:
    """A chunk that needs no bounce slot."""
    return ChunkDraft(group, rank, Strategy.DIRECT, runs, predicted_s, _NOTHING, _NOTHING, _NOTHING, _NOTHING, 0)


def _bounded_spans(runs: RankRuns, costs: LinkCosts, extents: Int64) -> tuple[Int64, Int64]:
    """Spans that stay within what was published as one piece: the gap to the next may be anybody's memory."""
    owner = np.searchsorted(extents, runs.src_addr, side="right")
    parts = [spans(runs.src_addr[owner == o], runs.nbytes[owner == o], costs) for o in np.unique(owner)]
    return np.concatenate([start for start, _ in parts]), np.concatenate([end for _, end in parts])


def _shape(runs: RankRuns, costs: LinkCosts, extents: Int64) -> RunShape:
    return RunShape.of(runs.nbytes, *_bounded_spans(runs, costs, extents))


# -- cutting runs ---------------------------------------------------------------------------------------


def each_tensor(runs: RankRuns) -> list[RankRuns]:
    """The runs of each entry of `names` apart; entries without runs are left out."""
    ends = np.cumsum([count for _, count in runs.names]).tolist()
    return [
        _slice(runs, end - count, end, ((name, count),))
        for (name, count), end in zip(runs.names, ends, strict=True)
        if count
    ]


def joined(parts: Sequence[RankRuns]) -> RankRuns:
    """One after the other."""
    return RankRuns(
        np.concatenate([part.src_addr for part in parts]),
        np.concatenate([part.dst_addr for part in parts]),
        np.concatenate([part.nbytes for part in parts]),
        tuple(name for part in parts for name in part.names),
    )


def split(runs: RankRuns, limit: int, gap: float = 0.0) -> list[RankRuns]:
    """Cut into pieces of about `limit` bytes, in order; no run is longer, and no piece larger than twice that.

    Args:
        limit: 0 for no limit.
        gap: bytes between runs (in order of their source) up to this count as well.
    """
    total = int(runs.nbytes.sum())
    if not limit or (total <= limit and not gap):
        return [runs]
    counts = -(-runs.nbytes // limit)
    of_run = np.repeat(np.arange(len(counts)), counts)
    within = (np.arange(len(of_run)) - np.repeat(np.cumsum(counts) - counts, counts)) * limit
    src, dst = runs.src_addr[of_run] + within, runs.dst_addr[of_run] + within
    nbytes = np.minimum(runs.nbytes[of_run] - within, limit)
    read = nbytes.copy()
    between = src[1:] - (src + nbytes)[:-1]
    if gap:
        read[1:] += np.where((between > 0) & (between <= gap), between, 0)
        read += 2 * _ALIGNMENT
    piece = (np.cumsum(read) - 1) // limit
    cuts = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(piece)]
    labels = np.repeat(np.arange(len(runs.names)), [count for _, count in runs.names])[of_run]
    whole = RankRuns(src, dst, nbytes, runs.names)
    return [_slice(whole, first, last, _named(runs.names, labels[first:last])) for first, last in pairwise(cuts)]


def _by_source(runs: RankRuns) -> RankRuns:
    order = np.argsort(runs.src_addr, kind="stable")
    labels = np.repeat(np.arange(len(runs.names)), [count for _, count in runs.names])[order]
    return RankRuns(runs.src_addr[order], runs.dst_addr[order], runs.nbytes[order], _named(runs.names, labels))


def _named(names: Sequence[tuple[str, int]], labels: Int64) -> tuple[tuple[str, int], ...]:
    return tuple((names[label][0], len(list(own))) for label, own in groupby(labels.tolist()))


def _slice(runs: RankRuns, first: int, last: int, names: tuple[tuple[str, int], ...]) -> RankRuns:
    return RankRuns(runs.src_addr[first:last], runs.dst_addr[first:last], runs.nbytes[first:last], names)


def slot_bytes(chunks: Sequence[ChunkDraft]) -> dict[int, int]:
    """Per rank, bytes of its largest bounced chunk."""
    largest: dict[int, int] = defaultdict(int)
    for chunk in chunks:
        largest[chunk.rank] = max(largest[chunk.rank], chunk.bounce_bytes)
    return {rank: nbytes for rank, nbytes in largest.items() if nbytes}
