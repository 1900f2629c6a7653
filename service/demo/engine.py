"""An inference worker's model as engines lay it out: fused, sharded, loaded through `weight_loader` callbacks.

Tensor parallel over the default process group: QKV and gate/up are fused and cut by output rows, o_proj and
down_proj by input columns, the embedding by vocabulary rows and shared with the output head. Parameters start
as NaN, so that a byte that was never delivered cannot go unseen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

_STACKED = (
    # checkpoint part, fused parameter, which part of it
    (".q_proj.", ".qkv_proj.", "q"),
    (".k_proj.", ".qkv_proj.", "k"),
    (".v_proj.", ".qkv_proj.", "v"),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)


def _parameter(*shape: int, loader: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.full(shape, float("nan"), dtype=torch.bfloat16), requires_grad=False)
    parameter.weight_loader = loader  # type: ignore[attr-defined]
    return parameter


def _take_whole(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded)


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary; also the output head."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, world: int) -> None:
        super().__init__()
        self.rows = vocab_size // world
        self.start = rank * self.rows
        self.weight = _parameter(self.rows, hidden_size, loader=self.load)

    def load(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded.narrow(0, self.start, self.rows))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - self.start
        outside = (local < 0) | (local >= self.rows)
        hidden = F.embedding(local.masked_fill(outside, 0), self.weight)
        return _all_reduce(hidden.masked_fill(outside.unsqueeze(-1), 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _all_gather_last(F.linear(hidden, self.weight))


class QKVParallelLinear(nn.Module):
    """Query, key and value heads of this rank, one below the other."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, rank: int, world: int) -> None:
        super().__init__()
        self.rank = rank
        self.q_rows, self.kv_rows = heads // world * head_dim, kv_heads // world * head_dim
        rows = self.q_rows + 2 * self.kv_rows
        self.weight = _parameter(rows, hidden, loader=self.load)
        self.bias = _parameter(rows, loader=self.load)

    def load(self, parameter: torch.Tensor, loaded: torch.Tensor, shard_id: str) -> None:
        start, rows = {
            "q": (0, self.q_rows),
            "k": (self.q_rows, self.kv_rows),
            "v": (self.q_rows + self.kv_rows, self.kv_rows),
        }[shard_id]
        parameter.data.narrow(0, start, rows).copy_(loaded.narrow(0, self.rank * rows, rows))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fused = F.linear(hidden, self.weight, self.bias)
        return fused.split([self.q_rows, self.kv_rows, self.kv_rows], dim=-1)


class MergedColumnParallelLinear(nn.Module):
    """Gate and up projections of this rank, one below the other."""

    def __init__(self, hidden: int, intermediate: int, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.rows = rank, intermediate // world
        self.weight = _parameter(2 * self.rows, hidden, loader=self.load)

    def load(self, parameter: torch.Tensor, loaded: torch.Tensor, shard_id: int) -> None:
        half = parameter.data.narrow(0, shard_id * self.rows, self.rows)
        half.copy_(loaded.narrow(0, self.rank * self.rows, self.rows))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = F.linear(hidden, self.weight).chunk(2, dim=-1)
        return gate, up


class RowParallelLinear(nn.Module):
    """Input columns of this rank; partial results are summed over ranks."""

    def __init__(self, in_features: int, out_features: int, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.columns = rank, in_features // world
        self.weight = _parameter(out_features, self.columns, loader=self.load)

    def load(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded.narrow(1, self.rank * self.columns, self.columns))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _all_reduce(F.linear(inputs, self.weight))


class RMSNorm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(hidden, loader=_take_whole)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)


class Attention(nn.Module):
    def __init__(self, config: Any, rank: int, world: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // heads
        self.qkv_proj = QKVParallelLinear(config.hidden_size, heads, kv_heads, self.head_dim, rank, world)
        self.o_proj = RowParallelLinear(config.hidden_size, config.hidden_size, rank, world)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in self.qkv_proj(hidden)
        )
        attended = F.scaled_dot_product_attention(
            _rotate(query, cos, sin), _rotate(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, config: Any, rank: int, world: int) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, config.intermediate_size, rank, world)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, rank, world)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, rank: int, world: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rank, world)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rank, world)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    def __init__(self, config: Any, rank: int, world: int) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, rank, world)
        self.layers = nn.ModuleList(DecoderLayer(config, rank, world) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class EngineModel(nn.Module):
    """One tensor-parallel rank of the engine.

    Args:
        config: a Qwen2 config with tied embeddings.
        rank, world: tensor-parallel rank and size.
    """

    def __init__(self, config: Any, rank: int, world: int) -> None:
        super().__init__()
        self.model = Decoder(config, rank, world)
        self._head_dim = config.hidden_size // config.num_attention_heads
        self._rope_theta = config.rope_parameters["rope_theta"]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load checkpoint tensors, whole or recording ones; returns the names that were used."""
        parameters = dict(self.named_parameters())
        used = set()
        for name, loaded in weights:
            if name == "lm_head.weight":  # tied: the embedding is the head
                continue
            for part, fused, shard_id in _STACKED:
                if part in name:
                    parameter = parameters[name.replace(part, fused)]
                    parameter.weight_loader(parameter, loaded, shard_id)  # type: ignore[attr-defined]
                    break
            else:
                parameters[name].weight_loader(parameters[name], loaded)  # type: ignore[attr-defined]
            used.add(name)
        return used

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, float32, (batch, length, vocabulary); every rank of the group must call it."""
        cos, sin = self._rope(tokens.shape[1])
        hidden = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden, cos, sin)
        return self.model.embed_tokens.logits(self.model.norm(hidden)).float()

    def _rope(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        frequency = self._rope_theta ** -(torch.arange(0, self._head_dim, 2).float() / self._head_dim)
        angles = torch.outer(torch.arange(length).float(), frequency).repeat(1, 2)
        return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-right, left), dim=-1) * sin


def _all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def _all_gather_last(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=-1)
