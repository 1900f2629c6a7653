"""What crosses a process boundary: descriptions of members, grants, and the signals of one sync.

Frozen dataclasses, so a message cannot be changed on its way. The thing to watch: `addr` values are only
meaningful in the address space of the session that published them; nobody but that session's transport may
dereference them. The registry carries these messages and never touches tensor bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from weightsync.protocol.cost_model import MoveCosts
from weightsync.protocol.shards import PublishedTensor


class PublishMode(StrEnum):
    """How a trainer rank makes its weights readable (design: publish modes)."""

    LIVE = "live"
    STAGED = "staged"


class InstallMode(StrEnum):
    """Where an inference worker pulls to, and so when a version becomes visible."""

    SHADOW = "shadow"
    IN_PLACE = "in_place"


class ConsumerState(StrEnum):
    """Life of one consumer as the registry sees it."""

    PLANNING = "planning"
    IDLE = "idle"
    PULLING = "pulling"
    PULLED = "pulled"
    FAILED = "failed"


class EpochState(StrEnum):
    """Life of one attempt to sync a version."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True)
class TensorMeta:
    """One logical tensor of the model, as every rank must agree on it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None
    """The canonical name whose memory this name shares (tied weights); None for a canonical name."""


@dataclass(frozen=True)
class MemberHistory:
    """What a member has seen of the service: its newest version and epoch. A new member has seen nothing."""

    version: int | None = None
    epoch: int = 0
    torn: bool = False
    """A worker's weights are a mixture: an attempt to write them in place failed."""


@dataclass(frozen=True)
class ProducerRegistration:
    """What a trainer rank says about itself when it joins.

    In live mode `table` lists the rank's shards by address; in staged mode it is empty and `held_names`
    lists the names the rank will yield in full, group by group.
    """

    rank: int
    world_size: int
    mode: PublishMode
    manifest: tuple[TensorMeta, ...]
    table: tuple[PublishedTensor, ...]
    held_names: tuple[str, ...]
    agent_name: str
    agent_metadata: bytes
    transport: str
    node_id: str
    pid: int
    device: str = "cpu"
    """Where the shards lie, as torch names it; a rank's shards are all on one device."""
    move_costs: MoveCosts | None = None
    """What packing costs there, if it can be asked to pack."""
    registration_s: float = 0.0
    """Seconds it took to make its memory readable."""

    def describe_held(self) -> str:
        """What is lost with this rank, for messages: the first region it holds, and how many more."""
        held = [(tensor.name, shard) for tensor in self.table for shard in tensor.shards if shard.numel]
        if not held:
            return f"what it was to gather ({len(self.held_names)} tensors)"
        name, first = held[0]
        end = tuple(o + n for o, n in zip(first.shard_offset, first.shape, strict=True))
        return f"{name!r} {first.shard_offset}..{end}" + (f" and {len(held) - 1} more regions" if held[1:] else "")


@dataclass(frozen=True)
class ProducerGrant:
    """The registry's answer to a producer: its token, and how the service is set up."""

    token: str
    generation: int


@dataclass(frozen=True)
class LinkName:
    """Which link costs belong to: two nodes, and torch's names of the memory on both sides."""

    producer_node: str
    consumer_node: str
    producer_device: str
    consumer_device: str


@dataclass(frozen=True)
class LayoutSnapshot:
    """Everything a consumer needs to plan: one complete, checked set of producer registrations."""

    generation: int
    mode: PublishMode
    transport: str
    names: tuple[str, ...]
    """Canonical names in group-major order."""
    group_lens: tuple[int, ...]
    manifest: tuple[TensorMeta, ...]
    producers: tuple[ProducerRegistration, ...]
    """In rank order; a producer's index in this tuple is its session and its owner index."""
    rank_groups: tuple[tuple[int, ...], ...]
    """Per rank, the gather groups it holds any byte of: whom a consumer must send which free signals."""
    num_consumers: int
    """Consumers known when the layout was completed; staged pulls spread over producers by it."""


@dataclass(frozen=True)
class RankLayout:
    """What a trainer rank needs to know of the whole model."""

    generation: int
    groups: tuple[int, ...]
    """Gather groups this rank holds any byte of."""
    names: tuple[str, ...]
    """All canonical names in group-major order, and `group_lens`: what a staged publish walks through."""
    group_lens: tuple[int, ...]


@dataclass(frozen=True)
class EpochGrant:
    """Told to a trainer rank when its epoch opened."""

    epoch: int
    version: int
    live_consumers: tuple[int, ...]
    layout: RankLayout | None
    """None if the rank knows it: names travel once, not with every version."""
    one_sided: bool
    """Workers only read memory: the rank and its producer have nothing to do until the epoch ends."""


@dataclass(frozen=True)
class EpochBegin:
    """Told to a consumer when an epoch opened that it is live in."""

    epoch: int
    version: int
    generation: int
    one_sided: bool
    """Producers take no part: that it holds everything, said to the registry, frees every group."""
    refusal: str | None = None
    """The epoch was given up before the consumer heard of it, and why."""


@dataclass(frozen=True)
class ConsumerGrant:
    """The registry's answer to a consumer: its fleet-wide id, its token, and where its lifeline goes."""

    consumer_id: int
    token: str
    lifeline: tuple[str, int]


@dataclass(frozen=True)
class PlanFacts:
    """What the registry gets to know of a worker's plan for one layout."""

    bytes_total: int
    """Bytes a pull brings."""
    needs_producers: bool
    """Its pulls ask something of producers beyond what registration told it."""
    bytes_by_rank: dict[int, int] = field(default_factory=dict)
    """Where they come from."""
    plan_s: float = 0.0
    """Seconds to record, plan and prepare, without those of `registration_s`."""
    registration_s: float = 0.0
    """Seconds to make its memory known to the transport."""


@dataclass(frozen=True)
class RankStats:
    """What one trainer rank measured in one epoch."""

    extra_bytes: int = 0
    """Memory it took beside its weights."""
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds it waited: `credit` for a free export slot, `free_barrier` for the last free signal."""
    gather_s: float = 0.0
    """Seconds its source took to gather, in staged mode."""
    inflight_groups: int = 0
    """Most groups that were published and not freed at once."""
    rejected_signals: int = 0
    """Free signals its producer did not credit."""


@dataclass(frozen=True)
class PullStats:
    """What one consumer measured in one epoch. Bytes are counted where they land, after the transport."""

    bytes_wire: int
    bytes_needed: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds per phase: `pull` (reads, and what overlaps them), `scatter`, `verify`, `free`."""
    regions_verified: int = 0
    """Regions whose digest was checked."""
    regions_repeated: int = 0
    """Regions that were read again, because the first time their digest was wrong."""
    strategies: dict[str, int] = field(default_factory=dict)
    """Bytes that travelled direct, packed and as spans."""
    predicted_s: float = 0.0
    """What the cost model expected of reads and scatters; 0.0 where there is no model."""
    prepared: dict[str, int] = field(default_factory=dict)
    """What this version had to prepare: registrations, connections, descriptor_lists. Empty in steady state."""
    bytes_gaps: int = 0
    """Bytes between needed ones that spans read along; not part of `bytes_wire`."""
    carriers: tuple[str, ...] = ()
    """What carried the bytes, below the transport: cma, shared memory, rdma, tcp, object store, ..."""
    extra_bytes: int = 0
    """Memory beside the parameters and their shadow."""
