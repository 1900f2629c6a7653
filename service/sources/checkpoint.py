"""A checkpoint directory as a source: safetensors files, published without a trainer.

Files are mapped, not read: bytes come from the page cache when somebody pulls them, and this process holds none of
its own. The format is a length, a JSON header and raw little-endian tensors, so it is read here directly. The thing
to watch: a file must not be rewritten in place while it is published; write a new directory instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from weightsync.protocol.errors import InvalidLayoutError
from weightsync.service.sources.tensors import StateDictSource

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100 << 20
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}


class SafetensorsSource(StateDictSource):
    """The tensors of a safetensors checkpoint, whole, on one rank.

    Args:
        path: a file, or a directory with `model.safetensors`, or with an index and the files it names.
        aliases: names of tied weights that the checkpoint leaves out: alias -> the name it has.

    Raises:
        InvalidLayoutError: no checkpoint there, a file that the index names is missing or lacks a tensor, or a file
            that is damaged; names the file and the tensor.

    Example:
        >>> SafetensorsSource("/checkpoints/step-100", aliases={"lm_head.weight": "model.embed_tokens.weight"}) \\
        ...     # doctest: +SKIP
    """

    def __init__(self, path: str | Path, aliases: Mapping[str, str] | None = None) -> None:
        tensors = _checkpoint(Path(path))
        for alias, name in (aliases or {}).items():
            if name not in tensors:
                raise InvalidLayoutError(f"{alias!r} is to be an alias of {name!r}, which {path} does not hold")
            if alias in tensors:
                raise InvalidLayoutError(f"{alias!r} is to be an alias, and {path} holds a tensor of that name")
        super().__init__(tensors | {alias: tensors[name] for alias, name in (aliases or {}).items()})


def _checkpoint(path: Path) -> dict[str, torch.Tensor]:
    if path.is_file():
        return _mapped_file(path)
    index, single = path / INDEX, path / SINGLE
    if index.is_file():
        return _indexed(index)
    if single.is_file():
        return _mapped_file(single)
    found = sorted(file.name for file in path.glob("*.safetensors")) if path.is_dir() else []
    raise InvalidLayoutError(
        f"{path} holds neither {SINGLE} nor {INDEX}"
        + (f", only {found[:3]}; name one of these files, or write an index" if found else "")
    )


def _indexed(index: Path) -> dict[str, torch.Tensor]:
    try:
        file_of = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidLayoutError(f"{index} is no index: it needs a 'weight_map' ({type(error).__name__})") from None
    files: dict[str, dict[str, torch.Tensor]] = {}
    tensors = {}
    for name, file in file_of.items():
        if Path(file).name != file:
            raise InvalidLayoutError(f"{index} puts {name!r} into {file!r}, which is not a file beside it")
        if file not in files:
            if not (index.parent / file).is_file():
                raise InvalidLayoutError(f"{index} puts {name!r} into {file}, which does not exist")
            files[file] = _mapped_file(index.parent / file)
        if name not in files[file]:
            raise InvalidLayoutError(f"{index} puts {name!r} into {file}, which does not hold it")
        tensors[name] = files[file][name]
    return tensors


def _mapped_file(path: Path) -> dict[str, torch.Tensor]:
    """Tensors over one mapping of the file, in the order they lie in."""
    header, first = _header(path)
    size = path.stat().st_size
    entries = {name: _entry(path, name, entry, size - first) for name, entry in header.items()}
    storage = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).untyped_storage()
    return {
        name: _view(storage, first + start, dtype, shape)
        for name, (dtype, shape, start) in sorted(entries.items(), key=lambda item: item[1][2])
    }


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """(name -> entry, byte at which tensors begin)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or not 0 < length <= min(_LONGEST_HEADER, size - _LENGTH_BYTES):
            raise InvalidLayoutError(f"{path} is no safetensors file: of {size} bytes, its header would take {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise InvalidLayoutError(f"{path} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise InvalidLayoutError(f"{path} is no safetensors file: its header is a {type(header).__name__}")
    header.pop("__metadata__", None)
    return header, _LENGTH_BYTES + length


def _entry(path: Path, name: str, entry: Any, room: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    """(dtype, shape, first byte) of one tensor."""
    try:
        known, shape, (start, end) = _DTYPES.get(entry["dtype"]), tuple(map(int, entry["shape"])), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise InvalidLayoutError(f"{path}: the entry of {name!r} is damaged: {str(entry)[:80]}") from None
    dtype = getattr(torch, known, None) if known else None
    if dtype is None:
        raise InvalidLayoutError(
            f"{path}: {name!r} is {entry['dtype']}, which torch {torch.__version__} has no dtype for"
        )
    if any(n < 0 for n in shape) or end - start != prod(shape) * dtype.itemsize or not 0 <= start <= end <= room:
        raise InvalidLayoutError(
            f"{path}: {name!r} is {shape} {dtype} at bytes {start}..{end} of {room}; the file is cut off or damaged"
        )
    return dtype, shape, start


def _view(storage: torch.UntypedStorage, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if at % dtype.itemsize:  # a header that was not padded: torch addresses whole elements only
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, at, (prod(shape) * dtype.itemsize,))  # type: ignore[call-overload]
        return flat.clone().view(dtype).view(shape)
    return torch.empty(0, dtype=dtype).set_(storage, at // dtype.itemsize, shape)  # type: ignore[call-overload]
