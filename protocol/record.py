"""Drive a module's own `load_weights` once, over recording tensors, and leave the module as it was.

    1. every parameter's loader is stamped, so that copies know their parameter; one without a loader gets the
       default one for the duration
    2. `load_weights` runs; copies out of recording tensors go to the recorder, and a guard swallows whatever
       else the loader writes into the module (zeroed padding, for one), and notes where
    3. loaders are put back by identity, also when the loader raised halfway
    4. what was written is compared with the parameters: elements that nothing filled are reported, and a weight
       that was changed after it was copied is refused

The thing to watch: nothing may be written to the module while it is recorded. Copies from recording tensors
never reach torch; everything else that would write to the module's storages is skipped by `_WriteGuard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.protocol.boxes import span_of
from weightsync.protocol.copies import OpChain, RecordedCopy
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.views import LoadRecorder, RecordingTensor
from weightsync.protocol.written import Region, WrittenParameter

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Metadata = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype name, global shape)."""

_MISSING = object()


@dataclass(frozen=True)
class Recording:
    """What one run of a loader did.

    `never_copied` are published names no copy came from; `unwritten` parameters (qualified names) no copy went
    to; `unattributed` copies that landed in none of the module's parameters or buffers; `partial` parameters
    of which neither a copy nor the loader itself filled some box: (qualified name, the first such box).
    """

    copies: tuple[RecordedCopy, ...]
    copies_by_module: Mapping[Any, Sequence[RecordedCopy]]
    live_names: frozenset[str]
    never_copied: tuple[str, ...]
    unwritten: tuple[str, ...]
    unattributed: tuple[tuple[str, OpChain], ...]
    partial: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Slot:
    """A parameter or buffer and the module that owns it."""

    module: nn.Module
    name: str
    tensor: torch.Tensor


def record_module(module: nn.Module, load_weights: LoadWeights | None, metadata: Metadata) -> Recording:
    """Record the copies of a module's own loader.

    Args:
        module: not computing meanwhile.
        load_weights: takes an iterable of (name, tensor); None lets each parameter and persistent buffer take
            the whole tensor of its own qualified name.
        metadata: everything that is published.

    Raises:
        UnsupportedViewError: the loader needs the data of a weight, or broadcasts; names both.
        UnsupportedLayoutError: the loader changes a parameter after copying a weight into it.
        InvalidLayoutError: with no loader, a parameter has no published tensor or another shape.
        Exception: whatever the loader itself raises; the module is restored first.
    """
    slots = list(_slots(module))
    resolve = _resolver(slots)
    recorder = LoadRecorder(resolve)
    guard = _WriteGuard(slots, lambda: len(recorder.copies))
    weights = (
        (name, RecordingTensor(name, shape, dtype_from_name(dtype), "cpu", recorder))
        for name, (dtype, shape) in metadata.items()
    )
    with torch.no_grad(), _stamped(slots, recorder), guard:
        if load_weights is None:
            _load_by_name(module, dict(weights), recorder)
        else:
            load_weights(weights)
    copied, fills = _copies_by_slot(recorder.copies), _fills_by_slot(guard.writes, resolve)
    prefixes = module_prefixes(module)
    partial = []
    for slot in slots:
        key = (id(slot.module), slot.name)
        if key in copied and slot.tensor.numel():
            name = prefixes[id(slot.module)] + slot.name
            hole = _check_slot(name, slot, copied[key], fills.get(key, ()))
            partial += [(name, hole)] if hole is not None else []
    written = {(id(copy.module), copy.param_name) for copy in recorder.copies}
    tied = {_memory(s.tensor) for s in slots if (id(s.module), s.name) in written}
    return Recording(
        copies=tuple(recorder.copies),
        copies_by_module=recorder.copies_by_module,
        live_names=frozenset(copy.src_name for copy in recorder.copies),
        never_copied=tuple(name for name in metadata if name not in recorder.copied_names),
        unwritten=tuple(
            prefixes[id(s.module)] + s.name
            for s in slots
            if isinstance(s.tensor, nn.Parameter) and _memory(s.tensor) not in tied
        ),
        unattributed=tuple(recorder.unattributed),
        partial=tuple(partial),
    )


def module_prefixes(root: nn.Module) -> dict[int, str]:
    """id(module) -> what stands before the names of its parameters, seen from `root`; the first name of each."""
    return {id(module): f"{prefix}." if prefix else "" for prefix, module in root.named_modules()}


# -- the default loader -------------------------------------------------------------------------------


def default_weight_loader(parameter: torch.Tensor, loaded: torch.Tensor, *_: Any, **__: Any) -> None:
    """Take the whole tensor.

    Raises:
        InvalidLayoutError: shapes disagree.
    """
    if tuple(parameter.shape) != tuple(loaded.shape):
        raise InvalidLayoutError(
            f"{loaded!r} has shape {tuple(loaded.shape)} and its parameter {tuple(parameter.shape)}; the parameter "
            "needs a weight_loader that cuts its part out"
        )
    parameter.data.copy_(loaded)


def _load_by_name(module: nn.Module, weights: dict[str, RecordingTensor], recorder: LoadRecorder) -> None:
    wanted = dict(module.named_parameters(remove_duplicate=False))
    persistent = module.state_dict(keep_vars=True)
    wanted.update((n, b) for n, b in module.named_buffers() if n in persistent)  # type: ignore[misc]
    loaded_memory: set[tuple[Any, ...]] = set()
    for name, tensor in wanted.items():
        if name not in weights:
            if _memory(tensor) in loaded_memory:
                continue
            raise InvalidLayoutError(
                f"{name!r} is wanted here but is not published; published are {len(weights)} names "
                f"({', '.join(list(weights)[:3])}, ...)"
            )
        owner, _, local = name.rpartition(".")
        recorder.current = (module.get_submodule(owner), local)
        default_weight_loader(tensor, weights[name])
        loaded_memory.add(_memory(tensor))
    recorder.current = None


# -- stamps -------------------------------------------------------------------------------------------


@contextmanager
def _stamped(slots: Sequence[_Slot], recorder: LoadRecorder) -> Iterator[None]:
    """Every parameter has a loader that tells the recorder whose turn it is; all undone afterwards."""
    undo: list[tuple[torch.Tensor, Any]] = []
    try:
        for slot in slots:
            if not isinstance(slot.tensor, nn.Parameter) or any(slot.tensor is done for done, _ in undo):
                continue
            own = slot.tensor.__dict__.get("weight_loader", _MISSING)
            loader = getattr(slot.tensor, "weight_loader", default_weight_loader)
            try:
                slot.tensor.weight_loader = _stamp(loader, slot, recorder)  # type: ignore[attr-defined]
            except AttributeError:
                continue  # a read-only property: the destination's memory tells the owner
            undo.append((slot.tensor, own))
        yield
    finally:
        recorder.current = None
        for tensor, own in undo:
            if own is _MISSING:
                del tensor.weight_loader  # type: ignore[attr-defined]
            else:
                tensor.weight_loader = own  # type: ignore[attr-defined]


def _stamp(loader: Callable[..., Any], slot: _Slot, recorder: LoadRecorder) -> Callable[..., Any]:
    def stamped(*args: Any, **kwargs: Any) -> Any:
        before, recorder.current = recorder.current, (slot.module, slot.name)
        try:
            return loader(*args, **kwargs)
        finally:
            recorder.current = before

    return stamped


# -- memory -------------------------------------------------------------------------------------------


class _WriteGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips every operation that would write into the module's storages, and notes it; reads go through.

    `writes` are (operation, the view it would have written, copies recorded until then).
    """

    def __init__(self, slots: Sequence[_Slot], copies_so_far: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: list[tuple[str, torch.Tensor, int]] = []
        self._copies_so_far = copies_so_far
        self._guarded = {slot.tensor.untyped_storage()._cdata for slot in slots}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._guarded:
                self.writes.append((func.__name__, value, self._copies_so_far()))
                return value
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Fill:
    """A write by the loader itself, after `after` recorded copies."""

    operation: str
    region: Region
    after: int


_SlotKey = tuple[int, str]
"""(id of the owning module, parameter name)."""


def _fills_by_slot(
    writes: Sequence[tuple[str, torch.Tensor, int]],
    resolve: Callable[[torch.Tensor], tuple[nn.Module, str, torch.Tensor] | None],
) -> dict[_SlotKey, list[_Fill]]:
    fills: dict[_SlotKey, list[_Fill]] = {}
    for operation, view, after in writes:
        owner = resolve(view)
        if owner is not None and view.numel():
            module, name, tensor = owner
            fills.setdefault((id(module), name), []).append(_Fill(operation, Region.of(view, tensor), after))
    return fills


def _copies_by_slot(copies: Sequence[RecordedCopy]) -> dict[_SlotKey, list[tuple[int, RecordedCopy]]]:
    """Copies with their place in call order."""
    copied: dict[_SlotKey, list[tuple[int, RecordedCopy]]] = {}
    for place, copy in enumerate(copies):
        copied.setdefault((id(copy.module), copy.param_name), []).append((place, copy))
    return copied


def _check_slot(
    where: str, slot: _Slot, copied: Sequence[tuple[int, RecordedCopy]], fills: Sequence[_Fill]
) -> str | None:
    """The hole a parameter is left with, if any.

    Raises:
        UnsupportedLayoutError: a weight that the loader changes after copying it would be pulled without that.
    """
    parameter = WrittenParameter(slot.tensor)
    for fill in fills:
        for place, copy in copied:
            if place < fill.after and parameter.overlap(fill.region, _region(copy)):
                raise UnsupportedLayoutError(
                    f"the loader changes {where} ({fill.operation}) after copying {copy.src_name} into it; what is "
                    "done to weights after loading cannot be pulled"
                )
    return parameter.hole([_region(copy) for _, copy in copied] + [fill.region for fill in fills])


def _region(copy: RecordedCopy) -> Region:
    return Region(copy.dest_offset, copy.dest_shape, copy.dest_stride)


def _slots(module: nn.Module) -> Iterator[_Slot]:
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield _Slot(owner, name, tensor)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Byte range of a tensor in its storage."""
    start = int(tensor.storage_offset())
    end = start + span_of(tensor.shape, tensor.stride())
    return start * tensor.element_size(), end * tensor.element_size()


def _resolver(slots: Sequence[_Slot]) -> Callable[[torch.Tensor], tuple[nn.Module, str, torch.Tensor] | None]:
    """Finds the parameter whose memory holds a destination; the smallest one where several do."""
    by_storage: dict[int, list[_Slot]] = {}
    for slot in slots:
        by_storage.setdefault(slot.tensor.untyped_storage()._cdata, []).append(slot)

    def resolve(destination: torch.Tensor) -> tuple[nn.Module, str, torch.Tensor] | None:
        start, end = _span(destination)
        holding = [
            slot
            for slot in by_storage.get(destination.untyped_storage()._cdata, ())
            if slot.tensor.dtype == destination.dtype
            and _span(slot.tensor)[0] <= start
            and end <= _span(slot.tensor)[1]
        ]
        if not holding:
            return None
        best = min(holding, key=lambda slot: slot.tensor.numel())
        return best.module, best.name, best.tensor

    return resolve
