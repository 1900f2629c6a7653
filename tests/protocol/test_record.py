"""A module's own loader is run once over recording tensors and the module is left exactly as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError, UnsupportedViewError
from weightsync.protocol.record import module_prefixes, record_module
from weightsync.protocol.views import replay


class Fused(nn.Module):
    """Loaders with and without callbacks, a tied pair, padding, a buffer, and parameters in one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 6, bias=False)
        self.qkv.weight.weight_loader = self.load_qkv  # type: ignore[assignment]
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.zeros(12)
        self.left = nn.Parameter(flat[:6].view(2, 3))
        self.right = nn.Parameter(flat[6:].view(3, 2))
        self.register_buffer("scale", torch.ones(3))

    def load_qkv(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: int) -> None:
        parameter.data.narrow(0, 2 * shard, 2).copy_(loaded)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, loaded in weights:
            if name in "qkv":
                self.qkv.weight.weight_loader(self.qkv.weight, loaded, "qkv".index(name))  # type: ignore[operator]
            elif name == "embed.weight":
                parameters[name].data[3:].zero_()
                parameters[name].data[:3].copy_(loaded[1:4])
            elif name == "scale":
                self.scale.copy_(loaded)
            elif name == "pair":
                self.left.data.copy_(loaded[0].view(2, 3))
                self.right.data.copy_(loaded[1].view(3, 2).contiguous())


METADATA = {
    "q": ("float32", (2, 4)),
    "k": ("float32", (2, 4)),
    "v": ("float32", (2, 4)),
    "embed.weight": ("float32", (5, 4)),
    "scale": ("float32", (3,)),
    "pair": ("float32", (2, 6)),
    "unknown": ("float32", (1,)),
}


def snapshot(module: nn.Module) -> dict[str, Any]:
    return {
        name: (id(t), t.data_ptr(), t.detach().clone(), dict(t.__dict__), t.requires_grad, t.device)
        for name, t in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(
        b[:2] == a[:2] and torch.equal(b[2], a[2]) and b[3] == a[3] and b[4:] == a[4:]
        for b, a in zip(before.values(), after.values(), strict=True)
    )


def test_executing_the_recorded_copies_equals_the_modules_own_load() -> None:
    torch.manual_seed(0)
    real = {name: torch.randn(shape) for name, (_, shape) in METADATA.items()}
    loaded, planned = Fused(), Fused()
    planned.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        loaded.load_weights(real.items())
        recording = record_module(planned, planned.load_weights, METADATA)
        planned.embed.weight[3:] = 0  # what the loader does besides copying is not part of a plan
        for copy in recording.copies:
            parameter = getattr(copy.module, copy.param_name)
            copy.destination_view(parameter.detach()).copy_(replay(real[copy.src_name], copy.op_chain))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, planned.state_dict()[name]), name
    assert recording.never_copied == ("unknown",)
    assert recording.unwritten == ()
    assert recording.unattributed == ()
    names = [module_prefixes(planned)[id(copy.module)] + copy.param_name for copy in recording.copies]
    assert names == ["qkv.weight"] * 3 + ["embed.weight", "scale", "left", "right"]


def test_the_module_is_left_exactly_as_it_was() -> None:
    module = Fused()
    before, loader = snapshot(module), module.qkv.weight.__dict__["weight_loader"]
    record_module(module, module.load_weights, METADATA)
    assert same(before, snapshot(module))
    assert module.qkv.weight.__dict__["weight_loader"] is loader


def test_the_module_is_restored_when_its_loader_raises_halfway() -> None:
    module = Fused()
    before, loader = snapshot(module), module.qkv.weight.__dict__["weight_loader"]

    def failing(weights: Any) -> None:
        for position, (name, tensor) in enumerate(weights):
            if position == 3:
                raise KeyError(name)
            module.load_weights([(name, tensor)])

    with pytest.raises(KeyError, match=r"embed\.weight"):
        record_module(module, failing, METADATA)
    assert same(before, snapshot(module))
    assert module.qkv.weight.__dict__["weight_loader"] is loader


def test_partial_loads_are_told_apart() -> None:
    module, elsewhere = Fused(), torch.zeros(2, 4)

    def partial(weights: Any) -> None:
        for name, tensor in weights:
            if name == "q":
                module.load_weights([(name, tensor)])
            elif name == "k":
                elsewhere.copy_(tensor)

    recording = record_module(module, partial, METADATA)
    assert recording.live_names == {"q"}
    assert recording.unattributed == (("k", ()),)
    assert recording.never_copied == ("v", "embed.weight", "scale", "pair", "unknown")
    assert set(recording.unwritten) == {"embed.weight", "head.weight", "left", "right"}
    assert bool((elsewhere == 0).all())


def test_a_loader_that_needs_data_is_refused_and_the_module_restored() -> None:
    module = Fused()
    before = snapshot(module)

    def scaling(weights: Any) -> None:
        for _, tensor in weights:
            module.left.data.copy_(tensor * 2)

    with pytest.raises(UnsupportedViewError, match="mul"):
        record_module(module, scaling, METADATA)
    assert same(before, snapshot(module))


def test_without_a_loader_every_parameter_takes_its_own_name() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    metadata = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in module.state_dict().items()}
    recording = record_module(module, None, metadata)
    assert [copy.src_name for copy in recording.copies] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert all(copy.op_chain == () for copy in recording.copies)
    with pytest.raises(InvalidLayoutError, match=r"0\.bias"):
        record_module(module, None, {k: v for k, v in metadata.items() if k != "0.bias"})
    with pytest.raises(InvalidLayoutError, match=r"0\.bias.*\(3,\).*\(2,\)"):
        record_module(module, None, {**metadata, "0.bias": ("float32", (3,))})


class Padded(nn.Module):
    """A weight beside padding that the loader zeroes, before or after the copy, or forgets."""

    def __init__(self, zeroed: str, transposed: bool = False) -> None:
        super().__init__()
        memory = torch.ones(6, 4)
        self.weight = nn.Parameter(torch.ones(4, 6).t() if transposed else memory)
        self._zeroed = zeroed

    def load_weights(self, weights: Any) -> None:
        for _, loaded in weights:
            if self._zeroed == "before":
                self.weight.data.zero_()
            self.weight.data[:, :3].copy_(loaded)
            if self._zeroed == "after":
                self.weight.data[:, 3:].fill_(0)
            if self._zeroed == "scaled":
                self.weight.data[:, 3:].fill_(0)
                self.weight.data[2].mul_(2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("zeroed", ["before", "after"])
def test_padding_that_the_loader_fills_itself_is_no_hole(zeroed: str, transposed: bool) -> None:
    module = Padded(zeroed, transposed)
    recording = record_module(module, module.load_weights, {"w": ("float32", (6, 3))})
    assert recording.partial == ()
    assert bool((module.weight == 1).all()), "nothing was written while it was recorded"


def test_a_parameter_that_is_filled_in_part_is_reported_with_the_hole() -> None:
    module = Padded("never")
    recording = record_module(module, module.load_weights, {"w": ("float32", (6, 3))})
    assert recording.partial == (("weight", "(0, 3)..(6, 4) of (6, 4)"),)
    fused = Fused()
    recording = record_module(fused, fused.load_weights, {n: m for n, m in METADATA.items() if n != "k"})
    assert recording.partial == (("qkv.weight", "(2, 0)..(4, 4) of (6, 4)"),)


def test_a_weight_that_is_changed_after_it_was_copied_is_refused() -> None:
    module = Padded("scaled")
    with pytest.raises(UnsupportedLayoutError, match=r"changes weight \(mul_.*after copying w into it"):
        record_module(module, module.load_weights, {"w": ("float32", (6, 3))})
