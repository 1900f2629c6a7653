"""Megatron-core ranks against reference code that cuts a checkpoint as Megatron-core's own layers do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.pulls import assert_equal, manifest_of, pull, pull_whole
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.service import CastSource, MegatronModel, MegatronRank, MegatronSource

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A small model; sizes are multiples of what cuts them, the vocabulary is not."""

    layers: int = 2
    hidden: int = 8
    heads: int = 4
    groups: int = 2
    head: int = 3
    ffn: int = 8
    vocab: int = 13
    experts: int = 0
    bias: bool = False
    norms: bool = False
    tied: bool = False
    mixtral: bool = False


def checkpoint(shape: Shape, seed: int = 0) -> State:
    """Random weights under Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    out = {"model.embed_tokens.weight": random(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for kind, heads in (("q", shape.heads), ("k", shape.groups), ("v", shape.groups)):
            out[f"{at}self_attn.{kind}_proj.weight"] = random(heads * shape.head, shape.hidden)
            if shape.bias:
                out[f"{at}self_attn.{kind}_proj.bias"] = random(heads * shape.head)
        if shape.norms:
            out[f"{at}self_attn.q_norm.weight"] = random(shape.head)
            out[f"{at}self_attn.k_norm.weight"] = random(shape.head)
        out[f"{at}self_attn.o_proj.weight"] = random(shape.hidden, shape.heads * shape.head)
        out[f"{at}input_layernorm.weight"] = random(shape.hidden)
        out[f"{at}post_attention_layernorm.weight"] = random(shape.hidden)
        if not shape.experts:
            out[f"{at}mlp.gate_proj.weight"] = random(shape.ffn, shape.hidden)
            out[f"{at}mlp.up_proj.weight"] = random(shape.ffn, shape.hidden)
            out[f"{at}mlp.down_proj.weight"] = random(shape.hidden, shape.ffn)
            continue
        moe = f"{at}block_sparse_moe." if shape.mixtral else f"{at}mlp."
        gate, up, down = ("w1", "w3", "w2") if shape.mixtral else ("gate_proj", "up_proj", "down_proj")
        out[f"{moe}gate.weight"] = random(shape.experts, shape.hidden)
        for expert in range(shape.experts):
            out[f"{moe}experts.{expert}.{gate}.weight"] = random(shape.ffn, shape.hidden)
            out[f"{moe}experts.{expert}.{up}.weight"] = random(shape.ffn, shape.hidden)
            out[f"{moe}experts.{expert}.{down}.weight"] = random(shape.hidden, shape.ffn)
    out["model.norm.weight"] = random(shape.hidden)
    out["lm_head.weight"] = out["model.embed_tokens.weight"] if shape.tied else random(shape.vocab, shape.hidden)
    return out


def rows_of(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    each = tensor.shape[0] // size
    return tensor[rank * each : (rank + 1) * each].clone()


def columns_of(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return rows_of(tensor.t(), rank, size).t().contiguous()


def interleaved_qkv(full: State, at: str, kind: str, shape: Shape) -> torch.Tensor:
    """Group after group: its query heads, its key head, its value head, one row of a head at a time."""
    q, k, v = (full[f"{at}self_attn.{name}_proj.{kind}"] for name in "qkv")
    each = shape.heads // shape.groups
    rows = []
    for group in range(shape.groups):
        for head in range(group * each, (group + 1) * each):
            rows += [q[head * shape.head + row] for row in range(shape.head)]
        rows += [k[group * shape.head + row] for row in range(shape.head)]
        rows += [v[group * shape.head + row] for row in range(shape.head)]
    return torch.stack(rows)


def padded(vocabulary: torch.Tensor, tp: int) -> torch.Tensor:
    """To a multiple of 4 * tp rows; nobody may ever see the padding."""
    rows = -(-vocabulary.shape[0] // (4 * tp)) * 4 * tp
    return torch.cat([vocabulary, torch.full((rows - vocabulary.shape[0], vocabulary.shape[1]), float("nan"))])


def expert_tensors(full: State, at: str, shape: Shape, rank: MegatronRank, how: str) -> State:
    moe = f"{at}block_sparse_moe." if shape.mixtral else f"{at}mlp."
    names = ("w1", "w3", "w2") if shape.mixtral else ("gate_proj", "up_proj", "down_proj")
    here = shape.experts // rank.ep_size
    out: State = {}
    firsts, seconds = [], []
    for local in range(here):
        gate, up, down = (full[f"{moe}experts.{rank.ep_rank * here + local}.{name}.weight"] for name in names)
        cut = (rank.expert_tp_rank, rank.expert_tp_size)
        fc1, fc2 = torch.cat([rows_of(gate, *cut), rows_of(up, *cut)]), columns_of(down, *cut)
        if how == "grouped":
            out[f"mlp.experts.linear_fc1.weight{local}"], out[f"mlp.experts.linear_fc2.weight{local}"] = fc1, fc2
        elif how == "sequential":
            out[f"mlp.experts.local_experts.{local}.linear_fc1.weight"] = fc1
            out[f"mlp.experts.local_experts.{local}.linear_fc2.weight"] = fc2
        firsts.append(fc1.t())
        seconds.append(fc2.t())
    if how == "stacked":  # memory is (experts, hidden, 2 ffn) and (experts, ffn, hidden), whatever the shape says
        out["mlp.experts.weight1"] = torch.stack(firsts).contiguous().view(shape.hidden, -1)
        out["mlp.experts.weight2"] = torch.stack(seconds).contiguous().view(-1, shape.hidden)
    return out


def megatron_rank(full: State, shape: Shape, rank: MegatronRank, layers: range, how: str, fused_norms: bool) -> State:
    """What one rank holds, under Megatron-core's names."""
    cut = (rank.tp_rank, rank.tp_size)
    out: State = {}
    if layers.start == 0:
        out["embedding.word_embeddings.weight"] = rows_of(padded(full["model.embed_tokens.weight"], cut[1]), *cut)
    for local, layer in enumerate(layers):
        at, here = f"model.layers.{layer}.", f"decoder.layers.{local}."
        out[f"{here}self_attention.linear_qkv.weight"] = rows_of(interleaved_qkv(full, at, "weight", shape), *cut)
        if shape.bias:
            out[f"{here}self_attention.linear_qkv.bias"] = rows_of(interleaved_qkv(full, at, "bias", shape), *cut)
        if shape.norms:
            out[f"{here}self_attention.q_layernorm.weight"] = full[f"{at}self_attn.q_norm.weight"].clone()
            out[f"{here}self_attention.k_layernorm.weight"] = full[f"{at}self_attn.k_norm.weight"].clone()
        out[f"{here}self_attention.linear_proj.weight"] = columns_of(full[f"{at}self_attn.o_proj.weight"], *cut)
        norm = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
        out[here + norm] = full[f"{at}input_layernorm.weight"].clone()
        norm = "mlp.linear_fc1.layer_norm_weight" if fused_norms and not shape.experts else "pre_mlp_layernorm.weight"
        out[here + norm] = full[f"{at}post_attention_layernorm.weight"].clone()
        if not shape.experts:
            gate, up = (rows_of(full[f"{at}mlp.{kind}_proj.weight"], *cut) for kind in ("gate", "up"))
            out[f"{here}mlp.linear_fc1.weight"] = torch.cat([gate, up])
            out[f"{here}mlp.linear_fc2.weight"] = columns_of(full[f"{at}mlp.down_proj.weight"], *cut)
            continue
        router = f"{at}block_sparse_moe.gate.weight" if shape.mixtral else f"{at}mlp.gate.weight"
        out[f"{here}mlp.router.weight"] = full[router].clone()
        out |= {here + name: tensor for name, tensor in expert_tensors(full, at, shape, rank, how).items()}
    if layers.stop == shape.layers:
        out["decoder.final_layernorm.weight"] = full["model.norm.weight"].clone()
        out["output_layer.weight"] = rows_of(padded(full["lm_head.weight"], cut[1]), *cut)
    return out


def sources(
    full: State, shape: Shape, *, tp: int, pp: int = 1, ep: int = 1, expert_tp: int = 1, how: str, fused: bool = True
) -> list[MegatronSource]:
    """All ranks: pipeline stages, each of the larger of tp and ep * expert_tp ranks."""
    model = MegatronModel(shape.heads, shape.groups, shape.vocab, shape.tied, "mixtral" if shape.mixtral else "qwen")
    out = []
    for stage in range(pp):
        layers = range(stage * shape.layers // pp, (stage + 1) * shape.layers // pp)
        for index in range(max(tp, ep * expert_tp)):
            rank = MegatronRank(
                index % tp, tp, layers.start, shape.experts, index // expert_tp % ep, ep, index % expert_tp, expert_tp
            )
            out.append(MegatronSource(megatron_rank(full, shape, rank, layers, how, fused), model, rank))
    return out


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([(4, 4), (4, 2), (4, 1), (8, 2)]),
    st.integers(1, 3),
    st.integers(1, 30),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_dense_model_is_its_checkpoint(
    tp: int, pp: int, heads: tuple[int, int], head: int, vocab: int, bias: bool, norms: bool, tied: bool, fused: bool
) -> None:
    shape = Shape(heads=heads[0], groups=heads[1], head=4 * head, vocab=vocab, bias=bias, norms=norms, tied=tied)
    full = checkpoint(shape)
    assert_equal(pull_whole(sources(full, shape, tp=tp, pp=pp, how="", fused=fused)), full)


@pytest.mark.parametrize("how", ["grouped", "sequential", "stacked"])
@pytest.mark.parametrize("mixtral", [False, True])
@pytest.mark.parametrize(("tp", "pp", "ep", "expert_tp"), [(1, 1, 1, 1), (2, 2, 2, 1), (4, 1, 2, 2), (2, 1, 4, 1)])
def test_a_mixture_of_experts_is_its_checkpoint(
    how: str, mixtral: bool, tp: int, pp: int, ep: int, expert_tp: int
) -> None:
    shape = Shape(experts=4, mixtral=mixtral, norms=not mixtral, head=4)
    full = checkpoint(shape)
    assert_equal(pull_whole(sources(full, shape, tp=tp, pp=pp, ep=ep, expert_tp=expert_tp, how=how)), full)


def test_only_what_a_worker_holds_is_read_and_transposed_experts_take_no_detour_of_bytes() -> None:
    shape = Shape(experts=4, ffn=64, hidden=128, head=4)
    full = checkpoint(shape)
    ranks = sources(full, shape, tp=2, ep=2, how="stacked")
    wanted = {n: torch.zeros_like(t) for n, t in full.items() if "experts.3." in n or "q_proj" in n}
    assert pull(ranks, wanted) == sum(tensor.nbytes for tensor in wanted.values())
    assert_equal(wanted, {name: full[name] for name in wanted})


def test_masters_in_fp32_are_served_in_bfloat16() -> None:
    shape = Shape(experts=2, head=4)
    full = checkpoint(shape)
    ranks = [CastSource(source, torch.bfloat16) for source in sources(full, shape, tp=2, ep=2, how="stacked")]
    assert_equal(pull_whole(ranks), {name: tensor.to(torch.bfloat16) for name, tensor in full.items()})


def test_a_tied_output_layer_is_an_alias_and_not_read_from_the_last_stage() -> None:
    shape = Shape(tied=True, head=4)
    first, last = sources(checkpoint(shape), shape, tp=1, pp=2, how="")
    assert {m.name: m.alias_of for m in first.manifest()}["lm_head.weight"] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in manifest_of([last])


@pytest.mark.parametrize(
    ("tensors", "rank", "message"),
    [
        ({"decoder.layers.0.mlp.conv.weight": (4, 4)}, {}, "mlp.conv.weight' is no parameter"),
        ({"decoder.layers.0.self_attention.linear_qkv.weight": (9, 4)}, {}, "9 rows over all"),
        ({"decoder.layers.0.mlp.linear_fc1.weight": (5, 4)}, {}, "has 5 rows, and gate and up"),
        ({"decoder.layers.0.mlp.experts.linear_fc1.weight0": (4, 4)}, {}, "pass num_experts"),
        ({"decoder.layers.0.mlp.experts.linear_fc1.weight2": (4, 4)}, {"num_experts": 2}, "this rank has 2 of 2"),
        ({"decoder.layers.0.mlp.experts.weight1": (4, 6)}, {"num_experts": 2}, "6 does not divide into 4"),
        ({"embedding.word_embeddings.weight": (8, 4)}, {}, "has 8 rows .* vocabulary 13"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(tensors: Any, rank: Any, message: str) -> None:
    local = {name: torch.zeros(shape) for name, shape in tensors.items()}
    with pytest.raises(InvalidLayoutError, match=message):
        MegatronSource(local, MegatronModel(4, 2, 13), MegatronRank(**rank))


@pytest.mark.parametrize("fields", [{"tp_rank": 2, "tp_size": 2}, {"ep_rank": -1}, {"num_experts": 3, "ep_size": 2}])
def test_a_rank_outside_of_its_group_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidLayoutError):
        MegatronRank(**fields)


def test_extra_states_are_left_out() -> None:
    local = {"decoder.final_layernorm.weight": torch.zeros(4), "decoder.layers.0.mlp._extra_state": torch.zeros(1)}
    assert [m.name for m in MegatronSource(local, MegatronModel(4, 2, 13), MegatronRank()).manifest()] == [
        "model.norm.weight"
    ]
