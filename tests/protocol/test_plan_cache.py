"""Equal layouts are planned once, and a placed plan reads the addresses it was placed at."""

import pytest
import torch

from weightsync.protocol.affine import contiguous_split_map, replicated_map
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.plan_cache import PlanCache


def test_equal_layouts_share_one_plan():
    cache = PlanCache()
    first, second = (contiguous_split_map((8, 4), [4, 4], 0) for _ in range(2))
    whole = replicated_map((8, 4), 1)
    assert cache.plan(whole, first) is cache.plan(whole, second)
    assert cache.plan(whole, first) is not cache.plan(whole, first, holder_policy="highest")
    assert len(cache) == 2


def test_a_placed_plan_reads_the_shards_at_their_addresses():
    cache = PlanCache()
    plan = cache.plan(replicated_map((6, 4), 1), contiguous_split_map((6, 4), [2, 4], 0))
    logical = torch.arange(24, dtype=torch.int16).reshape(6, 4)
    shards = {0: logical[:2].clone(), 1: logical[2:].clone()}
    target = torch.zeros(30, dtype=torch.int16)
    placed = cache.place(plan, 2, {r: t.data_ptr() for r, t in shards.items()}, dst_byte=12)
    memory = target.numpy().view("uint8")
    for runs in placed:
        source, base = (
            shards[runs.source_rank].numpy().reshape(-1).view("uint8"),
            shards[runs.source_rank].data_ptr(),
        )
        for s, d, n in zip(runs.src_addr.tolist(), runs.dst_byte.tolist(), runs.nbytes.tolist(), strict=True):
            memory[d : d + n] = source[s - base : s - base + n]
    assert torch.equal(target[6:].reshape(6, 4), logical)


def test_a_missing_address_is_refused():
    cache = PlanCache()
    plan = cache.plan(contiguous_split_map((6, 4), [3, 3], 0), contiguous_split_map((6, 4), [2, 4], 0))
    with pytest.raises(InvalidLayoutError, match=r"source rank 1; known ranks are \[0\]"):
        cache.place(plan, 2, {0: 64})
