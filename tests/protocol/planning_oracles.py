"""Oracles for planning tests: element by element, sharing no code with what they check."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from weightsync.protocol.execute import Buffer, execute_plan, execute_runs
from weightsync.protocol.lowering import lower_segments


def numbered(shape):
    """A logical tensor whose every element is its own flat index."""
    return torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)


def elements(shape, offset, strides):
    """Flat addresses of a strided region, one at a time, in loop order."""
    return [
        offset + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in product(*(range(n) for n in shape))
    ]


def shards_by_definition(layout):
    """Each rank's shard as flat logical indices, straight from the definition of a piece. -1: unwritten."""
    shards = []
    for shape, pieces in zip(layout.shard_shapes, layout.pieces_by_rank, strict=True):
        flat = np.full(int(np.prod(shape)), -1, dtype=np.int32)
        for p in pieces:
            for s, d in zip(
                elements(p.shape, p.source_offset, p.source_strides),
                elements(p.shape, p.dest_offset, p.dest_strides),
                strict=True,
            ):
                assert flat[d] == -1, "a shard element is written twice"
                flat[d] = s
        shards.append(torch.from_numpy(flat).reshape(shape))
    return shards


def check_plan(plan, target, source):
    """Executing the plan, as segments and as runs, gives every target shard, each element written once."""
    expected = shards_by_definition(target)
    own = shards_by_definition(source)
    written = [np.zeros(int(np.prod(s)), dtype=int) for s in target.shard_shapes]
    for s in plan.segments:
        for t in elements(s.shape, s.target_offset, s.target_strides):
            written[s.target_rank][t] += 1
    assert all((w == 1).all() for w in written)
    got = [torch.full_like(e, -7) for e in expected]
    assert execute_plan(plan, own, got) == 4 * sum(e.numel() for e in expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    again = [torch.full_like(e, -7) for e in expected]
    runs = lower_segments(plan.segments, 4)
    execute_runs(
        runs,
        {r: Buffer.of(t) for r, t in enumerate(own)},
        {r: Buffer.of(t) for r, t in enumerate(again)},
    )
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
