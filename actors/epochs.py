"""One attempt to sync a version, as the registry follows it: who is live, who has finished, how it ended.

Pure state. The thing to watch: an epoch ends exactly once, committed or aborted, and a consumer may make a
version visible only after the commit; until then every consumer of the attempt keeps what it had.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from weightsync.protocol.messages import (
    ConsumerState,
    EpochState,
    InstallMode,
    LayoutSnapshot,
    PlanFacts,
    PullStats,
    RankStats,
)
from weightsync.protocol.status import ConsumerStatus, EpochStatus, SyncReport, WorkerPull


@dataclass
class ConsumerMember:
    """A registered inference worker."""

    worker: str
    consumer_id: int
    token: str
    install: str
    node_id: str
    pid: int
    state: ConsumerState = ConsumerState.PLANNING
    generation: int = 0
    version: int | None = None
    staged_version: int | None = None
    bytes_done: int = 0
    error: str | None = None
    waits_for: str = ""
    moved_at: float = field(default_factory=time.monotonic)
    facts: PlanFacts = field(default_factory=lambda: PlanFacts(0, needs_producers=True))
    """Of its plan for the newest layout it knows."""
    joined_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    flips: int = 0
    torn: bool = False
    """An attempt to pull into the live parameters failed; no whole version has been installed since."""

    def status(self, lag: tuple[int, float]) -> ConsumerStatus:
        """Args: `lag`, (versions, seconds) it is behind."""
        return ConsumerStatus(
            worker=self.worker,
            consumer_id=self.consumer_id,
            state=self.state,
            install=self.install,
            version=self.version,
            staged_version=self.staged_version,
            ready=self.version is not None and not self.torn,
            torn=self.torn,
            lag_versions=lag[0],
            lag_seconds=lag[1],
            waits_for=self.waits_for if self.state is ConsumerState.PULLING else "",
            bytes_done=self.bytes_done,
            bytes_total=self.facts.bytes_total,
            node_id=self.node_id,
            pid=self.pid,
            error=self.error,
        )

    @property
    def writes_live(self) -> bool:
        """Whether a pull writes what requests see."""
        return self.install == InstallMode.IN_PLACE

    @property
    def planned(self) -> bool:
        return self.state in (ConsumerState.IDLE, ConsumerState.PULLING, ConsumerState.PULLED)


@dataclass
class Epoch:
    """State of one attempt.

    `ranks` are the trainer ranks and `live` the consumers that take part; `pulled` the consumers that hold the
    complete version; `evicted` those that were taken out, with the reason; `ended` the trainer ranks whose groups
    were all freed; `lost` those that died although the epoch goes on, with the reason.
    """

    epoch: int
    version: int
    layout: LayoutSnapshot
    live: dict[int, str]
    one_sided: bool = False
    """Consumers read live memory and ask nothing of producers, so these were not told of the epoch: a consumer that has
    pulled has freed every group, and the registry is the free barrier."""
    begin_seconds: float = 0.0
    state: EpochState = EpochState.OPEN
    pulled: dict[int, PullStats] = field(default_factory=dict)
    evicted: dict[str, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    rank_stats: dict[int, RankStats] = field(default_factory=dict)
    """Per trainer rank, what it measured."""
    error: str | None = None
    opened_at: float = field(default_factory=time.monotonic)
    closed_at: float | None = None
    moved_at: float = field(default_factory=time.monotonic)
    """When a member last finished its part."""
    _report: SyncReport | None = None

    @property
    def open(self) -> bool:
        return self.state is EpochState.OPEN

    def __post_init__(self) -> None:
        self.ranks = set(range(len(self.layout.producers)))

    def lose(self, rank: int, reason: str) -> None:
        """The epoch goes on without a trainer rank."""
        self.ranks.discard(rank)
        self.lost[rank] = reason

    @property
    def complete(self) -> bool:
        """Everybody has finished: it may be committed."""
        return bool(self.live) and self.ranks <= self.ended and self.live.keys() <= self.pulled.keys()

    def evict(self, consumer_id: int, reason: str) -> bool:
        worker = self.live.pop(consumer_id, None)
        if worker is None:
            return False
        self.pulled.pop(consumer_id, None)
        self.evicted[worker] = reason
        return True

    def refusal(self, member: ConsumerMember) -> str | None:
        """Why a consumer that pulled may not install, once that is known; None if it may."""
        if self.state is EpochState.ABORTED:
            return f"was aborted: {self.error}"
        if member.consumer_id not in self.live:
            how = "goes on" if self.open else "was committed"
            return f"{how} without worker {member.worker!r}: {self.evicted.get(member.worker, 'it left')}"
        return None

    def close(self, state: EpochState, error: str | None = None) -> None:
        if not self.open:
            raise AssertionError(f"epoch {self.epoch} is {self.state} already")
        self.state, self.error, self.closed_at = state, error, time.monotonic()

    @property
    def seconds(self) -> float:
        return (self.closed_at or time.monotonic()) - self.opened_at

    def waiting_for(self) -> list[str]:
        """The members that have not finished, in words."""
        consumers = [f"worker {worker}" for cid, worker in self.live.items() if cid not in self.pulled]
        return consumers + [f"trainer rank {rank}" for rank in sorted(self.ranks - self.ended)]

    def status(self, consumers: Mapping[int, ConsumerMember]) -> EpochStatus:
        """Args: `consumers`, the members by id."""
        live = [consumers[cid] for cid in self.live if cid in consumers]
        done, total = sum(member.bytes_done for member in live), sum(member.facts.bytes_total for member in live)
        moved_at = max([self.opened_at, self.moved_at, *(member.moved_at for member in live)])
        return EpochStatus(
            epoch=self.epoch,
            version=self.version,
            state=self.state,
            seconds=self.seconds,
            quiet_seconds=time.monotonic() - moved_at,
            progress=done / total if total else 0.0,
            waiting_for=self.waiting_for() if self.open else [],
        )

    def report(self, service: str) -> SyncReport:
        """The outcome, for every trainer rank; made once, when the epoch is closed."""
        if self._report is None:
            self._report = self._make_report(service)
        return self._report

    def _make_report(self, service: str) -> SyncReport:
        workers = {
            self.live[cid]: WorkerPull(
                bytes_wire=stats.bytes_wire,
                bytes_gaps=stats.bytes_gaps,
                bytes_needed=stats.bytes_needed,
                seconds=stats.seconds,
                phases=stats.phases,
                regions_verified=stats.regions_verified,
                regions_repeated=stats.regions_repeated,
                strategies=stats.strategies,
                predicted_s=stats.predicted_s,
                prepared=stats.prepared,
                carriers=stats.carriers,
                extra_bytes=stats.extra_bytes,
            )
            for cid, stats in self.pulled.items()
        }
        phases = {"begin": self.begin_seconds}
        verified = any(w.regions_verified for w in workers.values())
        for phase in ("pull", "scatter", *(("verify",) if verified else ()), "free"):
            phases[phase] = max((w.phases.get(phase, 0.0) for w in workers.values()), default=0.0)
        phases["commit"] = max(0.0, self.seconds - sum(phases.values()))
        nbytes = sum(w.bytes_wire for w in workers.values())
        return SyncReport(
            service=service,
            version=self.version,
            epoch=self.epoch,
            mode=self.layout.mode,
            transport=self.layout.transport,
            carriers=sorted({carrier for w in workers.values() for carrier in w.carriers}),
            bytes=nbytes,
            gap_bytes=sum(w.bytes_gaps for w in workers.values()),
            needed_bytes=sum(w.bytes_needed for w in workers.values()),
            seconds=self.seconds,
            phases=phases,
            gbytes_per_second=nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0,
            installed=sorted(workers),
            evicted=sorted(self.evicted),
            lost_ranks=sorted(self.lost),
            producer_extra_bytes={rank: stats.extra_bytes for rank, stats in sorted(self.rank_stats.items())},
            workers=workers,
        )
