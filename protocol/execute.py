"""The reference executor: carry out a plan on plain CPU memory, by address.

It exists so that tests and verification can run exactly what a transport would run. The thing to watch: both
entry points trust nothing: a plan without a matching proof, a buffer of the wrong size or a run outside its
buffer is refused before the first byte is written. Transfers between processes are left to the transports.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.lowering import SegmentRuns
from weightsync.protocol.transfer import TransferPlan


@dataclass(frozen=True)
class Buffer:
    """Plain memory of this process: `nbytes` bytes at `addr`. The caller keeps it alive."""

    addr: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Buffer:
        """The memory of a C-contiguous CPU tensor."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise InvalidLayoutError(
                f"tensor of shape {tuple(tensor.shape)} on {tensor.device} is not contiguous CPU memory"
            )
        return cls(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def execute_plan(plan: TransferPlan, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> int:
    """Copy every segment between C-contiguous CPU shards, one tensor a rank; returns the bytes moved.

    Raises InvalidLayoutError when the proof is not of these segments, or shapes or dtypes do not match.
    """
    written = plan.statistics.elements_by_target
    if plan.proof.segments != len(plan.segments) or plan.proof.target_elements != tuple(
        written.get(rank, 0) for rank in range(len(plan.target_shapes))
    ):
        raise InvalidLayoutError("the plan's coverage proof is not of its segments: prove_segments again")
    _check_shards("source", sources, plan.source_shapes)
    _check_shards("target", targets, plan.target_shapes)
    dtypes = {t.dtype for t in (*sources, *targets)}
    if len(dtypes) > 1:
        raise InvalidLayoutError(
            f"shards of several dtypes {sorted(map(str, dtypes))}: a plan copies, it never converts"
        )
    moved = 0
    for s in plan.segments:
        source, target = sources[s.source_rank], targets[s.target_rank]
        target.as_strided(s.shape, s.target_strides, s.target_offset).copy_(
            source.as_strided(s.shape, s.source_strides, s.source_offset)
        )
        moved += s.numel * source.element_size()
    return moved


def execute_runs(runs: Sequence[SegmentRuns], sources: Mapping[int, Buffer], targets: Mapping[int, Buffer]) -> int:
    """Copy every run by address, as a transport would; returns the bytes moved.

    Raises InvalidLayoutError for a rank without a buffer or a run outside one, before anything is written.
    """
    for r in runs:
        if r.source_rank not in sources or r.target_rank not in targets:
            raise InvalidLayoutError(f"no buffer for source rank {r.source_rank} or target rank {r.target_rank}")
        for side, offsets, buffer in (
            (f"source rank {r.source_rank}", r.source_byte, sources[r.source_rank]),
            (f"target rank {r.target_rank}", r.target_byte, targets[r.target_rank]),
        ):
            if len(offsets) and (offsets.min() < 0 or (offsets + r.nbytes).max() > buffer.nbytes):
                raise InvalidLayoutError(
                    f"{side}: runs reach byte {int((offsets + r.nbytes).max())} of a buffer of {buffer.nbytes}"
                )
    moved = 0
    for r in runs:
        source, target = sources[r.source_rank].addr, targets[r.target_rank].addr
        for s, t, n in zip(r.source_byte.tolist(), r.target_byte.tolist(), r.nbytes.tolist(), strict=True):
            ctypes.memmove(target + t, source + s, n)
            moved += n
    return moved


def _check_shards(side: str, shards: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
    if len(shards) != len(shapes):
        raise InvalidLayoutError(f"{len(shards)} {side} shards for {len(shapes)} ranks")
    for rank, (shard, shape) in enumerate(zip(shards, shapes, strict=True)):
        if tuple(shard.shape) != shape or not shard.is_contiguous() or shard.device.type != "cpu":
            raise InvalidLayoutError(
                f"{side} rank {rank}: need a contiguous CPU tensor of shape {shape}, "
                f"got {tuple(shard.shape)} with strides {shard.stride()} on {shard.device}"
            )
