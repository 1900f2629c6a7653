"""Sources: what a trainer rank publishes, and under which names.

tensors      tensors that have their checkpoint names: state dicts, modules, DTensors
checkpoint   a safetensors directory, without a trainer
shards       boxes and affine maps, for layouts that no DTensor describes
flat         ranges of flattened parameters, as ZeRO keeps them
mapped       views of another source's tensors: experts out of a stack, query, key and value out of a fused tensor
huggingface  transformers models as `save_pretrained` would write them
megatron     Megatron-core ranks under Hugging Face names
cast         another source in another dtype
lora         adapters, what is below them, and both merged
grouped      exporters that gather or convert, for staged mode
"""

from weightsync.service.sources.cast import CastSource
from weightsync.service.sources.checkpoint import SafetensorsSource
from weightsync.service.sources.flat import (
    FlatRange,
    FlatSource,
    concatenated_ranges,
    cut_partitions,
    partitioned_ranges,
)
from weightsync.service.sources.grouped import GroupedSource
from weightsync.service.sources.huggingface import TransformersSource
from weightsync.service.sources.lora import LoraBaseSource, LoraSource, MergedLoraSource
from weightsync.service.sources.mapped import MappedSource
from weightsync.service.sources.megatron import MegatronModel, MegatronSource
from weightsync.service.sources.megatron_layout import MegatronRank
from weightsync.service.sources.shards import AffineSource, ShardSource
from weightsync.service.sources.tensors import (
    DTensorSource,
    ModuleSource,
    StateDictSource,
    dtensor_offset,
    is_dtensor,
)

__all__ = [
    "AffineSource",
    "CastSource",
    "DTensorSource",
    "FlatRange",
    "FlatSource",
    "GroupedSource",
    "LoraBaseSource",
    "LoraSource",
    "MappedSource",
    "MegatronModel",
    "MegatronRank",
    "MegatronSource",
    "MergedLoraSource",
    "ModuleSource",
    "SafetensorsSource",
    "ShardSource",
    "StateDictSource",
    "TransformersSource",
    "concatenated_ranges",
    "cut_partitions",
    "dtensor_offset",
    "is_dtensor",
    "partitioned_ranges",
]
