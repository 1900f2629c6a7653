"""The model that is moved: what each trainer rank holds and what each inference worker wants of it.

Trainer ranks hold row shards, as FSDP does. Workers form replicas of `tensor_parallel` each; within a replica a
tensor is cut by rows or by columns, or held whole, as an engine does with column- and row-parallel layers. A row
shard and a column slice meet in one run per row. All tensors are bfloat16 and have one or two dimensions; a vector
is a matrix of one column here. The thing to watch: nothing here is taken from weightsync's planner, because what
bare reads and checks are made of must not depend on what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

ITEMSIZE = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True)
class Box:
    """Rows and columns of a tensor, in elements: `rows` from `row` on, `columns` from `column` on."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE

    def meet(self, other: Box) -> Box | None:
        """What both cover; None if nothing."""
        row, end = max(self.row, other.row), min(self.row + self.rows, other.row + other.rows)
        column, right = max(self.column, other.column), min(self.column + self.columns, other.column + other.columns)
        return Box(row, end - row, column, right - column) if row < end and column < right else None


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model.

    Args:
        columns: 1 makes it a vector.
        cut: the dimension that tensor-parallel workers cut, or None if each holds all rows and columns.
        wanted_columns: workers want the first so many columns only; None means all.
    """

    name: str
    rows: int
    columns: int
    cut: int | None = None
    wanted_columns: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows,) if self.columns == 1 else (self.rows, self.columns)

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * ITEMSIZE

    def shape_of(self, box: Box) -> tuple[int, ...]:
        """The shape of a tensor that holds `box`."""
        return (box.rows,) if self.columns == 1 else (box.rows, box.columns)


@dataclass(frozen=True)
class Layout:
    """A model between `producers` trainer ranks and `consumers` workers, `tensor_parallel` of them to a replica."""

    groups: tuple[tuple[TensorSpec, ...], ...]
    """Tensors in checkpoint order; a group is a decoder layer, or what comes before and after the layers."""
    producers: int
    consumers: int
    tensor_parallel: int

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for group in self.groups for spec in group}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole model."""
        return sum(spec.nbytes for spec in self.tensors.values())

    @cached_property
    def wanted_nbytes(self) -> int:
        """Bytes that all workers together want."""
        return sum(box.nbytes for worker in range(self.consumers) for box in self.wanted(worker).values())

    @cached_property
    def largest_nbytes(self) -> int:
        return max(spec.nbytes for spec in self.tensors.values())

    def held(self, rank: int) -> dict[str, Box]:
        """What a trainer rank holds, by name; of a tensor with fewer rows than ranks perhaps nothing."""
        return self._held[rank]

    def wanted(self, worker: int) -> dict[str, Box]:
        """What a worker wants, by name."""
        return self._wanted[worker]

    @cached_property
    def _held(self) -> list[dict[str, Box]]:
        return [
            {
                name: Box(*_share(spec.rows, rank, self.producers), 0, spec.columns)
                for name, spec in self.tensors.items()
                if _share(spec.rows, rank, self.producers)[1]
            }
            for rank in range(self.producers)
        ]

    @cached_property
    def _wanted(self) -> list[dict[str, Box]]:
        return [
            {name: self._slice(spec, worker % self.tensor_parallel) for name, spec in self.tensors.items()}
            for worker in range(self.consumers)
        ]

    def _slice(self, spec: TensorSpec, place: int) -> Box:
        row, rows, column, columns = 0, spec.rows, 0, spec.wanted_columns or spec.columns
        if spec.cut == 0:
            row, rows = _share(rows, place, self.tensor_parallel)
        elif spec.cut == 1:
            column, columns = _share(columns, place, self.tensor_parallel)
        return Box(row, rows, column, columns)

    def pieces(self, rank: int, worker: int) -> Iterator[tuple[str, Box]]:
        """What `rank` holds of what `worker` wants, name by name."""
        held = self.held(rank)
        for name, wanted in self.wanted(worker).items():
            piece = held[name].meet(wanted) if name in held else None
            if piece is not None:
                yield name, piece

    @cached_property
    def contiguous(self) -> bool:
        """True if every piece is one run on both sides, so that no way needs to pack or scatter anything."""
        return all(
            piece.columns == self.tensors[name].columns
            for rank in range(self.producers)
            for worker in range(self.consumers)
            for name, piece in self.pieces(rank, worker)
        )

    @cached_property
    def runs(self) -> int:
        """Runs that are contiguous on both sides, all workers together, not counting that neighbours could merge."""
        return sum(
            1 if piece.columns == self.tensors[name].columns else piece.rows
            for rank in range(self.producers)
            for worker in range(self.consumers)
            for name, piece in self.pieces(rank, worker)
        )


def _share(total: int, index: int, parts: int) -> tuple[int, int]:
    """(start, length) of the index-th of `parts` nearly equal parts."""
    start = index * total // parts
    return start, (index + 1) * total // parts - start


def model_layout(nbytes: int, producers: int, consumers: int, tensor_parallel: int) -> Layout:
    """A decoder-only model of about `nbytes`: per layer a fused QKV, an output projection, an MLP and norms.

    Raises:
        ValueError: consumers are no multiple of tensor_parallel, or the model is too small to be one.
    """
    if consumers % tensor_parallel:
        raise ValueError(f"{consumers} consumers cannot form replicas of tensor parallel {tensor_parallel}")
    hidden = 16
    while 24 * (2 * hidden) ** 2 <= nbytes // 8:
        hidden *= 2
    layers = int(0.9 * nbytes) // (24 * hidden * hidden)
    rest = nbytes - layers * _layer_nbytes(hidden) - hidden * ITEMSIZE
    if layers < 1 or rest < hidden * ITEMSIZE or hidden < tensor_parallel:
        raise ValueError(f"a model of {nbytes} bytes is too small to be cut into {tensor_parallel}")
    vocabulary = rest // (hidden * ITEMSIZE)
    groups: list[tuple[TensorSpec, ...]] = [(TensorSpec("model.embed_tokens.weight", vocabulary, hidden, cut=0),)]
    groups += [_layer(index, hidden) for index in range(layers)]
    groups.append((TensorSpec("model.norm.weight", hidden, 1),))
    return Layout(tuple(groups), producers, consumers, tensor_parallel)


def _layer(index: int, hidden: int) -> tuple[TensorSpec, ...]:
    prefix = f"model.layers.{index}."
    return (
        TensorSpec(prefix + "self_attn.qkv_proj.weight", 3 * hidden, hidden, cut=0),
        TensorSpec(prefix + "self_attn.o_proj.weight", hidden, hidden, cut=1),
        TensorSpec(prefix + "mlp.up_proj.weight", 4 * hidden, hidden, cut=0),
        TensorSpec(prefix + "mlp.down_proj.weight", hidden, 4 * hidden, cut=1),
        TensorSpec(prefix + "input_layernorm.weight", hidden, 1),
        TensorSpec(prefix + "post_attention_layernorm.weight", hidden, 1),
    )


def _layer_nbytes(hidden: int) -> int:
    return sum(spec.nbytes for spec in _layer(0, hidden))


def gapped_layout(nbytes: int, run_nbytes: int, gap: float = 1.0, tensors: int = 4) -> Layout:
    """One to one; workers want `nbytes` in runs of `run_nbytes`, each followed by a gap in the source.

    Without gaps NIXL would merge the runs of a tensor into one.

    Args:
        gap: its length, in runs.

    Raises:
        ValueError: a run or gap is not a whole number of elements, or there are fewer runs than tensors.
    """
    columns, odd = divmod(run_nbytes, ITEMSIZE)
    gap_columns = int(columns * gap)
    rows = nbytes // (run_nbytes * tensors)
    if odd or columns < 2 or rows < 1 or gap_columns < 1:
        raise ValueError(f"{nbytes} bytes do not split into runs of {run_nbytes} bytes in {tensors} tensors")
    groups = tuple(
        (TensorSpec(f"model.layers.{i}.weight", rows, columns + gap_columns, wanted_columns=columns),)
        for i in range(tensors)
    )
    return Layout(groups, producers=1, consumers=1, tensor_parallel=1)


UInt64 = npt.NDArray[np.uint64]


def runs_between(
    layout: Layout, rank: int, worker: int, source: dict[str, int], destination: dict[str, int]
) -> tuple[UInt64, UInt64, npt.NDArray[np.int64]]:
    """(source addresses, destination addresses, bytes) of what a worker reads from a rank.

    Args:
        source, destination: name -> address of the tensor that holds the rank's or worker's box.
    """
    held, wanted = layout.held(rank), layout.wanted(worker)
    src, dst, nbytes = [], [], []
    for name, piece in layout.pieces(rank, worker):
        theirs, ours = held[name], wanted[name]
        whole = piece.columns == theirs.columns == ours.columns
        steps = np.arange(1 if whole else piece.rows, dtype=np.uint64)
        src.append(source[name] + (steps * theirs.columns + _index_in(theirs, piece)) * ITEMSIZE)
        dst.append(destination[name] + (steps * ours.columns + _index_in(ours, piece)) * ITEMSIZE)
        nbytes.append(np.full(len(steps), piece.nbytes if whole else piece.columns * ITEMSIZE, dtype=np.int64))
    if not nbytes:
        empty = np.zeros(0, dtype=np.uint64)
        return empty, empty, empty.astype(np.int64)
    return np.concatenate(src).astype(np.uint64), np.concatenate(dst).astype(np.uint64), np.concatenate(nbytes)


def _index_in(box: Box, piece: Box) -> np.uint64:
    """Element index of the piece's first element in a tensor that holds `box`."""
    return np.uint64((piece.row - box.row) * box.columns + piece.column - box.column)
