"""A Megatron-core rank's tensors as boxes of global tensors: how tensor, pipeline and expert parallelism cut them.

    rows     column-parallel weights and biases, the vocabulary: dimension 0 is cut over tensor-parallel ranks
    columns  row-parallel weights: dimension 1 is cut
    gated    fc1: gate rows of the rank, then up rows of the rank; the global tensor is (2, ffn, ...), cut on ffn
    whole    norms, routers, biases after the reduction: every rank has all of it

Layers and experts count on from what earlier pipeline and expert ranks hold. Experts are `linear_fc1.weight<i>`
(grouped), `local_experts.<i>.linear_fc1.weight` (one by one), or `weight1` and `weight2`, which keep all of a rank's
experts in one tensor, inputs first. The thing to watch: experts are cut over the expert-tensor-parallel ranks, whose
number is not that of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from weightsync.actors.interfaces import LocalShard
from weightsync.protocol.dtypes import dtype_name
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.messages import TensorMeta

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
_ONE_BY_ONE = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


@dataclass(frozen=True)
class MegatronRank:
    """One rank's place in the parallel groups.

    Experts count over the whole model: expert-parallel rank r holds `num_experts / ep_size` of them.
    """

    tp_rank: int = 0
    tp_size: int = 1
    first_layer: int = 0
    """Global index of what is `decoder.layers.0` here. A rank of an interleaved pipeline, which has several chunks of
    layers, gives its tensors global numbers beforehand."""
    num_experts: int = 0
    ep_rank: int = 0
    ep_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1

    def __post_init__(self) -> None:
        for what, rank, size in (
            ("tp_rank", self.tp_rank, self.tp_size),
            ("ep_rank", self.ep_rank, self.ep_size),
            ("expert_tp_rank", self.expert_tp_rank, self.expert_tp_size),
        ):
            if not 0 <= rank < size:
                raise InvalidLayoutError(f"{what} {rank} is none of {size}")
        if self.num_experts % self.ep_size:
            raise InvalidLayoutError(f"{self.num_experts} experts do not divide over {self.ep_size} ranks")

    @property
    def first_expert(self) -> int:
        """Global index of the rank's expert 0."""
        return self.ep_rank * (self.num_experts // self.ep_size)

    def experts_here(self, name: str) -> int:
        """Experts of the rank.

        Raises:
            InvalidLayoutError: the model has none.
        """
        if not self.num_experts:
            raise InvalidLayoutError(f"{name!r} holds experts; pass num_experts")
        return self.num_experts // self.ep_size


@dataclass
class GlobalTensors:
    """Global tensors this rank knows of, and its boxes of them."""

    manifest: list[TensorMeta] = field(default_factory=list)
    shards: list[LocalShard] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...], tensor: torch.Tensor) -> None:
        self.manifest.append(TensorMeta(name, dtype_name(tensor.dtype), shape))
        self.shards.append(LocalShard(name, offset, tensor))


def global_tensors(tensors: Mapping[str, torch.Tensor], rank: MegatronRank) -> GlobalTensors:
    """Every tensor of a rank as a box of its global tensor.

    Raises:
        InvalidLayoutError: a name that no rule knows, or a shape its rule does not fit.
        UnsupportedLayoutError: a tensor whose shape has to be seen otherwise and that is not contiguous.
    """
    out = GlobalTensors()
    for name, tensor in tensors.items():
        if name.endswith("_extra_state"):
            continue
        layer, rest = split_layer(name)
        prefix = "" if layer is None else f"decoder.layers.{layer + rank.first_layer}."
        rest, cut, parts = _rule(name, rest, rank)
        shape, offset, local = cut(name, tensor.detach(), *parts, rank)
        out.add(prefix + rest, shape, offset, local)
    return out


def split_layer(name: str) -> tuple[int | None, str]:
    """(layer, name within it); (None, name) outside of layers."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


_Cut = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]
"""(global shape, offset, this rank's tensor as it lies in it)."""
_Cutter = Callable[[str, torch.Tensor, int, int, MegatronRank], _Cut]


def _rule(name: str, rest: str, rank: MegatronRank) -> tuple[str, _Cutter, tuple[int, int]]:
    """(global name within the layer, how it is cut, (part, parts))."""
    experts = rank.expert_tp_rank, rank.expert_tp_size
    grouped, single = _GROUPED.fullmatch(rest), _ONE_BY_ONE.fullmatch(rest)
    if grouped or single:
        linear, index = (grouped[1], int(grouped[2])) if grouped else (single[2], int(single[1]))  # type: ignore[index]
        if index >= rank.experts_here(name):
            raise InvalidLayoutError(f"{name!r}: this rank has {rank.experts_here(name)} of {rank.num_experts} experts")
        cutter = _gated if linear == "linear_fc1" else _columns
        return f"mlp.experts.{linear}.{index + rank.first_expert}", cutter, experts
    if rest in ("mlp.experts.weight1", "mlp.experts.weight2"):
        return rest, (_stacked_fc1 if rest.endswith("1") else _stacked_fc2), experts
    cutter_of = _CUTTERS.get(rest)
    if cutter_of is None:
        raise InvalidLayoutError(
            f"{name!r} is no parameter of a Megatron-core GPT model that is known here; leave it out of the tensors if "
            "engines do not load it"
        )
    return rest, cutter_of, (rank.tp_rank, rank.tp_size)


def _whole(name: str, tensor: torch.Tensor, part: int, parts: int, rank: MegatronRank) -> _Cut:
    del name, part, parts, rank
    return tuple(tensor.shape), (0,) * tensor.dim(), tensor


def _rows(name: str, tensor: torch.Tensor, part: int, parts: int, rank: MegatronRank) -> _Cut:
    del name, rank
    rows, *others = tensor.shape
    return (rows * parts, *others), (part * rows, *(0 for _ in others)), tensor


def _columns(name: str, tensor: torch.Tensor, part: int, parts: int, rank: MegatronRank) -> _Cut:
    del rank
    if tensor.dim() != 2:
        raise InvalidLayoutError(f"{name!r} is a row-parallel weight of shape {tuple(tensor.shape)}, not a matrix")
    rows, columns = tensor.shape
    return (rows, columns * parts), (0, part * columns), tensor


def _gated(name: str, tensor: torch.Tensor, part: int, parts: int, rank: MegatronRank) -> _Cut:
    del rank
    rows, *others = tensor.shape
    if rows % 2:
        raise InvalidLayoutError(f"{name!r} has {rows} rows, and gate and up of a gated MLP have the same number")
    ffn = rows // 2
    local = _seen_as(name, tensor, (2, ffn, *others))
    return (2, ffn * parts, *others), (0, part * ffn, *(0 for _ in others)), local


def _stacked_fc1(name: str, tensor: torch.Tensor, part: int, parts: int, rank: MegatronRank) -> _Cut:
    hidden, width = tensor.shape
    experts = rank.experts_here(name)
    ffn = _divided(name, width, 2 * experts)
    local = _seen_as(name, tensor, (experts, hidden, 2, ffn))
    return (rank.num_experts, hidden, 2, ffn * parts), (rank.first_expert, 0, 0, part * ffn), local


def _stacked_fc2(name: str, tensor: torch.Tensor, part: int, parts: int, rank: MegatronRank) -> _Cut:
    rows, hidden = tensor.shape
    experts = rank.experts_here(name)
    ffn = _divided(name, rows, experts)
    local = _seen_as(name, tensor, (experts, ffn, hidden))
    return (rank.num_experts, ffn * parts, hidden), (rank.first_expert, part * ffn, 0), local


def _divided(name: str, size: int, by: int) -> int:
    if size % by:
        raise InvalidLayoutError(f"{name!r}: {size} does not divide into {by}; correct num_experts or ep_size")
    return size // by


def _seen_as(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise UnsupportedLayoutError(
            f"{name!r} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}), so gate and up or "
            "experts cannot be told apart in place; make it contiguous, or publish an exporter through GroupedSource"
        )
    return tensor.view(shape)


_CUTTERS: dict[str, _Cutter] = {
    "embedding.word_embeddings.weight": _rows,
    "output_layer.weight": _rows,
    "decoder.final_layernorm.weight": _whole,
    "input_layernorm.weight": _whole,
    "pre_mlp_layernorm.weight": _whole,
    "self_attention.linear_qkv.layer_norm_weight": _whole,
    "self_attention.linear_qkv.weight": _rows,
    "self_attention.linear_qkv.bias": _rows,
    "self_attention.q_layernorm.weight": _whole,
    "self_attention.k_layernorm.weight": _whole,
    "self_attention.linear_proj.weight": _columns,
    "self_attention.linear_proj.bias": _whole,
    "mlp.linear_fc1.layer_norm_weight": _whole,
    "mlp.linear_fc1.weight": _gated,
    "mlp.linear_fc1.bias": _gated,
    "mlp.linear_fc2.weight": _columns,
    "mlp.linear_fc2.bias": _whole,
    "mlp.router.weight": _whole,
    "mlp.shared_experts.linear_fc1.weight": _gated,
    "mlp.shared_experts.linear_fc2.weight": _columns,
    "mlp.shared_experts.gate_weight": _whole,
}
