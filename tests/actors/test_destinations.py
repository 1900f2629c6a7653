"""The flip exchanges exactly what copies write, and no memory is written by two of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.actors import destinations
from weightsync.actors.destinations import Destinations, distinct_copies
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.messages import InstallMode
from weightsync.protocol.written import MemoryRegion, find_shared_bytes


def copy(src: str, into: str, view: torch.Tensor, tensor: torch.Tensor) -> RecordedCopy:
    offset = int(view.storage_offset() - tensor.storage_offset())
    return RecordedCopy(src, (), into, offset, tuple(view.shape), tuple(view.stride()), view.dtype)


@pytest.mark.parametrize("block_bytes", [1, 48, 1 << 20])
def test_a_flip_exchanges_regions_and_leaves_padding_alone(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "_BLOCK_BYTES", block_bytes)
    live = {
        "padded": torch.arange(60, dtype=torch.float32).reshape(10, 6),
        "turned": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(),
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
    }
    views = {
        "padded": live["padded"][:7, 1:4],
        "turned": live["turned"],
        "scalar": live["scalar"],
        "empty": live["empty"],
    }
    copies = [copy(name, name, view, live[name]) for name, view in views.items()]
    made = Destinations(live, copies, InstallMode.SHADOW)
    before = {name: tensor.clone() for name, tensor in live.items()}
    after = {name: tensor.clone() for name, tensor in live.items()}
    for one in copies:
        made.view_of(one).fill_(99)
        one.destination_view(after[one.param_name]).fill_(99)
    made.flip()
    assert all(torch.equal(live[name], after[name]) for name in live)
    made.flip()
    assert all(torch.equal(live[name], before[name]) for name in live)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_shared_bytes_are_found_and_nothing_else(data: st.DataObject) -> None:
    def region() -> MemoryRegion:
        dims = data.draw(st.integers(0, 3))
        shape = tuple(data.draw(st.integers(0, 3)) for _ in range(dims))
        strides = data.draw(st.permutations([1, 4, 13]))[:dims]
        return MemoryRegion(data.draw(st.integers(0, 60)), shape, tuple(strides), data.draw(st.sampled_from([1, 2])))

    def bytes_of(r: MemoryRegion) -> set[int]:
        return {
            r.addr + r.itemsize * sum(i * s for i, s in zip(index, r.strides, strict=True)) + b
            for index in itertools.product(*(range(size) for size in r.shape))
            for b in range(r.itemsize)
        }

    regions = [region() for _ in range(data.draw(st.integers(0, 4)))]
    touched = [bytes_of(r) for r in regions]
    pairs = {(i, j) for i in range(len(regions)) for j in range(i) if touched[i] & touched[j]}
    found = find_shared_bytes(regions)
    assert (found is not None) == bool(pairs)
    if found is not None:
        assert (max(found), min(found)) in pairs


def test_two_copies_into_some_of_the_same_memory_are_refused_by_name() -> None:
    fused = torch.zeros(8, 4)
    tensors = {"fused": fused, "part": fused[4:]}
    canonical = {"a": "a", "b": "b"}
    left, right = copy("a", "fused", fused[:4], fused), copy("b", "part", tensors["part"], tensors["part"])
    assert len(distinct_copies([left, right], canonical, tensors)) == 2
    overlapping = copy("a", "fused", fused[:5], fused)
    with pytest.raises(InvalidLayoutError, match="a into fused and b into part write some of the same memory"):
        distinct_copies([overlapping, right], canonical, tensors)
    columns = [copy("a", "fused", fused[:, :2], fused), copy("b", "fused", fused[:, 2:], fused)]
    assert len(distinct_copies(columns, canonical, tensors)) == 2
    with pytest.raises(InvalidLayoutError, match="write some of the same memory"):
        distinct_copies([columns[0], copy("b", "fused", fused[:, 1:], fused)], canonical, tensors)
