"""Op chains: recorded from what loaders do, replayed on real data, and closed to everything else."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.protocol import views
from weightsync.protocol.views import LoadRecorder, RecordingTensor, UnsupportedViewError, chain_result, replay

WEIGHT = torch.arange(4 * 6 * 3).view(4, 6, 3).float()

LOADER_STEPS = {
    "narrow": lambda w: w.narrow(0, 1, 2),
    "narrow by keyword": lambda w: torch.narrow(w, dim=1, start=2, length=3),
    "slice": lambda w: w[1:3],
    "slice with step": lambda w: w[:, ::2],
    "index": lambda w: w[2],
    "index tuple": lambda w: w[1, :, 2:],
    "ellipsis and None": lambda w: w[..., None],
    "negative index": lambda w: w[-1],
    "view": lambda w: w.view(24, 3),
    "view of bits": lambda w: w.view(torch.int32),
    "reshape": lambda w: w.reshape(-1, 6),
    "unsqueeze": lambda w: w.unsqueeze(1),
    "squeeze": lambda w: w[:1].squeeze(0),
    "transpose": lambda w: torch.transpose(w, 0, 2),
    "t": lambda w: w[0].t(),
    "permute": lambda w: w.permute(2, 0, 1),
    "flatten": lambda w: w.flatten(1),
    "contiguous": lambda w: w.transpose(0, 1).contiguous().view(6, -1),
    "chunk": lambda w: w.chunk(3, dim=1)[1],
    "torch.chunk": lambda w: torch.chunk(w, 2)[0],
    "unbind": lambda w: torch.unbind(w, dim=1)[4],
    "iteration": lambda w: list(w)[3],
    "device move": lambda w: w.to("cpu").detach().data[0],
    "reshape after transpose": lambda w: w.transpose(0, 1).reshape(12, -1)[3:7],
}


@pytest.mark.parametrize("step", LOADER_STEPS.values(), ids=LOADER_STEPS.keys())
def test_replaying_the_recorded_chain_gives_what_the_loader_saw(step: Any) -> None:
    recorded = step(RecordingTensor("w", WEIGHT.shape, WEIGHT.dtype))
    expected = step(WEIGHT)
    name, chain = pickle.loads(pickle.dumps(recorded.key))
    assert name == "w"
    assert (name, chain) == recorded.key
    assert hash(recorded.key) == hash((name, chain))
    assert torch.equal(replay(WEIGHT, chain), expected)
    assert tuple(recorded.shape) == tuple(expected.shape)
    assert recorded.dtype == expected.dtype
    assert chain_result(tuple(WEIGHT.shape), WEIGHT.dtype, chain) == (tuple(expected.shape), expected.dtype)


@st.composite
def random_chain(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Any]]:
    """A shape, and steps that fit whatever tensor they meet."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    steps = draw(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 99), st.integers(0, 99)), max_size=6))
    return shape, steps


def apply_step(tensor: Any, step: tuple[int, int, int]) -> Any:
    kind, a, b = step
    if tensor.dim() == 0:
        return tensor.unsqueeze(0)
    dim = a % tensor.dim()
    size = tensor.shape[dim]
    if kind == 0:
        start = b % size
        return tensor.narrow(dim, start, 1 + (a + b) % (size - start))
    if kind == 1:
        return tensor.transpose(dim, b % tensor.dim())
    if kind == 2:
        return tensor[b % tensor.shape[0]]
    if kind == 3:
        return tensor.unsqueeze(b % (tensor.dim() + 1))
    if kind == 4:
        return tensor.reshape(-1)
    if kind == 5:
        return tensor.contiguous()
    if kind == 6:
        return tensor.chunk(1 + b % 3, dim=dim)[0]
    if kind == 7:
        return tensor.unbind(dim)[b % size]
    if kind == 8:
        return tensor.flatten()
    if kind == 9:
        return tensor.squeeze(dim)
    if kind == 10:
        return tensor[b % tensor.shape[0] :]
    return tensor.permute(*[(d + b) % tensor.dim() for d in range(tensor.dim())])


@settings(max_examples=1500, deadline=None)
@given(random_chain())
def test_random_chains_replay_exactly(case: tuple[tuple[int, ...], list[Any]]) -> None:
    shape, steps = case
    real = torch.arange(torch.Size(shape).numel()).view(shape)
    recorded: Any = RecordingTensor("w", shape, real.dtype)
    expected = real
    for step in steps:
        recorded, expected = apply_step(recorded, step), apply_step(expected, step)
    assert torch.equal(replay(real, recorded.key[1]), expected)


NEEDS_DATA = {
    "add": lambda w: w + 1,
    "mul": lambda w: 2 * w,
    "item": lambda w: w[0, 0, 0].item(),
    "float": lambda w: float(w[0, 0, 0]),
    "bool": lambda w: bool(w[0, 0, 0] > 0),
    "index by tensor": lambda w: w[torch.tensor([0])],
    "index by list": lambda w: w[[0, 1]],
    "index by mask": lambda w: w[WEIGHT > 0],
    "sum": lambda w: w.sum(),
    "numpy": lambda w: w.numpy(),
    "cat": lambda w: torch.cat([w, w]),
    "in place": lambda w: w.fill_(0),
    "expand": lambda w: w.expand(2, 4, 6, 3),
    "equal": lambda w: torch.equal(w, w),
}


@pytest.mark.parametrize("step", NEEDS_DATA.values(), ids=NEEDS_DATA.keys())
def test_what_needs_data_is_refused_naming_the_weight(step: Any) -> None:
    with pytest.raises(UnsupportedViewError, match="experts"):
        step(RecordingTensor("experts", (4, 6, 3), torch.float32))


def test_copies_reach_the_sink_with_their_owner() -> None:
    module = torch.nn.Linear(6, 4, bias=False)
    before = module.weight.detach().clone()
    recorder = LoadRecorder()
    recorder.current = (module, "weight")
    source = RecordingTensor("w", (8, 6), torch.float32, sink=recorder)
    module.weight.data.narrow(0, 1, 2).copy_(source[4:6])
    copy = recorder.copies_by_module[module][0]
    assert recorder.copied_names == {"w"}
    assert (copy.param_name, copy.dest_offset, copy.dest_shape, copy.dest_stride) == ("weight", 6, (2, 6), (6, 1))
    assert torch.equal(module.weight, before), "recording must not write"
    real = torch.randn(8, 6)
    copy.destination_view(module.weight.detach()).copy_(replay(real, copy.op_chain))
    assert torch.equal(module.weight[1:3], real[4:6])


def test_a_broadcasting_copy_and_a_double_conversion_are_refused() -> None:
    source = RecordingTensor("scale", (1,), torch.float32, sink=LoadRecorder())
    with pytest.raises(UnsupportedViewError, match=r"scale.*broadcasting"):
        torch.zeros(4).copy_(source)
    with pytest.raises(UnsupportedViewError, match="second rounding"):
        torch.zeros(1).copy_(source.to(torch.bfloat16))
    recorder = LoadRecorder()
    target = torch.zeros(1, dtype=torch.bfloat16)
    target.copy_(RecordingTensor("scale", (1,), torch.float32, sink=recorder).to(torch.bfloat16))
    assert recorder.unattributed == [("scale", ())]


class Bomb:
    """Anything a hostile consumer could hope to have called."""

    def __reduce__(self) -> Any:
        raise AssertionError("pickled")

    def __index__(self) -> int:
        raise AssertionError("called")

    def __call__(self, *_: Any) -> None:
        raise AssertionError("called")


HOSTILE_VALUES = st.one_of(
    st.integers(-(2**70), 2**70),
    st.text(max_size=5),
    st.floats(),
    st.booleans(),
    st.none(),
    st.just(Ellipsis),
    st.builds(Bomb),
    st.just(torch.zeros(2)),
    st.just(print),
    st.just(slice(Bomb(), None)),
    st.just(torch.float32),
    st.lists(st.integers(-3, 3), max_size=3).map(tuple),
    st.lists(st.lists(st.integers(), max_size=2), max_size=2),
)
HOSTILE_OPS = st.one_of(
    st.sampled_from(sorted(views.ALLOWED_OPS)),
    st.sampled_from(["__class__", "__reduce__", "add_", "copy_", "apply_", "numpy", "data", "share_memory_", "set_"]),
    st.builds(Bomb),
)


@settings(max_examples=2000, deadline=None)
@given(
    st.lists(
        st.tuples(
            HOSTILE_OPS,
            st.lists(HOSTILE_VALUES, max_size=3).map(tuple),
            st.lists(
                st.tuples(st.sampled_from(["dim", "out", "memory_format", "dtype"]), HOSTILE_VALUES), max_size=1
            ).map(tuple),
        ),
        max_size=3,
    ).map(tuple)
)
def test_replay_of_hostile_chains_views_or_refuses(chain: Any) -> None:
    tensor = torch.arange(6).view(2, 3)
    try:
        result = replay(tensor, chain)
    except ValueError:
        result = None
    assert torch.equal(tensor, torch.arange(6).view(2, 3)), "the published tensor was written"
    assert result is None or isinstance(result, torch.Tensor)


@pytest.mark.parametrize(
    "chain",
    [
        "narrow",
        7,
        None,
        (("narrow",),),
        (("narrow", 1, ()),),
        (("view", (2,) * 99, ()),),
        (("unbind", (0,), ()),),
        (("t", (), ()),) * 65,
    ],
)
def test_malformed_chains_are_value_errors(chain: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any wording, but never another class
        replay(torch.zeros(2, 3), chain)


def test_one_table_feeds_recorder_and_replayer() -> None:
    assert set(views.SUPPORTED_OPS.values()) == views.ALLOWED_OPS
    assert (
        frozenset(
            [
                "narrow",
                "view",
                "reshape",
                "__getitem__",
                "unsqueeze",
                "squeeze",
                "transpose",
                "t",
                "permute",
                "flatten",
                "contiguous",
                "chunk",
                "unbind",
            ]
        )
        == views.ALLOWED_OPS
    )
