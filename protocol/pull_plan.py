"""Plans for packed pulls: which slices of which gather group to ask of which producer, in which order.

Per gather group and owner class there is one chunk: the producer packs its slices into one blob, the consumer
reads it and scatters. The thing to watch is the end of a group: its free signal goes to every owner of any of
its names, exactly once, after the consumer's last chunk of that group; groups it pulls nothing from are in
`pre_free` and are signalled at the start of a sync.

A plan is a pure function of its inputs, so that equal deployments have equal digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weightsync.protocol.copies import OpChain, RecordedCopy
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.packing import pack_offsets
from weightsync.protocol.routing import Router
from weightsync.protocol.views import chain_result

Key = tuple[str, OpChain]
PackedSlice = tuple[int, tuple[int, ...], torch.dtype]
"""Byte offset in the blob, shape, dtype."""
FreeSignal = tuple[int, tuple[int, ...]]
"""A gather group, and the producers to tell that this consumer is done with it."""


@dataclass(frozen=True)
class Chunk:
    """One packed pull.

    `scatters` pairs an index into `keys` with the copy its slice feeds; `materialize` are the modules of which
    this is the first chunk, `quantize` those of which it is the last; `seq` is the issue index at `owner`.
    """

    scatters: tuple[tuple[int, RecordedCopy], ...]
    keys: tuple[Key, ...]
    pack_layout: tuple[PackedSlice, ...]
    pack_bytes: int
    materialize: tuple[Hashable, ...]
    quantize: tuple[Hashable, ...]
    free: tuple[FreeSignal, ...]
    owner: int
    seq: int


@dataclass(frozen=True)
class PullPlan:
    """All chunks of one consumer in issue order, and the groups it frees without pulling."""

    chunks: tuple[Chunk, ...]
    pre_free: tuple[FreeSignal, ...]


@dataclass
class _Draft:
    """A chunk while copies are collected."""

    group: int
    owner: int
    copies: list[RecordedCopy] = field(default_factory=list)


def build_pull_plan(
    copies_by_name: Mapping[str, Sequence[RecordedCopy]],
    *,
    names: Sequence[str],
    group_lens: Sequence[int],
    name_meta: Mapping[str, tuple[str, tuple[int, ...]]],
    live_names: Collection[str],
    router: Router,
    consumer_id: int,
) -> PullPlan:
    """Plan one consumer's pulls.

    Args:
        copies_by_name: name -> the recorded copies of the module that consumes it; names of one module share
            one list object.
        names: every published name, group by group.
        group_lens: names per group.
        name_meta: name -> (dtype name, global shape).
        live_names: names the consumer's loader copied from.
        router: owners and routes.
        consumer_id: fleet-wide id.

    Raises:
        InvalidLayoutError: a live name has no copies or is not published; group lengths do not add up.
    """
    if sum(group_lens) != len(names):
        raise InvalidLayoutError(f"groups hold {sum(group_lens)} names, {len(names)} are given")
    _check_live(copies_by_name, names, live_names)
    drafts, pre_free = [], []
    start = 0
    for group, length in enumerate(group_lens):
        members = names[start : start + length]
        start += length
        drafted = _draft_group(group, members, copies_by_name, router, consumer_id)
        if drafted:
            drafts += drafted
        else:
            pre_free.append((group, tuple(router.group_owners(group))))
    return PullPlan(tuple(_finish(drafts, name_meta, router)), tuple(pre_free))


def plan_digest(keys: Sequence[Key]) -> str:
    """A digest of what is asked for and in which order, equal in every process.

    Deployments that share serve slots must have equal digests.
    """
    digest = hashlib.sha256()
    for name, chain in keys:
        digest.update(repr((name, chain)).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _check_live(
    copies_by_name: Mapping[str, Sequence[RecordedCopy]], names: Sequence[str], live_names: Collection[str]
) -> None:
    published = set(names)
    unplanned = sorted(
        name
        for name in live_names
        if name not in published or not any(copy.src_name == name for copy in copies_by_name.get(name, ()))
    )
    if unplanned:
        raise InvalidLayoutError(
            f"{unplanned[:5]} are loaded by this worker but no pull of them could be planned (not published, or "
            "without a recorded copy)"
        )


def _draft_group(
    group: int,
    members: Sequence[str],
    copies_by_name: Mapping[str, Sequence[RecordedCopy]],
    router: Router,
    consumer_id: int,
) -> list[_Draft]:
    """The group's copies by owner class, in the order in which their modules load them."""
    drafts: dict[int, _Draft] = {}
    wanted = {name for name in members if name in copies_by_name}
    seen: set[int] = set()
    for name in members:
        copies = copies_by_name.get(name, ())
        if id(copies) in seen:
            continue
        seen.add(id(copies))
        for copy in copies:
            if copy.src_name not in wanted:
                continue
            owner_class = router.class_of(copy.src_name)
            if owner_class not in drafts:
                drafts[owner_class] = _Draft(group, router.producer_for(owner_class, group, consumer_id))
            drafts[owner_class].copies.append(copy)
    return list(drafts.values())


def _finish(
    drafts: Sequence[_Draft], name_meta: Mapping[str, tuple[str, tuple[int, ...]]], router: Router
) -> list[Chunk]:
    first_of: dict[Hashable, int] = {}
    last_of: dict[Hashable, int] = {}
    last_of_group: dict[int, int] = {}
    for index, draft in enumerate(drafts):
        last_of_group[draft.group] = index
        for copy in draft.copies:
            first_of.setdefault(copy.module, index)
            last_of[copy.module] = index
    issued: dict[int, int] = {}
    chunks = []
    for index, draft in enumerate(drafts):
        seq = issued.get(draft.owner, 0)
        issued[draft.owner] = seq + 1
        index_of: dict[Key, int] = {}
        for copy in draft.copies:
            index_of.setdefault((copy.src_name, copy.op_chain), len(index_of))
        layout, nbytes = _layout(list(index_of), name_meta)
        modules = list(dict.fromkeys(copy.module for copy in draft.copies))
        ends = last_of_group[draft.group] == index
        chunks.append(
            Chunk(
                scatters=tuple((index_of[copy.src_name, copy.op_chain], copy) for copy in draft.copies),
                keys=tuple(index_of),
                pack_layout=layout,
                pack_bytes=nbytes,
                materialize=tuple(m for m in modules if m is not None and first_of[m] == index),
                quantize=tuple(m for m in modules if m is not None and last_of[m] == index),
                free=((draft.group, tuple(router.group_owners(draft.group))),) if ends else (),
                owner=draft.owner,
                seq=seq,
            )
        )
    return chunks


def _layout(
    keys: Sequence[Key], name_meta: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[tuple[PackedSlice, ...], int]:
    results = []
    for name, chain in keys:
        dtype_name, shape = name_meta[name]
        results.append(chain_result(shape, dtype_from_name(dtype_name), chain))
    offsets, nbytes = pack_offsets([(torch.Size(shape).numel(), dtype) for shape, dtype in results])
    return tuple((o, shape, dtype) for o, (shape, dtype) in zip(offsets, results, strict=True)), nbytes
