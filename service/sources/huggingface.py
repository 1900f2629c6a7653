"""transformers models under the names that `save_pretrained` writes.

From version 5 a model holds a layer's experts as one stacked tensor, gate fused with up, and splits them when it
saves. Its own save conversion is run once over recording tensors, so names and slices are the library's, whichever
model it is; a conversion that needs data is refused by the name of the parameter. The thing to watch: the
conversion is of whole logical tensors and knows nothing of shards, which `MappedSource` then finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from weightsync.actors.interfaces import WeightSource
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.protocol.views import RecordingTensor
from weightsync.service.sources.mapped import MappedSource
from weightsync.service.sources.tensors import ModuleSource


class TransformersSource(MappedSource):
    """A transformers model, plain or FSDP2 or tensor-parallel, published as its checkpoint.

    Args:
        model: a `PreTrainedModel`.
        base: where its tensors are, if not in the model as it is: a `CastSource` of `ModuleSource(model)`, say.

    Raises:
        InvalidLayoutError: not a transformers model.
        UnsupportedViewError, UnsupportedLayoutError: the model's save conversion does more than take views.

    Example:
        >>> TransformersSource(model).manifest()[5].name        # doctest: +SKIP
        'model.layers.0.mlp.experts.0.gate_proj.weight'
    """

    def __init__(self, model: nn.Module, base: WeightSource | None = None) -> None:
        from transformers import PreTrainedModel  # seconds to import

        if not isinstance(model, PreTrainedModel):
            raise InvalidLayoutError(f"{type(model).__name__} is no transformers model; use ModuleSource")
        super().__init__(base or ModuleSource(model), lambda tensors: _saved(model, tensors))


def _saved(model: Any, tensors: Mapping[str, RecordingTensor]) -> Mapping[str, RecordingTensor]:
    """What the model's save conversion makes of its tensors; version 4 saves what it holds."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {}
    converted: Mapping[str, RecordingTensor] = revert_weight_conversion(model, dict(tensors))
    return converted
