"""The trainer's side: `Publisher` turns one rank's weights into versions.

One call per version on every rank:

    begin   the registry waits for all ranks, opens the epoch, and says so to producers and consumers
    serve   live: the rank's memory is read where it lies, by the transport, not by this thread
            staged: this thread gathers group after group into the export ring, at most L + 1 resident
    end     the registry waits for every consumer, commits, and reports

The thing to watch: in live mode the trainer must not write its parameters until `publish` returns, and they
must still lie where they lay at registration; that is checked at each publish.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch

from weightsync.actors.digests import ShardDigests
from weightsync.actors.export_ring import ExportRing, ShardMirror
from weightsync.actors.interfaces import LocalShard, WeightSource, iter_groups
from weightsync.actors.moves import await_device, measure_moves
from weightsync.actors.options import RegistryOptions
from weightsync.actors.pack_desk import PackRequest, Slot
from weightsync.actors.producer_actor import ProducerOptions, Wants
from weightsync.actors.spawn import await_registry, call, spawn_producer, this_node
from weightsync.actors.trainer_packer import TrainerPacker
from weightsync.actors.transport import Transport, create_transport
from weightsync.protocol.dtypes import dtype_name
from weightsync.protocol.errors import (
    InvalidLayoutError,
    MembershipLostError,
    RegistrationError,
    SyncAborted,
    SyncError,
)
from weightsync.protocol.ledger import LedgerMeasures
from weightsync.protocol.messages import (
    EpochGrant,
    MemberHistory,
    ProducerRegistration,
    PublishMode,
    RankLayout,
    RankStats,
)
from weightsync.protocol.shards import PublishedTensor
from weightsync.protocol.status import SyncReport
from weightsync.service.api import ServiceHandle, connect
from weightsync.service.shard_table import (
    check_manifest,
    check_readable,
    nbytes_of,
    only_device,
    placement,
    shard_table,
    span_bytes,
)

_NO_LAYOUT = RankLayout(0, (), (), ())


class Publisher:
    """Publishes one trainer rank.

    Args:
        service: name of a running service, or its handle.
        rank: this trainer rank, from 0.
        world_size: ranks that publish together.
        source: what this rank holds.
        mode: `live` reads the trainer's own memory; `staged` gathers groups through a bounded export ring.

    Raises:
        ServiceNotFoundError: no such service.
        RegistrationError, InvalidLayoutError: this rank contradicts itself or others; nothing was changed.

    Example:
        >>> pub = Publisher("demo", rank=0, world_size=1, source=ModuleSource(model))  # doctest: +SKIP
        >>> pub.publish(1).gbytes_per_second                                           # doctest: +SKIP
        2.9
    """

    def __init__(
        self,
        service: str | ServiceHandle,
        rank: int,
        world_size: int,
        source: WeightSource,
        mode: str | PublishMode = PublishMode.LIVE,
    ) -> None:
        self._mode = _mode(mode)
        self._rank = rank
        self._world_size = world_size
        self._source = source
        handle = connect(service) if isinstance(service, str) else service
        self._registry = handle.registry
        self._options: RegistryOptions = call(self._registry.options.remote())
        self._manifest = source.manifest()
        check_manifest(rank, self._manifest)
        self._transport: Transport | None = None
        self._mirror: ShardMirror | None = None
        self._ring: ExportRing | None = None
        self._packer: TrainerPacker | None = None
        self._wants = Wants(0, {}, {})
        self._layout = _NO_LAYOUT
        self._epoch = 0
        self._device = "cpu"
        self._actor: Any = None
        self._token: str | None = None
        self._version: int | None = None
        self._closed = False
        try:
            self._register()
        except BaseException:
            self.close()
            raise

    def publish(self, version: int, timeout: float | None = None) -> SyncReport:
        """Publish a version; returns when every live consumer holds it.

        Args:
            version: strictly above every earlier one, the same on every rank.
            timeout: seconds to wait for the other ranks and for consumers to join; None takes the service's
                stall timeout. Once the sync runs, the stall watchdog bounds it.

        Raises:
            VersionError: the version does not increase, or ranks disagree.
            StallError: ranks or consumers are missing; the message says which.
            SyncAborted: the attempt was given up for everyone; the message says why.
            SyncError: a parameter does not lie any more where it did.
        """
        self._refuse_if_closed()
        self._source.refresh()
        self._check_placements()
        await_device(torch.device(self._device))  # peers read memory, and know nothing of streams
        if self._mirror is not None:  # before the epoch opens: consumers read as soon as it does
            self._mirror.refresh(self._source.shards())
        timeout_s = self._options.stall_timeout_s if timeout is None else timeout
        grant = self._begin(version, timeout_s)
        try:
            stats = RankStats()
            if self._mode is PublishMode.STAGED:
                stats = self._serve_staged()
            elif not grant.one_sided:  # else workers read by themselves, and tell the registry when they have
                stats = _rank_stats(self._serve_live(grant))
            stats = replace(stats, extra_bytes=self._extra_bytes)
            report: SyncReport = call(self._registry.end_publish.remote(self._rank, self._token, grant.epoch, stats))
        except ray.exceptions.RayActorError as error:
            self._abandon(grant, error)
            raise SyncAborted(
                f"version {version} (epoch {grant.epoch}) was aborted: the registry or the producer of rank "
                f"{self._rank} died ({type(error).__name__}); publish a newer version"
            ) from error
        except BaseException as error:
            self._give_up(grant, error)
            raise
        self._version = report.version
        return report

    @property
    def _extra_bytes(self) -> int:
        """Memory this rank takes beside its weights."""
        ring = sum(segment.name.nbytes for segment in self._ring.segments) if self._ring is not None else 0
        mirror = self._mirror.segment.name.nbytes if self._mirror is not None else 0
        return self._source.extra_bytes + ring + mirror + (self._packer.slot_bytes if self._packer is not None else 0)

    def _begin(self, version: int, timeout_s: float) -> EpochGrant:
        """Meet the other ranks; a registry that restarted meanwhile is joined again."""

        def begin() -> EpochGrant:
            known = self._layout.generation
            grant: EpochGrant = call(
                self._registry.begin_publish.remote(self._rank, self._token, version, timeout_s, known)
            )
            self._layout, self._epoch = grant.layout or self._layout, grant.epoch
            return grant

        try:
            return begin()
        except (MembershipLostError, ray.exceptions.RayActorError):
            if not await_registry(self._options.service, self._registry):
                raise
        self._rejoin()
        return begin()

    def _await_actor(self, ref: Any) -> Any:
        """The result of a call that may park at the producer; ends when the registry dies, which could end it."""
        ready, _ = ray.wait([ref, self._registry_watch], num_returns=1)
        if ref not in ready:
            call(self._registry_watch)  # raises what ended it
        return call(ref)

    def _abandon(self, grant: EpochGrant, error: BaseException) -> None:
        """The registry cannot tell our producer that this attempt is over; we do."""
        with contextlib.suppress(Exception):
            call(self._actor.fail.remote(f"epoch {grant.epoch}: {type(error).__name__}"), timeout_s=5)

    def close(self) -> None:
        """Leave the service, end the producer actor, release registrations and shared memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._token is not None:
            with contextlib.suppress(Exception):
                call(self._registry.unregister_producer.remote(self._rank, self._token), timeout_s=5)
        if self._actor is not None:
            with contextlib.suppress(Exception):
                call(self._actor.close.remote(), timeout_s=5)
            with contextlib.suppress(Exception):
                ray.kill(self._actor)
        for owned in (self._packer, self._transport, self._mirror, self._ring):
            if owned is not None:
                owned.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- joining --------------------------------------------------------------------------------------

    def _register(self) -> None:
        """Make this rank's memory readable, spawn its producer, and join."""
        self._check_vacancy()
        nonce = secrets.token_hex(4)
        agent_name = f"{self._options.service}:rank{self._rank}:{nonce}"
        self._transport = create_transport(self._options.transport, agent_name, serves=self._mode is PublishMode.LIVE)
        held = self._source.held_names()
        self._actor = spawn_producer(
            self._options.service,
            self._rank,
            nonce,
            ProducerOptions(
                agent_name=f"{agent_name}:producer",
                transport=self._options.transport,
                served_names=held,
                num_serve_buffers=self._options.num_serve_buffers,
                gather_lookahead=self._options.gather_lookahead,
                stall_timeout_s=self._options.stall_timeout_s,
                verify=self._options.verify,
                staging_budget_bytes=self._options.staging_budget_bytes,
            ),
            self._options.max_consumers,
        )
        started = time.monotonic()
        table = self._expose_shards(agent_name) if self._mode is PublishMode.LIVE else ()
        registration_s = time.monotonic() - started
        registration = ProducerRegistration(
            rank=self._rank,
            world_size=self._world_size,
            mode=self._mode,
            manifest=self._manifest,
            table=table,
            held_names=held,
            agent_name=agent_name,
            agent_metadata=self._transport.metadata(),
            transport=self._options.transport,
            node_id=this_node(),
            pid=os.getpid(),
            device=self._device,
            registration_s=registration_s,
            move_costs=measure_moves(torch.device(self._device)) if self._packer is not None else None,
        )
        self._registration = registration
        self._join(MemberHistory())

    def _join(self, known: MemberHistory) -> None:
        grant = call(self._registry.register_producer.remote(self._registration, self._actor, known))
        self._token = grant.token
        self._registry_watch = self._registry.watch.remote()

    def _rejoin(self) -> None:
        """The registry has restarted and knows nobody: be a member again, with the producer we have.

        Raises:
            SyncError: the producer is gone; this rank needs a new Publisher.
        """
        try:
            epoch = call(self._actor.snapshot.remote(), timeout_s=30).epoch
        except ray.exceptions.RayActorError as error:
            raise SyncError(
                f"the producer of rank {self._rank} died; close this Publisher and make a new one"
            ) from error
        self._layout = _NO_LAYOUT  # the new registry counts generations anew
        self._join(MemberHistory(self._version, max(epoch, self._epoch)))

    def _check_vacancy(self) -> None:
        """Refuse a taken rank before an actor is spawned for it."""
        for producer in call(self._registry.status.remote()).producers:
            if producer.rank == self._rank:
                raise RegistrationError(
                    f"rank {self._rank} is claimed twice: process {producer.pid} on node {producer.node_id[:8]} "
                    f"publishes it, process {os.getpid()} asks for it; close the first Publisher, or give this one "
                    "its own rank"
                )

    def _expose_shards(self, agent_name: str) -> tuple[PublishedTensor, ...]:
        """Register the rank's shards (or mirror them, for a transport that cannot reach this process)."""
        assert self._transport is not None
        shards = self._source.shards()
        self._check_hashable(shards)
        self._placements = [placement(shard) for shard in shards]
        self._device = only_device(self._rank, shards)
        if self._transport.reads_trainer_memory:
            check_readable(self._rank, shards)
            self._transport.register(shard.tensor for shard in shards)
            addresses = [shard.tensor.data_ptr() for shard in shards]
        else:
            self._mirror = ShardMirror(f"{self._options.service}-rank{self._rank}", shards)
            call(self._actor.map_segment.remote(self._mirror.segment.name))
            self._mirror.segment.unlink()
            addresses = self._mirror.offsets
        base = 0 if self._mirror is None else self._mirror.segment.memory.data_ptr()
        if self._transport.reads_trainer_memory:
            self._packer = TrainerPacker(self._transport, [shard.tensor for shard in shards])
        lies = span_bytes if self._mirror is None else nbytes_of  # a mirror is dense
        self._digests = ShardDigests(
            [(base + addr, lies(shard)) for shard, addr in zip(shards, addresses, strict=True)], base
        )
        return shard_table(agent_name, self._manifest, shards, addresses, dense=self._mirror is not None)

    def _check_hashable(self, shards: Sequence[LocalShard]) -> None:
        for shard in shards:
            if self._options.verify != "off" and shard.tensor.device.type != "cpu":
                raise InvalidLayoutError(
                    f"rank {self._rank}: {shard.name!r} is on {shard.tensor.device}, and digests are computed of host "
                    "memory only; start the service with verify='off'"
                )

    # -- one version ----------------------------------------------------------------------------------

    def _check_placements(self) -> None:
        """In live mode every shard must lie where it lay when consumers planned."""
        if self._mode is not PublishMode.LIVE:
            return
        shards = self._source.shards()
        now = [placement(shard) for shard in shards]
        if now == self._placements:
            return
        moved = next((pair for pair in zip(self._placements, now, strict=False) if pair[0] != pair[1]), None)
        what = f"{moved[0]} is {moved[1]} now" if moved else f"{len(self._placements)} shards are {len(now)} now"
        raise SyncError(
            f"rank {self._rank}: what was registered as {what}; the trainer reallocated it, so close this Publisher "
            "and make a new one"
        )

    def _serve_live(self, grant: EpochGrant) -> LedgerMeasures:
        """Consumers read by themselves; what they need of this process meanwhile is digests and packed chunks."""
        all_freed = self._actor.publish_live.remote(self._layout.groups)
        news = call(self._actor.wants.remote(self._wants.revision))
        if news is not None:
            self._wants = news
            self._digests.expect(news.digests)
        if self._options.verify != "off":  # they wait for them before they free anything
            digests = self._digests.compute(grant.live_consumers, grant.epoch, self._options.verify)
            call(self._actor.post_digests.remote(grant.epoch, digests))
        if self._packer is not None:
            self._pack_chunks(self._packer, grant)
        measures: LedgerMeasures = self._await_actor(all_freed)
        return measures

    def _pack_chunks(self, packer: TrainerPacker, grant: EpochGrant) -> None:
        """Pack what consumers ask for, until they have freed everything."""
        revision = packer.revision
        packer.expect(self._wants.packs, grant.live_consumers)
        if not packer.serves(grant.live_consumers):
            return
        if packer.revision != revision:
            assert self._transport is not None
            call(self._actor.post_pack_metadata.remote(packer.revision, self._transport.metadata()))
        packed: dict[PackRequest, Slot] = {}
        while requests := self._await_actor(self._actor.exchange_packs.remote(grant.epoch, packed)):
            packed = packer.pack(requests)

    def _serve_staged(self) -> RankStats:
        """The gather loop: credit for a slot first, then gather into it, then publish."""
        ring, gather_s = self._export_ring(), 0.0
        for group, members in iter_groups(self._layout.names, self._layout.group_lens):
            while not ring.has_free_slot:
                ring.release(self._await_actor(self._actor.wait_freed.remote()))
            started = time.monotonic()
            tensors = self._source.gather(members)
            gather_s += time.monotonic() - started
            self._check_gathered(group, members, tensors)
            if not tensors:
                continue
            segment, packed = ring.fill(group, tensors)
            call(self._actor.publish_packed.remote(group, segment, packed))
        freed, measures = self._await_actor(self._actor.end_sync.remote())
        ring.release(freed)
        return _rank_stats(measures, gather_s)

    def _export_ring(self) -> ExportRing:
        """Made at the first version, when the groups are known: L + 1 slots, each as large as the largest."""
        if self._ring is None:
            held = set(self._source.held_names())
            metas = {meta.name: meta for meta in self._manifest}
            groups = [
                [metas[name] for name in members if name in held]
                for _, members in iter_groups(self._layout.names, self._layout.group_lens)
            ]
            self._ring = ExportRing(
                f"{self._options.service}-rank{self._rank}", groups, self._options.gather_lookahead + 1
            )
            for segment in self._ring.segments:
                call(self._actor.map_segment.remote(segment.name))
                segment.unlink()
        self._ring.reset()
        return self._ring

    def _check_gathered(self, group: int, members: Any, tensors: Any) -> None:
        """What the source yields must be what it said it holds, in the shapes it said."""
        held = set(self._source.held_names())
        expected = {name for name in members if name in held}
        if set(tensors) != expected:
            raise InvalidLayoutError(
                f"rank {self._rank}, group {group}: the source yields {sorted(set(tensors) - expected)[:3]} too many "
                f"and {sorted(expected - set(tensors))[:3]} too few against its held names"
            )
        metas = {meta.name: meta for meta in self._manifest}
        for name, tensor in tensors.items():
            meta = metas[name]
            if tuple(tensor.shape) != meta.shape or dtype_name(tensor.dtype) != meta.dtype:
                raise InvalidLayoutError(
                    f"rank {self._rank}: {name!r} was announced as {meta.shape} {meta.dtype} and gathered as "
                    f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"
                )

    def _give_up(self, grant: EpochGrant, error: BaseException) -> None:
        """Tell everyone, so that nobody waits for this rank."""
        with contextlib.suppress(Exception):
            message = f"{type(error).__name__}: {error}"
            call(self._registry.fail_publish.remote(self._rank, self._token, grant.epoch, message), timeout_s=5)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SyncError(f"the publisher of rank {self._rank} is closed")


def _rank_stats(measures: LedgerMeasures, gather_s: float = 0.0) -> RankStats:
    return RankStats(0, measures.waits, gather_s, measures.inflight_groups, measures.rejected_signals)


def _mode(mode: str | PublishMode) -> PublishMode:
    try:
        return PublishMode(mode)
    except ValueError:
        raise ValueError(f"mode must be one of {[m.value for m in PublishMode]}, got {mode!r}") from None
