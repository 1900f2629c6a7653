"""What a plan costs, for `weightsync plan`: bytes, copies, runs by size, who serves how much, what is packed.

Either two layouts of one parameter, or of every parameter of a model, are composed; or the copies that an
engine's own loader makes are recorded and planned against the trainer's layout. Nothing is moved and no memory
is allocated: models are built on the meta device.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightsync.protocol.amounts import format_bytes
from weightsync.protocol.boxes import is_row_major
from weightsync.protocol.cost_model import LinkCosts, RunShape, Strategy, choose, predict, spans
from weightsync.protocol.dtypes import dtype_from_name, dtype_name
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.maps import AffineMap
from weightsync.protocol.plan_cache import PlanCache
from weightsync.protocol.segments import PullPlanner, Runs, bounce_copy
from weightsync.protocol.shards import Source, SourceShard
from weightsync.service.layout_names import Shape, layout_by_name
from weightsync.service.targets import ModuleTarget

MODEL_SIZES = ("tiny", "small", "base")
_PACKED_SHOWN = 8
_ASSUMED = LinkCosts()


class Packed(BaseModel):
    """Something that does not land in place, and why."""

    what: str
    nbytes: int
    why: str


class PlanSummary(BaseModel):
    """A plan in numbers. Ranks are those of the layouts; sizes are bytes."""

    source: str
    target: str
    holder_policy: str
    parameters: int
    distinct_plans: int
    nbytes: int
    copies: int
    runs: int
    mean_run_bytes: float
    runs_by_size: dict[int, int]
    """Power of two -> runs of at least that many bytes and less than twice as many."""
    bytes_by_source: dict[int, int]
    bytes_by_target: dict[int, int]
    packed: list[Packed]
    bytes_by_strategy: dict[str, int]
    """What the cost model would choose, chunk by chunk."""
    predicted_s: float
    """Seconds the slowest target rank would take for its reads and scatters, by these choices."""
    predicted_s_if_all: dict[str, float]
    """The same, were everything to travel one way."""
    planning_seconds: float


class _Tally:
    """Adds runs up.

    Args:
        costs: of every link.
        consumers: target ranks that pull from the same source ranks.
    """

    def __init__(self, costs: LinkCosts, consumers: int) -> None:
        self._costs, self._consumers = costs, consumers
        self._strategies: Counter[str] = Counter()
        self._seconds: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.copies = 0
        self.by_source: Counter[int] = Counter()
        self.by_target: Counter[int] = Counter()
        self.by_size: Counter[int] = Counter()
        self.packed: list[Packed] = []

    def add(self, source_rank: int, target_rank: int, source_byte: np.ndarray, nbytes: np.ndarray) -> None:
        total = int(nbytes.sum())
        shape = RunShape.of(nbytes, *spans(source_byte.astype(np.int64), nbytes, self._costs))
        chosen = choose(shape, self._costs, self._consumers)
        self._strategies[chosen.value] += total
        for strategy in Strategy:
            seconds = predict(strategy, shape, self._costs, self._consumers)
            self._seconds[strategy.value][target_rank] += seconds
            if strategy is chosen:
                self._seconds["chosen"][target_rank] += seconds
        self.by_source[source_rank] += total
        self.by_target[target_rank] += total
        powers, counts = np.unique(np.floor(np.log2(nbytes)).astype(np.int64), return_counts=True)
        self.by_size.update({1 << int(p): int(c) for p, c in zip(powers, counts, strict=True)})

    def summary(self, **named: Any) -> PlanSummary:
        runs, nbytes = self.by_size.total(), self.by_target.total()
        return PlanSummary(
            nbytes=nbytes,
            copies=self.copies,
            runs=runs,
            mean_run_bytes=nbytes / runs if runs else 0.0,
            runs_by_size=dict(sorted(self.by_size.items())),
            bytes_by_source=dict(sorted(self.by_source.items())),
            bytes_by_target=dict(sorted(self.by_target.items())),
            packed=self.packed,
            bytes_by_strategy=dict(self._strategies),
            predicted_s=max(self._seconds["chosen"].values(), default=0.0),
            predicted_s_if_all={s.value: max(self._seconds[s.value].values(), default=0.0) for s in Strategy},
            **named,
        )


Tensors = Sequence[tuple[str, str, Shape]]
"""(name, dtype name, shape)."""


def summarize_layouts(
    tensors: Tensors, source: str, target: str, holder_policy: str, costs: LinkCosts = _ASSUMED
) -> PlanSummary:
    """Compose two layouts, for every tensor.

    Raises:
        PlanError: a layout that does not exist or does not fit a tensor, named.
    """
    source_of, target_of = _remembered(layout_by_name(source)), _remembered(layout_by_name(target))
    started, cache = time.monotonic(), PlanCache()
    tally = _Tally(costs, max((target_of(shape).num_ranks for _, _, shape in tensors), default=1))
    for name, dtype, shape in tensors:
        itemsize = dtype_from_name(dtype).itemsize
        try:
            plan = cache.plan(target_of(shape), source_of(shape), holder_policy=holder_policy)
        except ValueError as error:
            raise type(error)(f"{name} of shape {shape}: {error}") from None
        tally.copies += len(plan.segments)
        scattered = 0
        for runs in cache.runs(plan, itemsize):
            tally.add(runs.source_rank, runs.target_rank, runs.source_byte, runs.nbytes)
            scattered += runs.scattered_bytes
        if scattered:
            tally.packed.append(Packed(what=name, nbytes=scattered, why="its runs are single elements"))
    return tally.summary(
        source=source,
        target=target,
        holder_policy=holder_policy,
        parameters=len(tensors),
        distinct_plans=len(cache),
        planning_seconds=time.monotonic() - started,
    )


def summarize_recorded(
    tensors: Tensors,
    source: str,
    engine: Callable[[int, int], torch.nn.Module],
    world: int,
    holder_policy: str,
    costs: LinkCosts = _ASSUMED,
) -> PlanSummary:
    """Record what each rank of an engine loads, and plan it against the trainer's layout.

    Args:
        engine: (rank, world) -> the engine's module of that rank, on the meta device.
    """
    source_of = _remembered(layout_by_name(source))
    started, tally, planner = time.monotonic(), _Tally(costs, world), PullPlanner(holder_policy)
    sources = {name: _as_source(name, dtype, source_of(shape)) for name, dtype, shape in tensors}
    manifest = {name: (dtype, shape) for name, dtype, shape in tensors}
    for rank in range(world):
        for copy in ModuleTarget(engine(rank, world)).record(manifest):
            tally.copies += 1
            held = sources[copy.src_name]
            try:
                runs = planner.lower(copy, held)
            except UnsupportedLayoutError as error:
                bounce = bounce_copy(copy, held)
                runs = planner.lower(bounce.copy, held)
                tally.packed.append(Packed(what=copy.param_name, nbytes=_nbytes(runs), why=str(error)))
            for own in runs:
                tally.add(own.session, rank, own.src_addr, own.nbytes)
    return tally.summary(
        source=source,
        target=f"engine/{world}",
        holder_policy=holder_policy,
        parameters=len(tensors),
        distinct_plans=planner.planned,
        planning_seconds=time.monotonic() - started,
    )


def describe_model(model: str) -> tuple[Any, Tensors]:
    """(config, parameters) of one of the demo's sizes or of a transformers config file; tied ones once.

    Raises:
        InvalidLayoutError: neither.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import

    from weightsync.service.demo.models import model_config

    if model in MODEL_SIZES:
        config = model_config(model)
    elif Path(model).exists():
        config = AutoConfig.from_pretrained(model)
    else:
        raise InvalidLayoutError(f"{model!r} is neither one of {', '.join(MODEL_SIZES)} nor a transformers config file")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    dtype = dtype_name(config.dtype or torch.bfloat16)
    return config, [(name, dtype, tuple(p.shape)) for name, p in module.named_parameters()]


def demo_engine(config: Any) -> Callable[[int, int], torch.nn.Module]:
    """The demo's tensor-parallel engine of a Qwen2 config.

    Raises:
        UnsupportedLayoutError: another architecture.
    """
    from weightsync.service.demo.engine import EngineModel

    if config.model_type != "qwen2" or not config.tie_word_embeddings:
        raise UnsupportedLayoutError(
            f"engine/N records the demo's engine, which is Qwen2 with tied embeddings; this is {config.model_type}: "
            "use a layout as the target"
        )

    def build(rank: int, world: int) -> torch.nn.Module:
        with torch.device("meta"):
            return EngineModel(config, rank, world)

    return build


def render(summary: PlanSummary) -> RenderableType:
    """How a summary looks in a terminal."""
    head = Text(
        f"{summary.source} -> {summary.target}: {format_bytes(summary.nbytes)} of {summary.parameters} parameters in "
        f"{summary.copies} copies, {summary.runs} runs of {format_bytes(summary.mean_run_bytes)} on average; "
        f"{summary.distinct_plans} distinct plans made in {summary.planning_seconds:.2f} s"
    )
    parts: list[RenderableType] = [
        head,
        _two_columns("runs of at least", "runs", ((format_bytes(k), str(v)) for k, v in summary.runs_by_size.items())),
        _two_columns("source rank", "serves", _by_rank(summary.bytes_by_source)),
        _two_columns("target rank", "takes", _by_rank(summary.bytes_by_target)),
    ]
    shares = ", ".join(f"{format_bytes(n)} {name}" for name, n in sorted(summary.bytes_by_strategy.items()))
    all_one = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in summary.predicted_s_if_all.items())
    parts.append(
        Text(
            f"the cost model takes {shares}: {1e3 * summary.predicted_s:.1f} ms for the slowest rank; all one way: "
            f"{all_one}"
        )
    )
    parts += [
        Text(f"packed: {packed.what}, {format_bytes(packed.nbytes)}: {packed.why}", style="yellow")
        for packed in summary.packed[:_PACKED_SHOWN]
    ]
    if len(summary.packed) > _PACKED_SHOWN:
        parts.append(Text(f"... and {len(summary.packed) - _PACKED_SHOWN} more packed", style="yellow"))
    if not summary.packed:
        parts.append(Text("everything lands in place, nothing is packed"))
    return Group(*parts)


def _by_rank(loads: dict[int, int]) -> Iterable[tuple[str, str]]:
    return ((str(rank), format_bytes(nbytes)) for rank, nbytes in loads.items())


def _two_columns(left: str, right: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(left, right, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _remembered(build: Callable[[Shape], AffineMap]) -> Callable[[Shape], AffineMap]:
    """One map per shape: plans are remembered by the identity of their maps."""
    made: dict[Shape, AffineMap] = {}
    return lambda shape: made[shape] if shape in made else made.setdefault(shape, build(shape))


def _as_source(name: str, dtype: str, layout: AffineMap) -> Source:
    """A layout as a shard table; a rank's shard begins at address 0."""
    itemsize = dtype_from_name(dtype).itemsize
    shards = []
    for rank in range(layout.num_ranks):
        for box, _ in layout.logical_boxes(rank):
            strides = None if is_row_major(box.extent, box.strides) else box.strides
            shards.append(SourceShard(rank, box.offset * itemsize, box.start, box.extent, strides))
    return Source(name, layout.logical_shape, dtype, itemsize, tuple(shards))


def _nbytes(runs: Sequence[Runs]) -> int:
    return sum(int(own.nbytes.sum()) for own in runs)
