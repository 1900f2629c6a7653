"""Digests tell wrong bytes from right ones, however a region is cut into runs, and name whose they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.actors.digests import (
    SAMPLED_SHARE,
    Regions,
    ShardDigests,
    chosen_regions,
    differing,
    digests,
    mismatch,
)
from weightsync.protocol.errors import SyncError


def regions(memory: torch.Tensor, *runs_of_regions: list[tuple[int, int]]) -> Regions:
    """Regions of (offset, bytes) runs in `memory`."""
    runs = [run for own in runs_of_regions for run in own]
    offsets, nbytes = (np.array([run[i] for run in runs], dtype=np.int64) for i in (0, 1))
    return Regions(offsets + memory.data_ptr(), nbytes, tuple(len(own) for own in runs_of_regions))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_digest_is_that_of_the_bytes_in_order_however_they_are_cut(data: st.DataObject) -> None:
    content = bytes(data.draw(st.lists(st.integers(0, 255), min_size=4, max_size=40)))
    memory = torch.tensor(list(content), dtype=torch.uint8)
    cuts = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content)), max_size=4))})
    cut = [(a, b - a) for a, b in itertools.pairwise(cuts)]
    whole, pieces = regions(memory, [(0, len(content))]), regions(memory, cut)
    assert digests([whole], [[0]]) == digests([pieces], [[0]]) == [[xxhash.xxh3_64_intdigest(content)]]

    expected = digests([pieces], [[0]])[0]
    assert differing(whole, expected) == []
    at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    memory[at] ^= 1 << bit
    assert differing(whole, expected) == [0], "one flipped bit"


def test_only_chosen_regions_are_computed_and_compared() -> None:
    memory = torch.arange(9, dtype=torch.uint8)
    three = regions(memory, [(0, 3)], [(3, 2), (5, 1)], [(6, 3)])
    expected = digests([three], [[1]])[0]
    assert [digest < 0 for digest in expected] == [True, False, True]
    memory[0] += 1
    assert differing(three, expected) == []
    memory[5] += 1
    assert differing(three, expected) == [1]


def test_sampling_visits_every_region_within_its_share_of_epochs() -> None:
    for count in (0, 1, 7, 8, 9, 100):
        seen = [index for epoch in range(5, 5 + SAMPLED_SHARE) for index in chosen_regions(count, epoch, "sampled")]
        assert sorted(seen) == list(range(count))
        assert list(chosen_regions(count, 3, "full")) == list(range(count))
        assert list(chosen_regions(count, 3, "off")) == []


def test_a_rank_computes_what_live_consumers_check_and_nothing_outside_its_memory() -> None:
    memory = torch.arange(32, dtype=torch.uint8)
    inside = regions(memory, [(8, 4), (20, 2)])
    held = [(memory.data_ptr() + 8, 8), (memory.data_ptr() + 20, 12)]
    own = ShardDigests(held)
    own.expect({3: (inside,), 4: (inside,)})
    assert own.compute({3}, 1, "full") == {3: digests([inside], [[0]])}
    for outside in ([(7, 2)], [(15, 2)], [(16, 1)], [(31, 2)], [(0, 1)]):
        with pytest.raises(SyncError, match="consumer 5 asks for digests of memory that this rank has not published"):
            own.expect({5: (regions(memory, outside),)})
    relative = ShardDigests(held, base=memory.data_ptr())
    relative.expect({3: (Regions(inside.addr - memory.data_ptr(), inside.nbytes, inside.counts),)})
    assert relative.compute({3}, 1, "full") == own_digests(inside)


def own_digests(one: Regions) -> dict[int, list[list[int]]]:
    return {3: digests([one], [[0]])}


def test_the_error_names_tensor_rank_and_version() -> None:
    assert "'a.weight' as read from rank 2 is not what it published as version 7" in str(mismatch(["a.weight"], 2, 7))
    assert "'a.weight' and 2 more regions as read from" in str(mismatch(["a.weight", "b", "c"], 2, 7))


def test_shards_between_each_other_are_one_stretch_of_published_memory() -> None:
    memory = np.arange(64, dtype=np.uint8)
    base = memory.ctypes.data
    held = [(base + start, nbytes) for start, nbytes in ((0, 20), (4, 8), (20, 12))]  # one in another, one goes on
    own = ShardDigests(held, base)
    own.expect({1: (Regions(np.array([14, 30]), np.array([10, 2]), (1, 1)),)})
    assert own.compute([1], 0, "full") == {
        1: [[xxhash.xxh3_64(memory[a : a + n].tobytes()).intdigest() for a, n in ((14, 10), (30, 2))]]
    }
    with pytest.raises(SyncError, match="not published"):
        own.expect({1: (Regions(np.array([30]), np.array([3]), (1,)),)})
