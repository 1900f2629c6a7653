"""Who takes part: trainer ranks, checked against each other until they make one model, and inference workers.

Pure state of the registry. The thing to watch: everything is refused at registration, before a consumer
plans and long before a byte moves, and a refused rank leaves the others as they were.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from weightsync.actors.epochs import ConsumerMember
from weightsync.protocol.errors import InvalidLayoutError, MembershipLostError, RegistrationError
from weightsync.protocol.groups import layerwise_groups
from weightsync.protocol.messages import (
    ConsumerState,
    LayoutSnapshot,
    MemberHistory,
    ProducerRegistration,
    PublishMode,
    RankStats,
    TensorMeta,
)
from weightsync.protocol.shards import check_complete, merge_shard_tables
from weightsync.protocol.status import ProducerStatus


@dataclass
class ProducerMember:
    """A registered trainer rank: what it said, its token, its producer actor, and what it did since it joined."""

    registration: ProducerRegistration
    token: str
    actor: Any
    stats: RankStats = field(default_factory=RankStats)
    """Of its newest sync."""
    served_bytes: int = 0
    rejected_signals: int = 0

    def __post_init__(self) -> None:
        self._held = sum(tensor.held_bytes for tensor in self.registration.table)

    def status(self) -> ProducerStatus:
        r = self.registration
        return ProducerStatus(
            rank=r.rank,
            mode=r.mode,
            node_id=r.node_id,
            pid=r.pid,
            bytes_held=self._held,
            extra_bytes=self.stats.extra_bytes,
            inflight_groups=self.stats.inflight_groups,
            served_bytes=self.served_bytes,
            rejected_signals=self.rejected_signals,
        )


class ProducerTable:
    """The trainer ranks of one service."""

    def __init__(self) -> None:
        self.members: dict[int, ProducerMember] = {}
        self.generation = 0
        self._layout: LayoutSnapshot | None = None
        self._known: dict[str, tuple[int, TensorMeta]] = {}
        """Every tensor, and a rank that described it."""

    @property
    def world_size(self) -> int | None:
        return next((m.registration.world_size for m in self.members.values()), None)

    @property
    def missing_ranks(self) -> list[int]:
        return [rank for rank in range(self.world_size or 0) if rank not in self.members]

    @property
    def layout(self) -> LayoutSnapshot | None:
        """The checked model, once every rank is there."""
        return self._layout

    def add(self, member: ProducerMember, num_consumers: int) -> None:
        """Admit a rank, or refuse it and change nothing.

        Raises:
            RegistrationError: the rank contradicts another one or is taken.
            InvalidLayoutError: it completes the set and the set has a hole or a contradiction.
        """
        new = member.registration
        check_rank(new, self.members)
        check_world(new, self.members)
        check_manifest(new, self._known)
        members = {**self.members, new.rank: member}
        layout = None
        if len(members) == new.world_size:
            registrations = [members[rank].registration for rank in range(new.world_size)]
            layout = assemble_layout(registrations, self.generation + 1, num_consumers)
        self.members = members
        for meta in new.manifest:
            self._known.setdefault(meta.name, (new.rank, meta))
        if layout is not None:
            self.generation, self._layout = layout.generation, layout

    def replaceable(self, rank: int) -> bool:
        """Whether the other ranks hold every byte that this one holds.

        Staged ranks are not: gathering is collective among them.
        """
        registrations = [member.registration for member in self.members.values()]
        if registrations[0].mode is not PublishMode.LIVE:
            return False
        merged = merge_shard_tables([list(r.table) for r in registrations if r.rank != rank])
        try:
            check_complete(merged)
        except InvalidLayoutError:
            return False
        return all(tensor.name in merged or not tensor.held_bytes for r in registrations for tensor in r.table)

    def remove(self, rank: int) -> None:
        """Forget a rank; the model is incomplete until it is back."""
        self.members.pop(rank, None)
        self._layout = None
        self._known = {
            meta.name: (other, meta) for other, member in self.members.items() for meta in member.registration.manifest
        }


class ConsumerTable:
    """The inference workers of one service. A worker's name keeps its id, whoever registers under it."""

    def __init__(self, limit: int) -> None:
        self.members: dict[int, ConsumerMember] = {}
        self._ids: dict[str, int] = {}
        self._limit = limit

    @property
    def ids_given(self) -> int:
        return len(self._ids)

    @property
    def able(self) -> int:
        """How many can pull."""
        return sum(member.planned for member in self.members.values())

    def by_name(self, worker: str) -> ConsumerMember | None:
        return next((member for member in self.members.values() if member.worker == worker), None)

    def add(self, worker: str, install: str, node_id: str, pid: int, known: MemberHistory) -> ConsumerMember:
        """Admit a worker; it replaces the one of its name.

        Raises:
            RegistrationError: the service is full.
        """
        if self.by_name(worker) is None and len(self.members) >= self._limit:
            raise RegistrationError(
                f"worker {worker!r}: the service holds {len(self.members)} workers, its limit; start it with a larger "
                "max_consumers"
            )
        consumer_id = self._ids.setdefault(worker, len(self._ids))
        member = ConsumerMember(
            worker, consumer_id, secrets.token_hex(16), install, node_id, pid, version=known.version, torn=known.torn
        )
        self.members[consumer_id] = member
        return member

    def holds(self, consumer_id: int, token: str) -> bool:
        """Whether that is a member now."""
        member = self.members.get(consumer_id)
        return member is not None and secrets.compare_digest(member.token, token)

    def get(self, consumer_id: int, token: str) -> ConsumerMember:
        """The member.

        Raises:
            MembershipLostError: it is none (any more), and may join again.
            RegistrationError: another process has taken its name.
        """
        member = self.members.get(consumer_id)
        if member is None:
            raise MembershipLostError(f"consumer {consumer_id} is no member: its lease expired, or it left")
        if not secrets.compare_digest(member.token, token):
            raise RegistrationError(
                f"consumer {consumer_id} was replaced by process {member.pid}, which registered the same worker name "
                f"{member.worker!r}"
            )
        return member

    def remove(self, consumer_id: int) -> None:
        del self.members[consumer_id]

    def planning(self, generation: int) -> list[str]:
        """Names of workers that have not planned this layout generation yet."""
        return [
            member.worker
            for member in self.members.values()
            if member.state is ConsumerState.PLANNING or member.generation < generation
        ]

    def failures(self) -> list[str]:
        """Why workers that cannot plan cannot."""
        return [f"{m.worker}: {m.error}" for m in self.members.values() if m.state is ConsumerState.FAILED]


def check_rank(new: ProducerRegistration, members: dict[int, ProducerMember]) -> None:
    """Refuse a rank outside its world, or one that somebody holds."""
    if new.world_size < 1 or not 0 <= new.rank < new.world_size:
        raise RegistrationError(f"rank {new.rank} is not in a world of {new.world_size}")
    held = members.get(new.rank)
    if held is not None:
        raise RegistrationError(
            f"rank {new.rank} is claimed twice: process {held.registration.pid} on node "
            f"{held.registration.node_id[:8]} publishes it, process {new.pid} on node {new.node_id[:8]} asks for "
            "it; close the first Publisher, or give the second its own rank"
        )


def check_world(new: ProducerRegistration, members: dict[int, ProducerMember]) -> None:
    """Refuse a rank that disagrees with the others, which agree, about the world, the mode or the transport."""
    other = next((member.registration for member in members.values()), new)
    for what, mine, theirs in (
        ("world size", new.world_size, other.world_size),
        ("publish mode", new.mode, other.mode),
        ("transport", new.transport, other.transport),
    ):
        if mine != theirs:
            raise RegistrationError(
                f"ranks {other.rank} and {new.rank} disagree about the {what}: {theirs} against {mine}"
            )


def check_manifest(new: ProducerRegistration, known: dict[str, tuple[int, TensorMeta]]) -> None:
    """Refuse a rank that disagrees with an earlier one about a tensor they both describe."""
    for mine in new.manifest:
        rank, theirs = known.get(mine.name, (new.rank, mine))
        if mine != theirs:
            field = next(f for f in ("shape", "dtype", "alias_of") if getattr(theirs, f) != getattr(mine, f))
            raise RegistrationError(
                f"ranks {rank} and {new.rank} disagree about the {field} of {mine.name!r}: rank {rank} has "
                f"{getattr(theirs, field)}, rank {new.rank} has {getattr(mine, field)}"
            )


def assemble_layout(registrations: list[ProducerRegistration], generation: int, num_consumers: int) -> LayoutSnapshot:
    """Merge all ranks into the model that consumers plan against.

    Raises:
        InvalidLayoutError: a part of a tensor, or a whole tensor, is held by no rank.
    """
    manifest: dict[str, TensorMeta] = {}
    for registration in registrations:
        for meta in registration.manifest:
            manifest.setdefault(meta.name, meta)
    if not manifest:
        raise InvalidLayoutError("no rank publishes any tensor; the sources are empty")
    canonical = [name for name, meta in manifest.items() if meta.alias_of is None]
    groups = layerwise_groups(canonical)
    mode = registrations[0].mode
    if mode is PublishMode.LIVE:
        check_complete(merge_shard_tables([list(r.table) for r in registrations]))
        held = [{t.name for t in r.table if any(_numel(s.shape) for s in t.shards)} for r in registrations]
    else:
        held = [set(r.held_names) for r in registrations]
    nobody = [name for name in canonical if _numel(manifest[name].shape) and not any(name in h for h in held)]
    if nobody:
        raise InvalidLayoutError(f"{nobody[:5]} are held by none of the {len(registrations)} ranks")
    return LayoutSnapshot(
        generation=generation,
        mode=mode,
        transport=registrations[0].transport,
        names=tuple(name for group in groups for name in group),
        group_lens=tuple(len(group) for group in groups),
        manifest=tuple(manifest.values()),
        producers=tuple(registrations),
        rank_groups=tuple(
            tuple(index for index, group in enumerate(groups) if names.intersection(group)) for names in held
        ),
        num_consumers=max(num_consumers, 1),
    )


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
