"""The demo's models are the architectures they claim to be, and can be cut in two."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch

from weightsync.service.demo.models import SIZES, build_model, init_parameters, model_config

QWEN2_5_05B_PARAMETERS = 494_032_768
"""The published checkpoint's element count, its tied head counted once."""


def parameters_of(size: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(size).parameters())


def test_base_has_exactly_the_parameters_of_the_published_model() -> None:
    assert parameters_of("base") == QWEN2_5_05B_PARAMETERS


def test_tiny_and_small_are_what_their_names_say() -> None:
    assert 50_000 < parameters_of("tiny") < 1_000_000
    assert 20_000_000 < parameters_of("small") < 100_000_000


@pytest.mark.parametrize("size", SIZES)
def test_every_size_divides_over_two_ranks_and_groups_its_queries(size: str) -> None:
    config = model_config(size)
    for extent in (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
    ):
        assert extent % 2 == 0
    assert config.hidden_size % config.num_attention_heads == 0
    assert config.num_attention_heads > config.num_key_value_heads, "grouped-query attention"


def test_the_head_is_tied_to_the_embedding_and_everything_is_bfloat16() -> None:
    model = build_model("tiny")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert "lm_head.weight" not in dict(model.named_parameters())


def initialised(seed: int) -> dict[str, torch.Tensor]:
    named = {name: parameter.detach() for name, parameter in build_model("tiny").named_parameters()}
    for tensor in named.values():
        tensor.fill_(float("nan"))  # what is not initialised must show
    init_parameters(named.items(), seed)
    return named


def test_initialising_leaves_no_element_out() -> None:
    assert all(tensor.isfinite().all() for tensor in initialised(1).values())


def test_the_same_seed_gives_the_same_weights_and_another_seed_gives_others() -> None:
    first, again, other = (initialised(seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_default_dtype_survives_a_build() -> None:
    before = torch.get_default_dtype()
    build_model("tiny")
    assert torch.get_default_dtype() is before


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"tiny, small, base.*'huge'"):
        model_config("huge")
