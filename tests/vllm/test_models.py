"""Every kind of model: what a pull brings is what vLLM's own loading brings, bit for bit, three versions in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from tests.vllm.loaded import Loaded, behaviour, load
from tests.vllm.models import KINDS, read
from weightsync.protocol.dtypes import dtype_name
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedViewError
from weightsync.service import Publisher, ServiceHandle, StateDictSource, Subscriber
from weightsync.service.vllm import VllmTarget
from weightsync.service.vllm.skeleton import make_skeleton

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def service(cluster: None) -> Iterator[ServiceHandle]:
    from weightsync.service import Settings, start

    with start("vllm-models", settings=Settings(http_port=0, stall_timeout_s=60.0, long_poll_s=1.0)) as handle:
        yield handle


def target_of(loaded: Loaded, **options: Any) -> VllmTarget:
    return VllmTarget(loaded.model, loaded.config, CPU, **options)


def manifest_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def attributes(model: nn.Module) -> dict[str, Any]:
    """Everything that hangs on a model's modules and parameters, by identity."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                found[f"{prefix}:{key}"] = id(value)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            found[f"{prefix}.{name}"] = (id(tensor), None if tensor is None else tensor.data_ptr())
            for key, value in vars(tensor).items() if tensor is not None else ():
                bound = getattr(value, "__func__", None)
                found[f"{prefix}.{name}:{key}"] = (id(bound), id(value.__self__)) if bound else id(value)
    return found


def own_loading(loaded: Loaded, weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Parameters after the model's own `load_weights`, before any conversion; and those that it says it loaded."""
    skeleton = make_skeleton(loaded.model).root
    for module in skeleton.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = _real(tensor)
    with torch.no_grad(), set_current_vllm_config(loaded.config):
        names = skeleton.load_weights(weights.items())
    return dict(skeleton.named_parameters(remove_duplicate=False)) | dict(skeleton.named_buffers()), names


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """With memory of its own, and everything that hangs on it."""
    real = materialize_meta_tensor(tensor).zero_() if tensor.is_meta else tensor.detach().clone()
    real.__class__ = tensor.__class__
    real.__dict__.update(tensor.__dict__)
    return real


@pytest.mark.parametrize("kind", KINDS)
def test_versions_arrive_as_vllm_would_load_them(
    kind: str, service: ServiceHandle, checkpoints: Callable[[str, int], Path]
) -> None:
    live = load(checkpoints(kind, 1))
    first, original = behaviour(live), attributes(live.model)
    weights = read(checkpoints(kind, 2))
    target, version = target_of(live), (service.status().newest_version or 0) + 1
    source = {name: tensor.clone() for name, tensor in weights.items()}
    with Publisher(service, 0, 1, StateDictSource(source)) as publisher, Subscriber(service, kind, target) as worker:
        assert attributes(live.model) == original
        assert behaviour(live).keys() == first.keys()
        _equal(behaviour(live), first)

        publisher.publish(version)
        worker.sync(version)
        _equal(dict(target.tensors()), own_loading(live, weights)[0], keys=set(target.tensors()))
        assert not any(tensor.is_meta for tensor in (*live.model.parameters(), *live.model.buffers()))
        expected = behaviour(load(checkpoints(kind, 2)))
        assert any(not torch.equal(expected[name], first[name]) for name in first if name.endswith("itself"))
        _equal(behaviour(live), expected)

        _overwrite(source, read(checkpoints(kind, 3)))
        publisher.publish(version + 1)
        worker.sync(version + 1)
        _equal(behaviour(live), behaviour(load(checkpoints(kind, 3))))

        _overwrite(source, read(checkpoints(kind, 1)))
        publisher.publish(version + 2)
        worker.sync(version + 2)
        _equal(behaviour(live), first)
        assert worker.last_pull is not None
        assert worker.last_pull.bytes_needed == worker.last_pull.bytes_wire


def test_what_attention_derives_is_derived_again(
    service: ServiceHandle, checkpoints: Callable[[str, int], Path]
) -> None:
    """On CPU it is a view of the layer's weights and would follow them by itself, as it does not where it is a copy."""
    live = load(checkpoints("deepseek_v2", 1))
    derived = [p for name, p in live.model.named_parameters() if name.endswith((".W_UV", ".W_UK_T"))]
    assert len(derived) == 4
    for parameter in derived:
        parameter.data = parameter.data.clone()
    version = (service.status().newest_version or 0) + 1
    source = StateDictSource(read(checkpoints("deepseek_v2", 2)))
    with Publisher(service, 0, 1, source) as publisher, Subscriber(service, "mla", target_of(live)) as worker:
        publisher.publish(version)
        worker.sync(version)
    _equal(behaviour(live), behaviour(load(checkpoints("deepseek_v2", 2))))


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_covers_the_checkpoint_and_every_loaded_parameter(
    kind: str, checkpoints: Callable[[str, int], Path]
) -> None:
    live = load(checkpoints(kind, 1))
    weights = read(checkpoints(kind, 1))
    copies = target_of(live).record(manifest_of(weights))
    assert len({copy.src_name for copy in copies}) >= 0.95 * len(weights)
    loaded = own_loading(live, weights)[1]
    assert loaded - {copy.param_name for copy in copies} == set()


def test_missing_names_are_refused_and_the_model_stays_as_it_was(checkpoints: Callable[[str, int], Path]) -> None:
    live = load(checkpoints("llama", 1))
    first, original = behaviour(live), attributes(live.model)
    weights = read(checkpoints("llama", 2))
    del weights["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(InvalidLayoutError, match=r"into 'model\.layers\.1\.mlp\.down_proj\.weight'"):
        target_of(live).record(manifest_of(weights))
    copies = target_of(live, allow_partial=True).record(manifest_of(weights))
    assert "model.layers.1.mlp.down_proj.weight" not in {copy.param_name for copy in copies}
    assert attributes(live.model) == original
    _equal(behaviour(live), first)


def test_half_of_a_fused_parameter_is_refused(checkpoints: Callable[[str, int], Path]) -> None:
    live = load(checkpoints("llama", 1))
    weights = read(checkpoints("llama", 2))
    del weights["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(InvalidLayoutError, match=r"qkv_proj\.weight' would be filled in part only"):
        target_of(live).record(manifest_of(weights))


def test_a_loader_that_needs_data_is_refused_by_name(
    checkpoints: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = load(checkpoints("llama", 1))

    def doubling(self: nn.Module, weights: Any) -> set[str]:
        return loaded((name, weight * 2 if "norm" in name else weight) for name, weight in weights)

    loaded = live.model.load_weights
    monkeypatch.setattr(type(live.model), "load_weights", doubling)
    with pytest.raises(UnsupportedViewError, match=r"norm\.weight"):
        target_of(live).record(manifest_of(read(checkpoints("llama", 2))))


def _overwrite(tensors: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], keys: set[str] | None = None) -> None:
    differing = [name for name in keys or expected.keys() if not _same_bits(found[name], expected[name])]
    assert differing == []


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
