"""Affine maps under one name: the data types of `maps.py` and the builders of `layouts.py`.

The thing to watch is stated where it matters: `source_*` addresses the logical tensor, `dest_*` the shard,
all in elements. This file holds no logic.
"""

from weightsync.protocol.layouts import (
    block_gather_map,
    codegen_block_ids,
    contiguous_split_map,
    dtensor_map,
    expert_stack_map,
    fused_qkv_map,
    gate_up_map,
    replicated_map,
    segmented_map,
    sub_param_map,
    yuan_o_proj_block_ids,
)
from weightsync.protocol.maps import AffineMap, AffinePiece

__all__ = [
    "AffineMap",
    "AffinePiece",
    "block_gather_map",
    "codegen_block_ids",
    "contiguous_split_map",
    "dtensor_map",
    "expert_stack_map",
    "fused_qkv_map",
    "gate_up_map",
    "replicated_map",
    "segmented_map",
    "sub_param_map",
    "yuan_o_proj_block_ids",
]
