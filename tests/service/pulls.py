"""A pull without a service: sources as registrations, the real layout, plan and landings, and bytes moved by hand."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from weightsync.actors.destinations import Destinations
from weightsync.actors.interfaces import WeightSource
from weightsync.actors.landings import Landings
from weightsync.actors.membership import assemble_layout, check_manifest
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.messages import InstallMode, ProducerRegistration, PublishMode, TensorMeta
from weightsync.service.shard_table import check_manifest as check_names
from weightsync.service.shard_table import check_readable, shard_table
from weightsync.service.targets import StateDictTarget


def registrations(sources: Sequence[WeightSource]) -> list[ProducerRegistration]:
    """What each source's rank would say when it joins; contradictions are refused as the registry would."""
    known: dict[str, tuple[int, TensorMeta]] = {}
    out = []
    for rank, source in enumerate(sources):
        source.refresh()
        manifest, shards = source.manifest(), source.shards()
        check_names(rank, manifest)
        check_readable(rank, shards)
        table = shard_table(f"r{rank}", manifest, shards, [s.tensor.data_ptr() for s in shards], dense=False)
        held = source.held_names()
        own = ProducerRegistration(
            rank, len(sources), PublishMode.LIVE, manifest, table, held, f"r{rank}", b"", "nixl", "n", 1
        )
        check_manifest(own, known)
        known.update({meta.name: (rank, meta) for meta in manifest if meta.name not in known})
        out.append(own)
    return out


def manifest_of(sources: Sequence[WeightSource]) -> dict[str, TensorMeta]:
    return {meta.name: meta for source in sources for meta in source.manifest()}


def pull_whole(sources: Sequence[WeightSource], names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Everything that is published, pulled into new tensors of its names and shapes."""
    metas = manifest_of(sources)
    wanted = metas if names is None else {name: metas[name] for name in names}
    targets = {n: torch.full(m.shape, 7).to(dtype_from_name(m.dtype)) for n, m in wanted.items()}
    pull(sources, targets)
    return targets


def pull(sources: Sequence[WeightSource], targets: Mapping[str, torch.Tensor]) -> int:
    """Plan and carry out; returns the bytes moved. A byte written twice, or read outside of a shard, fails."""
    joined = registrations(sources)
    layout = assemble_layout(joined, 1, 1)
    metas = {meta.name: meta for meta in layout.manifest}
    recorded = StateDictTarget(dict(targets)).record({n: (m.dtype, m.shape) for n, m in metas.items()})
    copies = [replace(copy, src_name=metas[copy.src_name].alias_of or copy.src_name) for copy in recorded]
    landings = Landings(layout, copies, Destinations(dict(targets), copies, InstallMode.IN_PLACE), 0)
    written: list[tuple[int, int]] = []
    moved = 0
    for (_, rank), runs in landings.runs.items():
        held = _stretches(shard.tensor for shard in sources[rank].shards())
        for src, dst, nbytes in zip(runs.src_addr.tolist(), runs.dst_addr.tolist(), runs.nbytes.tolist(), strict=True):
            assert any(start <= src and src + nbytes <= end for start, end in held), "a read outside of every shard"
            ctypes.memmove(dst, src, nbytes)
            written.append((dst, dst + nbytes))
            moved += nbytes
    written.sort()
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(written)), "written twice"
    for scatters in landings.scatters.values():
        for scatter in scatters:
            scatter.copy.destination_view(targets[scatter.copy.param_name]).copy_(scatter.result())
    return moved


def _stretches(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """From the first byte of a tensor to its last; those that touch are one."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(map(_extent, tensors)):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(_bits(got[name]), _bits(tensor)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
