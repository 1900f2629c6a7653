"""Megatron-core models under Hugging Face names: tensor, pipeline and expert parallel, read where they lie.

    1. a rank's tensors become boxes of global Megatron tensors: layers and experts counted over all ranks, dimensions
       that tensor parallelism cuts at their full size (`megatron_layout`)
    2. those are mapped to checkpoint names by views: query, key and value out of the interleaved QKV, gate and up out
       of fc1, the vocabulary without its padding (here)

The thing to watch: fc1 of a gated MLP holds gate rows and up rows of its own rank one after the other, so a rank's
fc1 is no range of rows of the fused tensor; it is a box of (2, ffn, hidden). Names that no rule knows are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.messages import TensorMeta
from weightsync.protocol.views import RecordingTensor
from weightsync.service.sources.mapped import MappedSource
from weightsync.service.sources.megatron_layout import MegatronRank, global_tensors, split_layer
from weightsync.service.sources.shards import ShardSource

Published = Iterator[tuple[str, torch.Tensor]]
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class MegatronModel:
    """What the names and shapes of a model's tensors do not say."""

    num_heads: int
    num_query_groups: int
    vocab_size: int
    """Without the padding to a multiple of the ranks."""
    tied: bool = False
    """Input embedding and output layer are one weight; `lm_head.weight` is published as an alias."""
    expert_names: Literal["qwen", "mixtral"] = "qwen"
    """`mlp.experts.0.gate_proj`, as Qwen, DeepSeek and most have it, or `block_sparse_moe.experts.0.w1`."""


class MegatronSource(MappedSource):
    """One rank of a Megatron-core GPT model with gated MLPs (Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE, ...).

    Args:
        tensors: this rank's parameters under Megatron-core's local names (`model.named_parameters()` of the unwrapped
            model, or its plain state dict); `_extra_state` is left out. Kept by reference.
        model: the model's heads and vocabulary.
        rank: where this rank is.

    Raises:
        InvalidLayoutError: a name that no rule knows, or a shape that contradicts the model; names both.

    Example:
        >>> model = MegatronModel(num_heads=4, num_query_groups=2, vocab_size=30)
        >>> local = {"embedding.word_embeddings.weight": torch.zeros(16, 8)}
        >>> source = MegatronSource(local, model, MegatronRank(tp_rank=1, tp_size=2))
        >>> [(shard.name, shard.offset, tuple(shard.tensor.shape)) for shard in source.shards()]
        [('model.embed_tokens.weight', (16, 0), (14, 8))]
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], model: MegatronModel, rank: MegatronRank) -> None:
        self._ties_head = model.tied and "embedding.word_embeddings.weight" in tensors
        own = {name: tensor for name, tensor in tensors.items() if not (model.tied and name == "output_layer.weight")}
        held = global_tensors(own, rank)
        base = ShardSource(held.manifest, held.shards)
        super().__init__(base, lambda recorded: dict(_published(recorded, model)))

    def manifest(self) -> tuple[TensorMeta, ...]:
        metas = super().manifest()
        if not self._ties_head:
            return metas
        embedding = next(meta for meta in metas if meta.name == _EMBEDDING)
        return (*metas, TensorMeta("lm_head.weight", embedding.dtype, embedding.shape, _EMBEDDING))


def _published(tensors: Mapping[str, RecordingTensor], model: MegatronModel) -> Published:
    """Every name of `tensors` has a rule: `global_tensors` lets no other pass."""
    for name, tensor in tensors.items():
        layer, rest = split_layer(name)
        if layer is None:
            yield from _OUTSIDE[rest](tensor, model)
            continue
        prefix = f"model.layers.{layer}."
        rule = _INSIDE.get(rest) or _INSIDE[rest.rstrip("0123456789") + "*"]
        for published, view in rule(rest, tensor, model):
            yield prefix + published, view


# -- outside of layers ----------------------------------------------------------------------------------


def _vocabulary(published: str) -> Callable[[RecordingTensor, MegatronModel], Published]:
    def rule(tensor: RecordingTensor, model: MegatronModel) -> Published:
        if tensor.shape[0] < model.vocab_size:
            raise InvalidLayoutError(
                f"{published!r} has {tensor.shape[0]} rows over all tensor-parallel ranks, and the vocabulary "
                f"{model.vocab_size}; correct vocab_size or tp_size"
            )
        yield published, tensor[: model.vocab_size]

    return rule


def _final_norm(tensor: RecordingTensor, model: MegatronModel) -> Published:
    del model
    yield "model.norm.weight", tensor


_OUTSIDE: dict[str, Callable[[RecordingTensor, MegatronModel], Published]] = {
    "embedding.word_embeddings.weight": _vocabulary(_EMBEDDING),
    "output_layer.weight": _vocabulary("lm_head.weight"),
    "decoder.final_layernorm.weight": _final_norm,
}


# -- inside of a layer ----------------------------------------------------------------------------------

Rule = Callable[[str, RecordingTensor, MegatronModel], Published]


def _same(published: str) -> Rule:
    def rule(name: str, tensor: RecordingTensor, model: MegatronModel) -> Published:
        del name, model
        yield published, tensor

    return rule


def _qkv(name: str, tensor: RecordingTensor, model: MegatronModel) -> Published:
    """Groups of query heads, a key head and a value head; weight (rows, hidden) or bias (rows,)."""
    kind = name.rpartition(".")[2]
    heads = model.num_heads + 2 * model.num_query_groups
    rows = tensor.shape[0]
    if rows % heads or model.num_heads % model.num_query_groups:
        raise InvalidLayoutError(
            f"{name!r} has {rows} rows over all tensor-parallel ranks, which is no number of {model.num_heads} query "
            f"heads with {model.num_query_groups} groups of keys and values; correct the model or tp_size"
        )
    groups, size = model.num_query_groups, rows // heads
    queries = model.num_heads // groups
    grouped = tensor.view(groups, queries + 2, size, *tensor.shape[1:])
    for published, part in (
        ("q", grouped[:, :queries]),
        ("k", grouped[:, queries : queries + 1]),
        ("v", grouped[:, queries + 1 :]),
    ):
        yield f"self_attn.{published}_proj.{kind}", part.reshape(-1, *tensor.shape[1:])


def _dense_fc1(name: str, tensor: RecordingTensor, model: MegatronModel) -> Published:
    del model
    kind = name.rpartition(".")[2]
    yield f"mlp.gate_proj.{kind}", tensor[0]
    yield f"mlp.up_proj.{kind}", tensor[1]


def _shared_fc1(name: str, tensor: RecordingTensor, model: MegatronModel) -> Published:
    del name, model
    yield "mlp.shared_expert.gate_proj.weight", tensor[0]
    yield "mlp.shared_expert.up_proj.weight", tensor[1]


def _router(name: str, tensor: RecordingTensor, model: MegatronModel) -> Published:
    del name
    yield ("mlp.gate.weight" if model.expert_names == "qwen" else "block_sparse_moe.gate.weight"), tensor


def _expert(model: MegatronModel, index: int, what: Literal["gate", "up", "down"]) -> str:
    if model.expert_names == "qwen":
        return f"mlp.experts.{index}.{what}_proj.weight"
    return f"block_sparse_moe.experts.{index}.{ {'gate': 'w1', 'up': 'w3', 'down': 'w2'}[what] }.weight"


def _expert_fc1(name: str, tensor: RecordingTensor, model: MegatronModel) -> Published:
    index = int(name.rpartition(".")[2])
    yield _expert(model, index, "gate"), tensor[0]
    yield _expert(model, index, "up"), tensor[1]


def _expert_fc2(name: str, tensor: RecordingTensor, model: MegatronModel) -> Published:
    yield _expert(model, int(name.rpartition(".")[2]), "down"), tensor


def _stacked_fc1(name: str, tensor: RecordingTensor, model: MegatronModel) -> Published:
    """(experts, hidden, 2, ffn): inputs before outputs, which the checkpoint has the other way round."""
    del name
    for index in range(tensor.shape[0]):
        yield _expert(model, index, "gate"), tensor[index, :, 0].t()
        yield _expert(model, index, "up"), tensor[index, :, 1].t()


def _stacked_fc2(name: str, tensor: RecordingTensor, model: MegatronModel) -> Published:
    """(experts, ffn, hidden)."""
    del name
    for index in range(tensor.shape[0]):
        yield _expert(model, index, "down"), tensor[index].t()


_INSIDE: dict[str, Rule] = {
    "input_layernorm.weight": _same("input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": _same("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": _qkv,
    "self_attention.linear_qkv.bias": _qkv,
    "self_attention.q_layernorm.weight": _same("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": _same("self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": _same("self_attn.o_proj.weight"),
    "self_attention.linear_proj.bias": _same("self_attn.o_proj.bias"),
    "pre_mlp_layernorm.weight": _same("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": _same("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": _dense_fc1,
    "mlp.linear_fc1.bias": _dense_fc1,
    "mlp.linear_fc2.weight": _same("mlp.down_proj.weight"),
    "mlp.linear_fc2.bias": _same("mlp.down_proj.bias"),
    "mlp.router.weight": _router,
    "mlp.shared_experts.linear_fc1.weight": _shared_fc1,
    "mlp.shared_experts.linear_fc2.weight": _same("mlp.shared_expert.down_proj.weight"),
    "mlp.shared_experts.gate_weight": _same("mlp.shared_expert_gate.weight"),
    "mlp.experts.linear_fc1.*": _expert_fc1,
    "mlp.experts.linear_fc2.*": _expert_fc2,
    "mlp.experts.weight1": _stacked_fc1,
    "mlp.experts.weight2": _stacked_fc2,
}
