"""Op chains: what a loader does to a weight before it copies it, as data that can be replayed.

A loader is run once over `RecordingTensor`s. Each pure view it takes becomes one entry
`(op, args, sorted kwargs)` of the chain; each `copy_` out of one reaches the sink as a `RecordedCopy`. Anything
else it does to a weight is refused by name. `replay` applies a chain to real data.

The thing to watch: one table, `_VIEWS`, feeds both sides. A chain arrives from other processes and may be
hostile, so `replay` accepts nothing but these names, with integers, slices, None, Ellipsis, tuples of them and
dtypes as arguments. Geometry is always torch's own, on meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import torch

from weightsync.protocol.copies import OpChain, RecordedCopy
from weightsync.protocol.errors import UnsupportedViewError
from weightsync.protocol.view_arguments import MAX_CHAIN, FrozenSlice, brief, freeze, freeze_args, thaw_entry

__all__ = [
    "ALLOWED_OPS",
    "SUPPORTED_OPS",
    "FrozenSlice",
    "LoadRecorder",
    "RecordingTensor",
    "UnsupportedViewError",
    "chain_result",
    "describe_chain",
    "replay",
]

_T = torch.Tensor

_VIEWS: dict[str, tuple[Callable[..., Any], ...]] = {
    "narrow": (_T.narrow, torch.narrow),
    "view": (_T.view,),
    "reshape": (_T.reshape, torch.reshape),
    "__getitem__": (_T.__getitem__,),
    "unsqueeze": (_T.unsqueeze, torch.unsqueeze),
    "squeeze": (_T.squeeze, torch.squeeze),
    "transpose": (_T.transpose, torch.transpose),
    "t": (_T.t, torch.t),
    "permute": (_T.permute, torch.permute),
    "flatten": (_T.flatten, torch.flatten),
    "contiguous": (_T.contiguous,),
    "chunk": (_T.chunk, torch.chunk),
    "unbind": (_T.unbind, torch.unbind),
}
"""Op name -> the callables that mean it; the first one replays it."""

ALLOWED_OPS: frozenset[str] = frozenset(_VIEWS)
SUPPORTED_OPS: dict[Callable[..., Any], str] = {func: op for op, funcs in _VIEWS.items() for func in funcs}

_MULTI_RESULT = frozenset({"chunk", "unbind"})

# Reading these tells a loader about shape and placement, never about data.
_METADATA: frozenset[Any] = frozenset(
    {
        _T.size,
        _T.dim,
        _T.numel,
        _T.nelement,
        _T.ndimension,
        _T.stride,
        _T.storage_offset,
        _T.is_contiguous,
        _T.element_size,
        _T.is_floating_point,
        _T.is_complex,
        _T.__len__,
        _T.get_device,
        torch.numel,
        torch.is_tensor,
        torch.is_floating_point,
        *(
            getattr(_T, name).__get__
            for name in (
                "shape",
                "dtype",
                "ndim",
                "is_cuda",
                "is_meta",
                "is_sparse",
                "is_quantized",
                "is_leaf",
                "requires_grad",
                "layout",
                "itemsize",
                "nbytes",
            )
        ),
    }
)
_DATA: Any = _T.data
_IDENTITIES: frozenset[Any] = frozenset({_T.detach, torch.detach, _DATA.__get__, _T.cpu, _T.cuda})


class CopySink(Protocol):
    """Whoever wants to know of copies out of recording tensors."""

    def on_copy(self, destination: torch.Tensor, source: RecordingTensor) -> None: ...


class RecordingTensor(torch.Tensor):
    """A weight without data that remembers what is done to it.

    Args:
        name: checkpoint name.
        shape, dtype: of the weight.
        device: what the tensor says it is on; its geometry is always kept on meta.
        sink: told of every `copy_` out of this tensor or a view of it.

    Example:
        >>> weight = RecordingTensor("w", (4, 6), torch.bfloat16)
        >>> weight.narrow(0, 2, 2).key
        ('w', (('narrow', (0, 2, 2), ()),))
    """

    _weight_name: str
    _chain: OpChain
    _says_device: torch.device
    _sink: CopySink | None
    _converted_to: torch.dtype | None

    def __new__(
        cls,
        name: str,
        shape: tuple[int, ...] | torch.Size,
        dtype: torch.dtype,
        device: str | torch.device = "meta",
        sink: CopySink | None = None,
    ) -> RecordingTensor:
        return cls._wrap(torch.empty(tuple(shape), dtype=dtype, device="meta"), name, (), torch.device(device), sink)

    @classmethod
    def _wrap(
        cls,
        geometry: torch.Tensor,
        name: str,
        chain: OpChain,
        device: torch.device,
        sink: CopySink | None,
        converted_to: torch.dtype | None = None,
    ) -> RecordingTensor:
        self: RecordingTensor = torch.Tensor._make_subclass(cls, geometry)
        self._weight_name, self._chain, self._sink = name, chain, sink
        self._says_device, self._converted_to = device, converted_to
        return self

    @property
    def key(self) -> tuple[str, OpChain]:
        """(weight name, op chain): hashable, picklable, and what a producer is asked for."""
        return self._weight_name, self._chain

    @property
    def converted_to(self) -> torch.dtype | None:
        """The dtype the loader asked for with `.to`, if it is not the weight's own."""
        return self._converted_to

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._says_device

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"RecordingTensor({describe_chain(self._weight_name, self._chain)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        source = _first_recording(args, kwargs)
        if func in SUPPORTED_OPS:
            return source._view(SUPPORTED_OPS[func], func, args, kwargs)
        if func is _T.__iter__:
            return iter(source._view("unbind", _T.unbind, (args[0], 0), {}))
        if func is _T.copy_:
            return _record_copy(*args, **kwargs)
        if func in _IDENTITIES:
            return source
        if func in (_T.to, _T.type, _T.type_as):
            return source._converted(func, args, kwargs)
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise UnsupportedViewError(
            f"the loader applies {getattr(func, '__name__', func)} to {describe_chain(*source.key)}; only pure "
            f"views can be recorded ({', '.join(sorted(ALLOWED_OPS))})"
        )

    def _view(self, op: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a view: geometry by torch, the entry appended to the chain."""
        if args and args[0] is self:
            rest = args[1:]
        else:  # torch.narrow(input=w, ...)
            rest, kwargs = args, {name: value for name, value in kwargs.items() if value is not self}
        try:
            entry = (op, freeze_args(op, rest), tuple(sorted((k, freeze(v)) for k, v in kwargs.items())))
        except ValueError as error:
            raise UnsupportedViewError(
                f"the loader takes a view of {describe_chain(*self.key)} that needs data: {error}"
            ) from None
        with torch._C.DisableTorchFunctionSubclass():
            result = func(self, *rest, **kwargs)
        if op in _MULTI_RESULT:
            return tuple(
                self._child(piece, (*self._chain, entry, ("__getitem__", (index,), ())))
                for index, piece in enumerate(result)
            )
        return self._child(result, (*self._chain, entry))

    def _child(self, geometry: torch.Tensor, chain: OpChain) -> RecordingTensor:
        if geometry.dtype != self.dtype and self._converted_to is not None:
            raise UnsupportedViewError(
                f"the loader converts {describe_chain(*self.key)} and then looks at its bits as {geometry.dtype}"
            )
        return self._wrap(
            geometry.as_subclass(torch.Tensor),
            self._weight_name,
            chain,
            self._says_device,
            self._sink,
            self._converted_to,
        )

    def _converted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordingTensor:
        """`.to`: devices are nothing to us; another dtype is kept in mind until the copy."""
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, RecordingTensor) else a for a in args[1:]]
        with torch._C.DisableTorchFunctionSubclass():
            scalar = torch.empty((), dtype=self._converted_to or self.dtype)
            wanted = func(scalar, *plain, **kwargs)
        dtype = wanted.dtype if isinstance(wanted, torch.Tensor) else None
        device = wanted.device if isinstance(wanted, torch.Tensor) else self._says_device
        converted = None if dtype in (None, self.dtype) else dtype
        return self._wrap(self._geometry(), self._weight_name, self._chain, device, self._sink, converted)

    def _geometry(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


class LoadRecorder:
    """The sink: turns copies out of recording tensors into `RecordedCopy`s.

    `current` is (module, parameter name) while that parameter's loader runs; `resolve`, if given, finds the
    owner of a destination when no loader was stamped: destination -> (module, parameter name, parameter).
    """

    def __init__(
        self,
        resolve: Callable[[torch.Tensor], tuple[Hashable, str, torch.Tensor] | None] | None = None,
    ) -> None:
        self.current: tuple[Hashable, str] | None = None
        self.copies: list[RecordedCopy] = []
        self.copies_by_module: dict[Hashable, list[RecordedCopy]] = {}
        self.copied_names: set[str] = set()
        self.unattributed: list[tuple[str, OpChain]] = []
        self._resolve = resolve

    def on_copy(self, destination: torch.Tensor, source: RecordingTensor) -> None:
        """Note one copy.

        Raises:
            UnsupportedViewError: it broadcasts, or converts through a dtype that is not the destination's.
        """
        _check_copy(destination, source)
        self.copied_names.add(source.key[0])
        owner = self._owner(destination)
        if owner is None:
            self.unattributed.append(source.key)
            return
        module, param_name, base = owner
        copy = RecordedCopy(
            src_name=source.key[0],
            op_chain=source.key[1],
            param_name=param_name,
            dest_offset=int(destination.storage_offset()) - base,
            dest_shape=tuple(destination.shape),
            dest_stride=tuple(destination.stride()),
            dest_dtype=destination.dtype,
            module=module,
        )
        self.copies.append(copy)
        self.copies_by_module.setdefault(module, []).append(copy)

    def _owner(self, destination: torch.Tensor) -> tuple[Hashable, str, int] | None:
        """(module, parameter name, storage offset of the parameter's first element)."""
        if self.current is not None:
            module, param_name = self.current
            parameter = getattr(module, param_name, None) if isinstance(module, torch.nn.Module) else None
            if parameter is None or _same_storage(parameter, destination):
                return module, param_name, 0 if parameter is None else int(parameter.storage_offset())
        found = self._resolve(destination) if self._resolve is not None else None
        return None if found is None else (found[0], found[1], int(found[2].storage_offset()))


def replay(tensor: torch.Tensor, op_chain: OpChain) -> torch.Tensor:
    """Apply a chain to real data.

    Raises:
        ValueError: an op outside the table, an argument that no view takes, or one that does not fit.
    """
    if not isinstance(op_chain, tuple | list) or len(op_chain) > MAX_CHAIN:
        raise ValueError(f"an op chain is a tuple of at most {MAX_CHAIN} entries, got {brief(op_chain)}")
    current: Any = tensor
    for position, entry in enumerate(op_chain):
        op, args, kwargs = thaw_entry(entry, ALLOWED_OPS)
        if isinstance(current, tuple) and not (op == "__getitem__" and len(args) == 1 and type(args[0]) is int):
            raise ValueError(f"entry {position}: one of several results must be picked by an integer, got {op}")
        try:
            current = current[args[0]] if isinstance(current, tuple) else _VIEWS[op][0](current, *args, **kwargs)
        except (RuntimeError, TypeError, IndexError, OverflowError) as error:
            first_line = str(error).partition("\n")[0]
            raise ValueError(f"entry {position} ({op}{args}) does not fit: {first_line}") from None
    if not isinstance(current, torch.Tensor):
        raise ValueError(f"the chain ends in {len(current)} results; pick one by an integer")
    return current


def chain_result(shape: tuple[int, ...], dtype: torch.dtype, op_chain: OpChain) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a chain's result, without data.

    Raises:
        ValueError: as `replay`.
    """
    result = replay(torch.empty(shape, dtype=dtype, device="meta"), op_chain)
    return tuple(result.shape), result.dtype


def describe_chain(name: str, op_chain: OpChain) -> str:
    """`name.narrow(0, 2, 2).t()`, for messages."""
    return name + "".join(
        f".{op}({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs)])})" for op, args, kwargs in op_chain
    )


# -- copies -------------------------------------------------------------------------------------------


def _record_copy(destination: Any, source: Any, non_blocking: bool = False) -> Any:
    del non_blocking
    if isinstance(destination, RecordingTensor):
        raise UnsupportedViewError(f"the loader writes into {describe_chain(*destination.key)}, a published weight")
    if source._sink is None:
        raise UnsupportedViewError(f"{describe_chain(*source.key)} is copied, but nothing records its copies")
    source._sink.on_copy(destination, source)
    return destination


def _check_copy(destination: torch.Tensor, source: RecordingTensor) -> None:
    if tuple(destination.shape) != tuple(source.shape):
        raise UnsupportedViewError(
            f"the loader copies {describe_chain(*source.key)} of shape {tuple(source.shape)} into shape "
            f"{tuple(destination.shape)}; a broadcasting copy cannot be recorded"
        )
    if source.converted_to not in (None, destination.dtype):
        raise UnsupportedViewError(
            f"the loader converts {describe_chain(*source.key)} to {source.converted_to} and then copies it into "
            f"{destination.dtype}; the second rounding cannot be recorded"
        )


def _same_storage(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(left.untyped_storage()._cdata == right.untyped_storage()._cdata)


def _first_recording(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordingTensor:
    stack: list[Any] = [*args, *kwargs.values()]
    while stack:
        item = stack.pop(0)
        if isinstance(item, RecordingTensor):
            return item
        if isinstance(item, tuple | list):
            stack.extend(item)
    raise UnsupportedViewError("a recording tensor was used in a way that cannot be recorded")
