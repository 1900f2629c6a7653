"""Block-scaled fp8: against arithmetic block by block, and through whole syncs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.protocol.errors import InvalidLayoutError
from weightsync.service.fp8 import FP8, Fp8BlockTarget, quantise


def by_hand(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One block after the other."""
    rows, columns = weight.shape
    quantised = torch.zeros(rows, columns, dtype=FP8)
    scales = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            values = weight[part].float()
            largest = values.abs().max()
            scales[i, j] = largest / 448.0 if largest > 0 else 1.0
            quantised[part] = (values / scales[i, j]).clamp(-448.0, 448.0).to(FP8)
    return quantised, scales


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(0, 1000),
)
def test_blocks(rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    weight[: rows // 2, : columns // 2] = 0
    found, expected = quantise(weight, block), by_hand(weight, block)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


def test_the_error_is_that_of_the_format() -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    quantised, scales = quantise(weight)
    wide = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    error = (quantised.float() * wide - weight).abs()
    # a mantissa of three bits: half a step is 1/16 of the value, or of the smallest normal number of the block
    assert (error <= weight.abs() / 16 + wide * 2**-9).all()


def test_scales_are_demanded_by_name() -> None:
    weight = torch.zeros(200, 130, dtype=FP8)
    with pytest.raises(InvalidLayoutError, match=r"needs 'w_scale_inv', float32 of shape \(2, 2\)"):
        Fp8BlockTarget({"w": weight})
    with pytest.raises(InvalidLayoutError, match=r"there is torch\.float32 of shape \(2, 1\)"):
        Fp8BlockTarget({"w": weight, "w_scale_inv": torch.zeros(2, 1)})


def _target() -> tuple[dict[str, torch.Tensor], Fp8BlockTarget]:
    tensors = {
        "w": torch.zeros(200, 130, dtype=FP8),
        "w_scale_inv": torch.zeros(2, 2),
        "norm": torch.zeros(130, dtype=torch.bfloat16),
    }
    return tensors, Fp8BlockTarget(tensors)


def test_wide_weights_land_beside_and_are_quantised_at_install() -> None:
    tensors, target = _target()
    copies = target.record({"w": ("bfloat16", (200, 130)), "norm": ("bfloat16", (130,))})
    assert {copy.param_name for copy in copies} == {"w", "norm"}
    assert target.unseen() == {"w"}
    landed = target.tensors()["w"]
    assert landed.dtype == torch.bfloat16
    landed.copy_(torch.randn(200, 130, generator=torch.Generator().manual_seed(1)))
    assert not tensors["w"].view(torch.uint8).any(), "not before install"
    target.install()
    weight, scales = by_hand(landed, (128, 128))
    assert torch.equal(tensors["w"].view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(tensors["w_scale_inv"], scales)


def test_fp8_is_delivered_as_it_is() -> None:
    tensors, target = _target()
    manifest = {
        "w": ("float8_e4m3fn", (200, 130)),
        "w_scale_inv": ("float32", (2, 2)),
        "norm": ("bfloat16", (130,)),
    }
    assert {copy.param_name for copy in target.record(manifest)} == set(manifest)
    assert target.unseen() == frozenset()
    assert target.tensors()["w"] is tensors["w"]
    with pytest.raises(InvalidLayoutError, match="'w_scale_inv' is wanted here but no trainer rank publishes it"):
        target.record({name: manifest[name] for name in ("w", "norm")})
