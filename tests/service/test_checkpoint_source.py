"""A safetensors directory is published as the library wrote it, and refused where it is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.service.pulls import assert_equal, pull_whole
from weightsync.protocol.errors import InvalidLayoutError
from weightsync.service import (
    SafetensorsSource,
)

TENSORS = {
    "a": torch.randn(5, 3).to(torch.bfloat16),
    "b": torch.arange(7, dtype=torch.int64),
    "c": torch.randn(3).to(torch.float8_e4m3fn),
    "d": torch.tensor(2.5, dtype=torch.float64),
    "e": torch.zeros(0, 4),
    "f": torch.tensor([True, False, True]),
}


def test_a_checkpoint_file_is_published_as_it_is(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert_equal(pull_whole([SafetensorsSource(path)]), TENSORS)


def test_an_indexed_checkpoint_is_published_whole_and_tied_names_once(tmp_path: Path) -> None:
    names = list(TENSORS)
    weight_map = {}
    for part in range(2):
        own = names[part::2]
        save_file({name: TENSORS[name] for name in own}, tmp_path / f"model-{part}.safetensors")
        weight_map |= dict.fromkeys(own, f"model-{part}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = SafetensorsSource(tmp_path, aliases={"tied": "a"})
    assert {m.name: m.alias_of for m in source.manifest()}["tied"] == "a"
    assert_equal(pull_whole([source]), TENSORS | {"tied": TENSORS["a"]})


def test_a_header_that_is_not_padded_is_read_too(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length, so that no float begins at a multiple of its size
    assert (8 + len(header)) % 4
    values = torch.tensor([1.5, -2.0])
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    assert_equal(pull_whole([SafetensorsSource(tmp_path / "x.safetensors")]), {"w": values})


def _written(header: Any, data: bytes = b"") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        return folder

    return write


def _index(weight_map: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        save_file({"a": torch.zeros(1)}, folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
        return folder

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: folder, "holds neither model.safetensors nor model.safetensors.index.json"),
        (lambda folder: folder / "absent", "holds neither"),
        (_written(b"{]"), "header is not JSON"),
        (_written([1]), "header is a list"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"abc") and folder, "of 3 bytes"),
        (_written({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "'w' .* cut off or damaged"),
        (_written({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"), "'w' .* damaged"),
        (_written({"w": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}, b"12345678"), "'w' is F3"),
        (_written({"w": {"shape": [2]}}), "the entry of 'w' is damaged"),
        (_index({"weight_map": {"a": "gone.safetensors"}}), "'a' into gone.safetensors, which does not exist"),
        (_index({"weight_map": {"b": "part.safetensors"}}), "'b' into part.safetensors, which does not hold it"),
        (_index({"weight_map": {"a": "../part.safetensors"}}), "not a file beside it"),
        (_index({"a": 1}), "is no index"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_file_and_name(
    tmp_path: Path, write: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(InvalidLayoutError, match=message):
        SafetensorsSource(write(tmp_path))


@pytest.mark.parametrize(("aliases", "message"), [({"x": "y"}, "does not hold"), ({"a": "b"}, "a tensor of that name")])
def test_aliases_that_contradict_the_checkpoint_are_refused(tmp_path: Path, aliases: Any, message: str) -> None:
    save_file({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidLayoutError, match=message):
        SafetensorsSource(tmp_path, aliases)
