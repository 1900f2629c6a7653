"""Ray Direct Transport over NIXL: in the pattern of a sharded pull, and bare into registered targets.

The pattern is that of vLLM's sharded pull: a worker asks each trainer rank for its slices of one gather group; the
rank packs them into one of two registered serve slots and returns it; Ray moves it into one of the worker's two
registered receive buffers; the worker scatters. The next request is under way meanwhile, and a slot is asked for
again only after its last content was read. The thing to watch: Ray's own NIXL agent keeps a thread that spins, so
these members live for one turn only.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import ray
import torch

from weightsync.service.bench.layout import Box, Layout
from weightsync.service.bench.members import Member
from weightsync.service.bench.stage import Cast, seconds
from weightsync.service.bench.ways.base import Needs, Way, missing_package
from weightsync.service.bench.ways.slicing import cut

_SLOTS = 2


class _RayDirect(Way):
    own_members = True

    def refusal(self, layout: Layout) -> str | None:
        return missing_package("ray.experimental.rdt", "Ray Direct Transport (Ray 2.60)")

    def needs(self, layout: Layout) -> Needs:
        return Needs(memory=layout.nbytes + layout.wanted_nbytes + 2 * _SLOTS * _largest_packs(layout))

    def close(self, cast: Cast) -> None:
        cast.each(cast.members, _forget)


class PackedPull(_RayDirect):
    """Pack, read, scatter, group by group."""

    def open(self, cast: Cast) -> None:
        cast.each(cast.trainers, _make_slots)
        cast.each(cast.workers, _make_receive_buffers)

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {"Ray Direct, packed pull": seconds(lambda: cast.each(cast.workers, _pull_packed, cast.trainers))}


class IntoTargets(_RayDirect):
    """Whole pieces straight into the worker's tensors; only where every piece is one run on both sides."""

    def refusal(self, layout: Layout) -> str | None:
        if not layout.contiguous:
            return "column slices cannot be targets of Ray Direct Transport, which takes contiguous tensors only"
        return super().refusal(layout)

    def open(self, cast: Cast) -> None:
        cast.each(cast.members, _register_tensors)

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {"Ray Direct, into targets": seconds(lambda: cast.each(cast.workers, _pull_whole, cast.trainers))}


def _pieces_by_group(layout: Layout, rank: int, worker: int) -> list[list[tuple[str, Box]]]:
    """What a worker wants of a rank, group by group; groups without any are empty."""
    piece_of = dict(layout.pieces(rank, worker))
    return [[(spec.name, piece_of[spec.name]) for spec in group if spec.name in piece_of] for group in layout.groups]


def _pack_nbytes(layout: Layout, rank: int, worker: int) -> list[int]:
    """Bytes of what a worker wants of a rank, group by group."""
    return [sum(piece.nbytes for _, piece in group) for group in _pieces_by_group(layout, rank, worker)]


def _largest_packs(layout: Layout) -> int:
    """Bytes of one slot for each pair of rank and worker."""
    pairs = [(rank, worker) for rank in range(layout.producers) for worker in range(layout.consumers)]
    return sum(max(_pack_nbytes(layout, *pair)) for pair in pairs)


# -- in the trainer ---------------------------------------------------------------------------------------


def _make_slots(member: Member) -> None:
    layout = member.layout
    member.kept["pieces"] = [_pieces_by_group(layout, member.index, worker) for worker in range(layout.consumers)]
    member.kept["slots"] = [
        _registered([max(_pack_nbytes(layout, member.index, worker))] * _SLOTS) for worker in range(layout.consumers)
    ]


def _pack(member: Member, worker: int, group: int, slot: int) -> list[torch.Tensor]:
    """A worker's slices of a group in a serve slot, as one blob."""
    memory, offset = member.kept["slots"][worker][slot], 0
    held = member.boxes
    for name, piece in member.kept["pieces"][worker][group]:
        spec = member.layout.tensors[name]
        packed = memory[offset : offset + piece.nbytes].view(torch.bfloat16).view(spec.shape_of(piece))
        packed.copy_(cut(member.tensors[name], held[name], piece))
        offset += piece.nbytes
    return [memory[:offset]]


def _give_whole(member: Member, worker: int) -> list[torch.Tensor]:
    return [cut(member.tensors[n], member.boxes[n], piece) for n, piece in member.layout.pieces(member.index, worker)]


# -- in the worker ----------------------------------------------------------------------------------------


def _make_receive_buffers(member: Member) -> None:
    layout = member.layout
    ranks = range(layout.producers)
    member.kept["pieces"] = [_pieces_by_group(layout, rank, member.index) for rank in ranks]
    member.kept["nbytes"] = [_pack_nbytes(layout, rank, member.index) for rank in ranks]
    member.kept["slots"] = [_registered([max(member.kept["nbytes"][rank])] * _SLOTS) for rank in ranks]


def _pull_packed(member: Member, trainers: list[Any]) -> None:
    nbytes = member.kept["nbytes"]
    groups = range(len(member.layout.groups))
    wanted = deque((rank, group) for group in groups for rank in range(len(trainers)) if nbytes[rank][group])
    asked: deque[tuple[int, int, torch.Tensor, Any]] = deque()
    sequence, outstanding = Counter[int](), Counter[int]()
    while wanted or asked:
        while wanted and outstanding[wanted[0][0]] < _SLOTS:
            rank, group = wanted.popleft()
            slot = sequence[rank] % _SLOTS
            ref = trainers[rank].do.options(tensor_transport="nixl").remote(_pack, member.index, group, slot)
            target = member.kept["slots"][rank][slot][: nbytes[rank][group]]
            ray.experimental.rdt.set_target_for_ref(ref, [target])
            asked.append((rank, group, target, ref))
            sequence[rank] += 1
            outstanding[rank] += 1
        rank, group, target, ref = asked.popleft()
        (received,) = ray.get(ref)
        _scatter(member, rank, group, received)
        outstanding[rank] -= 1


def _scatter(member: Member, rank: int, group: int, blob: torch.Tensor) -> None:
    offset = 0
    for name, piece in member.kept["pieces"][rank][group]:
        spec = member.layout.tensors[name]
        part = blob[offset : offset + piece.nbytes].view(torch.bfloat16).view(spec.shape_of(piece))
        cut(member.tensors[name], member.boxes[name], piece).copy_(part)
        offset += piece.nbytes


def _pull_whole(member: Member, trainers: list[Any]) -> None:
    targets, refs = [], []
    for rank, trainer in enumerate(trainers):
        ref = trainer.do.options(tensor_transport="nixl").remote(_give_whole, member.index)
        own = [cut(member.tensors[n], member.boxes[n], piece) for n, piece in member.layout.pieces(rank, member.index)]
        ray.experimental.rdt.set_target_for_ref(ref, own)
        targets.append(own)  # Ray holds targets weakly
        refs.append(ref)
    for ref in refs:
        ray.get(ref)


# -- both -------------------------------------------------------------------------------------------------


def _registered(sizes: list[int]) -> list[torch.Tensor]:
    from ray.experimental.rdt import register_nixl_memory

    buffers = [torch.full((size,), 0, dtype=torch.uint8) for size in sizes]
    for buffer in buffers:
        if buffer.numel():
            register_nixl_memory(buffer)
    return buffers


def _register_tensors(member: Member) -> None:
    from ray.experimental.rdt import register_nixl_memory

    for tensor in member.tensors.values():
        register_nixl_memory(tensor)


def _forget(member: Member) -> None:
    member.kept.clear()
