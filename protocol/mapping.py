"""Published tensors as views of the trainer's: checkpoint names and shapes over memory that is laid out otherwise.

Trainers fuse and stack: experts in one tensor, gate with up, a QKV interleaved by heads. A mapping says of each
published tensor which pure views of which trainer tensors it is made of. Views are recorded, not described; this is
a QKV of two groups, each of two query heads, a key head and a value head of two rows:

    >>> heads = RecordingTensor("qkv", (16, 8), torch.float32).view(2, 4, 2, 8)
    >>> query, key = heads[:, :2].reshape(8, 8), heads[:, 2].reshape(4, 8)
    >>> [box.start for box in MappedTensor("q", Assembly.of(query), {"qkv": ((16, 8), torch.float32)}).place(
    ...     "qkv", Box((0, 0), (16, 8), 0, (8, 1)))]
    [(0, 0), (4, 0)]

A box of the trainer's tensor, wherever a rank keeps it, is then boxes of the published one (`MappedTensor.place`), so
that nothing is gathered and nothing copied. The thing to watch: a chain is a strided view first and may keep only
the order of elements after that (`reshape`, `squeeze`), because what it means for memory is decided by strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weightsync.protocol.boxes import Box, boxes_of, intersect, row_major_strides
from weightsync.protocol.copies import OpChain
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.segments import source_view
from weightsync.protocol.views import RecordingTensor, describe_chain, replay

Geometry = tuple[OpChain, tuple[int, ...], torch.dtype]
"""A chain, and the shape and dtype it is applied to."""
_KEEP_ORDER = frozenset({"contiguous", "view", "reshape", "flatten", "squeeze", "unsqueeze"})


@dataclass(frozen=True)
class Part:
    """A box of a published tensor, at `offset` and of `shape`: a chain of views of one trainer tensor."""

    source: str
    chain: OpChain
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return describe_chain(self.source, self.chain)


@dataclass(frozen=True)
class Assembly:
    """A published tensor of `shape` and `dtype`, made of parts that tile it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, view: torch.Tensor | Assembly) -> Assembly:
        """A recorded view as the only part."""
        if isinstance(view, Assembly):
            return view
        if not isinstance(view, RecordingTensor):
            raise InvalidLayoutError(f"a mapping returns views of the tensors it is given, not a {type(view).__name__}")
        name, chain = view.key
        if view.converted_to is not None:
            raise UnsupportedLayoutError(
                f"{describe_chain(name, chain)} is converted to {view.converted_to}, which is no view; leave that to "
                "CastSource"
            )
        shape = tuple(view.shape)
        return cls(shape, view.dtype, (Part(name, chain, (0,) * len(shape), shape),))


def cat(tensors: Sequence[torch.Tensor | Assembly], dim: int = 0) -> Assembly:
    """Recorded views one after another along `dim`; `torch.cat` of what is not there yet.

    Raises:
        InvalidLayoutError: nothing to join, or shapes or dtypes that do not fit together.
    """
    if not tensors:
        raise InvalidLayoutError("there is no tensor to join")
    parts: list[Part] = []
    at, whole = 0, Assembly.of(tensors[0])
    dim %= max(len(whole.shape), 1)
    for one in map(Assembly.of, tensors):
        if one.dtype != whole.dtype or _without(one.shape, dim) != _without(whole.shape, dim):
            raise InvalidLayoutError(
                f"{one.parts[0]} is {one.shape} {one.dtype} and cannot be joined to {whole.parts[0]}, which is "
                f"{whole.shape} {whole.dtype}, along dimension {dim}"
            )
        for part in one.parts:
            offset = (*part.offset[:dim], part.offset[dim] + at, *part.offset[dim + 1 :])
            parts.append(Part(part.source, part.chain, offset, part.shape))
        at += one.shape[dim]
    return Assembly((*whole.shape[:dim], at, *whole.shape[dim + 1 :]), whole.dtype, tuple(parts))


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


class MappedTensor:
    """One published tensor: where boxes of trainer tensors lie in it.

    Args:
        name: it is published under.
        assembly: what it is made of.
        trainer: name -> (shape, dtype) of the trainer's tensors.
        known: regions by geometry, to be shared by the tensors of one model: its layers are alike.

    Raises:
        InvalidLayoutError: a trainer tensor is unknown, or a chain does not fit it.
        UnsupportedLayoutError: a chain is no strided view, or changes the dtype.
    """

    def __init__(
        self,
        name: str,
        assembly: Assembly,
        trainer: dict[str, tuple[tuple[int, ...], torch.dtype]],
        known: dict[Geometry, list[Box]] | None = None,
    ) -> None:
        known = {} if known is None else known
        self.name = name
        self.assembly = assembly
        self._regions: dict[str, list[tuple[Part, list[Box]]]] = {}
        for part in assembly.parts:
            if part.source not in trainer:
                raise InvalidLayoutError(f"{name!r} is mapped from {part.source!r}, which the trainer does not hold")
            shape, dtype = trainer[part.source]
            geometry = part.chain, shape, dtype
            if geometry not in known:
                known[geometry] = _region(name, part, shape, dtype)
            self._regions.setdefault(part.source, []).append((part, known[geometry]))

    @property
    def sources(self) -> tuple[str, ...]:
        """Trainer tensors it is made of."""
        return tuple(self._regions)

    def place(self, source: str, held: Box) -> list[Box]:
        """What a box of a trainer tensor is of this one: boxes of this tensor, addressing the same memory.

        Args:
            held: a box of the trainer tensor; its `offset` and `strides` address memory, in elements.
        """
        return _joined(list(self._boxes(source, held)))

    def _boxes(self, source: str, held: Box) -> Iterator[Box]:
        for part, region in self._regions.get(source, ()):
            unit = row_major_strides(part.shape)
            for wanted in region:
                shared = intersect(wanted, held)
                if shared is None:
                    continue
                inside, memory = _address(wanted, shared), _address(held, shared)
                for box in boxes_of(
                    part.shape, shared.extent, inside, wanted.strides, memory, held.strides, what=self.name
                ):
                    strides = tuple(
                        stride if size > 1 else one
                        for size, stride, one in zip(box.extent, box.strides, unit, strict=True)
                    )
                    start = tuple(a + o for a, o in zip(box.start, part.offset, strict=True))
                    yield Box(start, box.extent, box.offset, strides)

    @torch.no_grad()
    def assemble(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The published tensor from whole trainer tensors: a view if it is one, else new memory."""
        first = self.assembly.parts[0]
        if len(self.assembly.parts) == 1:
            return replay(tensors[first.source], first.chain)
        out = torch.empty(self.assembly.shape, dtype=self.assembly.dtype, device=tensors[first.source].device)
        for part in self.assembly.parts:
            box = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
            out[box].copy_(replay(tensors[part.source], part.chain))
        return out


def _region(name: str, part: Part, shape: tuple[int, ...], dtype: torch.dtype) -> list[Box]:
    """The part as boxes of the trainer tensor, each addressing the flat elements of the part."""
    view = source_view(part.source, part.chain, torch.empty(shape, dtype=dtype, device="meta"))
    selects = [op for op, _, _ in view.rest if op not in _KEEP_ORDER]
    if selects:
        raise UnsupportedLayoutError(
            f"{name!r} is mapped as {part}, which takes {selects[0]} of elements that are no strided view any more; "
            "select before you reshape, or publish it with mode='staged'"
        )
    if view.dtype != dtype or any(isinstance(arg, torch.dtype) for _, args, _ in view.rest for arg in args):
        raise UnsupportedLayoutError(f"{name!r} is mapped as {part}, which looks at {dtype} as another dtype")
    return boxes_of(
        shape,
        view.shape,
        view.offset,
        view.strides,
        0,
        row_major_strides(view.shape),
        what=f"{name!r}, mapped as {part}",
    )


def _joined(boxes: list[Box]) -> list[Box]:
    """The same elements in fewer boxes: those that go on along a dimension, at one step in memory, are one."""
    for dim in range(len(boxes[0].start)) if len(boxes) > 1 else ():
        out: list[Box] = []
        for box in sorted(boxes, key=lambda b: (_without(b.start, dim), b.start[dim])):
            both = _continued(out[-1], box, dim) if out else None
            out[-1:] = [both] if both else [*out[-1:], box]
        boxes = out
    return boxes


def _continued(box: Box, after: Box, dim: int) -> Box | None:
    """Both as one box, if the second goes on where the first ends."""
    length = box.extent[dim]
    step, rest = divmod(after.offset - box.offset, length)
    fits = (
        not rest
        and step > 0
        and after.start == (*box.start[:dim], box.start[dim] + length, *box.start[dim + 1 :])
        and _without(box.extent, dim) == _without(after.extent, dim)
        and _without(box.strides, dim) == _without(after.strides, dim)
        and all(one.extent[dim] == 1 or one.strides[dim] == step for one in (box, after))
    )
    if not fits:
        return None
    extent = (*box.extent[:dim], length + after.extent[dim], *box.extent[dim + 1 :])
    return Box(box.start, extent, box.offset, (*box.strides[:dim], step, *box.strides[dim + 1 :]))


def _address(box: Box, inner: Box) -> int:
    """What `box` addresses at the first element of a box inside it."""
    return box.offset + sum(
        (at - start) * stride for at, start, stride in zip(inner.start, box.start, box.strides, strict=True)
    )
