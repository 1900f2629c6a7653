"""NVIDIA ModelExpress's reshard planner and its NIXL transport, on host memory.

Its receiver is for GPUs; what it does with a plan is done here with its own parts: exact segments, and sources of
too many runs read whole into staging and sliced from there. Planned and registered once, descriptors made anew at
each read, as its transport does.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch

from weightsync.service.bench.layout import ITEMSIZE, Layout
from weightsync.service.bench.members import Member, addresses
from weightsync.service.bench.stage import Cast, seconds
from weightsync.service.bench.ways.base import Needs, Way, missing_package

_TIMEOUT_S = 60.0


class ModelExpress(Way):
    def refusal(self, layout: Layout) -> str | None:
        return missing_package("modelexpress.refit.reshard", "ModelExpress (modelexpress 0.7)")

    def needs(self, layout: Layout) -> Needs:
        return Needs(memory=layout.consumers * layout.nbytes)  # sources of many runs are staged whole

    def open(self, cast: Cast) -> None:
        served = cast.each(cast.trainers, _serve)
        cast.each(cast.workers, _plan, served)

    def move(self, cast: Cast, version: int) -> dict[str, float]:
        return {"ModelExpress": seconds(lambda: cast.each(cast.workers, _pull))}

    def close(self, cast: Cast) -> None:
        cast.each(cast.workers, _shut_down)
        cast.each(cast.trainers, _shut_down)


def _manager(member: Member) -> Any:
    """Its NIXL agent, told that memory is the host's."""
    from modelexpress.accelerators import CudaAcceleratorBackend
    from modelexpress.nixl_transfer import NixlTransferManager

    class Host(CudaAcceleratorBackend):
        nixl_mem_type = "DRAM"

        def set_device(self, device_id: int) -> None:
            pass

        def synchronize(self, device_id: int) -> None:
            pass

    manager = NixlTransferManager(f"bench-{secrets.token_hex(4)}", 0, accelerator_backend=Host())
    manager.initialize()
    member.kept["manager"] = manager
    return manager


def _serve(member: Member) -> tuple[bytes, dict[str, int]]:
    manager = _manager(member)
    manager.register_tensors(member.tensors)
    return manager.nixl_metadata, addresses(member)


def _plan(member: Member, served: list[tuple[bytes, dict[str, int]]]) -> None:
    from modelexpress.refit.reshard import (
        NixlReshardTransport,
        RecordedCopy,
        Shard,
        SourceInfo,
        plan_transfer,
    )
    from modelexpress.refit.reshard.types import CaptureResult

    specs, layout = member.layout.tensors, member.layout
    copies = [
        RecordedCopy(
            src_name=name,
            op_chain=tuple(
                ("narrow", (dim, start, length), ())
                for dim, (start, length) in enumerate(((box.row, box.rows), (box.column, box.columns)))
                if dim < len(specs[name].shape)
            ),
            param_name=name,
            dest_offset=0,
            dest_shape=tuple(member.tensors[name].shape),
            dest_stride=tuple(member.tensors[name].stride()),
            dest_dtype=torch.bfloat16,
        )
        for name, box in member.boxes.items()
    ]
    sources = {
        name: SourceInfo(
            spec.shape,
            torch.bfloat16,
            ITEMSIZE,
            [
                Shard((box.row, 0)[: len(spec.shape)], spec.shape_of(box), str(rank), source[name], ITEMSIZE)
                for rank, (_, source) in enumerate(served)
                if (box := layout.held(rank).get(name)) is not None
            ],
        )
        for name, spec in specs.items()
    }
    plan = plan_transfer(CaptureResult(copies=copies), sources)
    if plan.fallback:
        raise RuntimeError(f"ModelExpress cannot plan {plan.fallback[:3]}")
    staging = {full.src_name: torch.full(full.global_shape, 0, dtype=full.dtype) for full in plan.full_pulls}
    manager = _manager(member)
    manager.register_tensors({**member.tensors, **{f"staged {name}": tensor for name, tensor in staging.items()}})
    agents = {str(rank): manager.add_remote_agent(metadata) for rank, (metadata, _) in enumerate(served)}
    member.kept.update(
        plan=plan,
        staging=staging,
        transport=NixlReshardTransport(
            manager, agents, dict.fromkeys(agents, 0), mem_type="DRAM", timeout_seconds=_TIMEOUT_S
        ),
    )


def _pull(member: Member) -> None:
    from modelexpress.refit.reshard import ReadDescriptor
    from modelexpress.refit.reshard.transfer_plan import exact_descriptors

    plan, staging = member.kept["plan"], member.kept["staging"]
    descriptors = exact_descriptors(plan, lambda name: member.tensors[name].data_ptr())
    for full in plan.full_pulls:
        addr = staging[full.src_name].data_ptr()
        descriptors += [ReadDescriptor(s.session, s.src_addr, addr + s.dst_byte, s.nbytes) for s in full.segments]
    member.kept["transport"].read(descriptors)
    for full in plan.full_pulls:
        for copy in full.copies:
            view = staging[full.src_name]
            for op, arguments, _ in copy.op_chain:
                view = getattr(view, op)(*arguments)
            member.tensors[copy.param_name].copy_(view)


def _shut_down(member: Member) -> None:
    member.kept.pop("manager").shutdown()
    member.kept.clear()
