"""`weightsync plan` says what executing the plan would do; counted here element by element."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from weightsync.protocol.cost_model import LinkCosts
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.service.cli import app
from weightsync.service.demo.engine import EngineModel
from weightsync.service.demo.models import model_config
from weightsync.service.layout_names import describe_kinds, layout_by_name
from weightsync.service.plan_summary import (
    demo_engine,
    describe_model,
    render,
    summarize_layouts,
    summarize_recorded,
)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=True)
    return result.exit_code, result.stdout if result.exit_code == 0 else str(result.exception) + result.output


@pytest.mark.parametrize(
    ("source", "target", "shape", "policy", "copies"),
    [
        ("multi_query:32,16/2", "multi_query:32,16/4", "48x8", "lowest", 7),
        ("multi_query:32,16/2", "multi_query:32,16/4", "48x8", "highest", 7),
        ("multi_query:32,16/2", "multi_query:32,16/4", "48x8", "adjacency", 6),
        ("multi_query:32,16/2", "multi_query:32,16/4", "48x8", "adjacency+balance", 6),
        ("split:0/2", "split:1/4", "8x8", "lowest", 8),
        ("codegen/4", "codegen/8", "192x8", "lowest", 40),
        ("codegen/2", "codegen/4", "192x8", "lowest", 20),
        ("yuan:8/4", "yuan:8/2", "6x32", "lowest", 4),
    ],
)
def test_the_known_cases_take_the_known_number_of_copies(
    source: str, target: str, shape: str, policy: str, copies: int
) -> None:
    status, out = run("--source", source, "--target", target, "--shape", shape, "--policy", policy, "--json")
    assert status == 0, out
    assert json.loads(out)["copies"] == copies


def test_both_sources_serve_the_same_where_balance_is_asked_for() -> None:
    summary = summarize_layouts(
        [("w", "float32", (48, 8))], "multi_query:32,16/2", "multi_query:32,16/4", "adjacency+balance"
    )
    assert summary.bytes_by_source == {0: 4 * 384, 1: 4 * 384}
    assert summary.nbytes == 4 * 768


@pytest.mark.parametrize("example", [line.split(" (")[0] for line in describe_kinds().split("; ")])
def test_every_layout_of_the_help_exists_and_describes_itself(example: str) -> None:
    shapes: list[tuple[int, ...]] = [(96, 16), (48, 8), (6144, 4), (16, 8, 8), (96, 64)]
    fitting = []
    for shape in shapes:
        try:
            fitting.append(layout_by_name(example)(shape))
        except InvalidLayoutError:
            continue
    assert fitting, f"{example} fits none of {shapes}"
    for layout in fitting:
        logical = torch.arange(torch.Size(layout.logical_shape).numel()).view(layout.logical_shape)
        shards = [layout.extract(logical, rank) for rank in range(layout.num_ranks)]
        assert torch.equal(layout.rebuild(shards), logical)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("diagonal/2", "'diagonal/2' is no layout; use one of replicated/2"),
        ("split/2", "is not like 'split:0/8'"),
        ("split:0", "is no layout"),
        ("split:0/0", "is not like"),
        ("qkv:1,2/4", "is not like 'qkv:32,8,128/4'"),
        ("dtensor:P/2", "is not like dtensor:S(0),R/2x4"),
    ],
)
def test_what_is_no_layout_is_refused_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(InvalidLayoutError) as refused:
        layout_by_name(name)
    assert message in str(refused.value)


def _runs_of_rank(config: Any, tensors: Any, rank: int, world: int, sources: int) -> tuple[int, Counter[int], int]:
    """(bytes, bytes by source, runs) of one engine rank, from loading an engine with element ids.

    Every element of every tensor gets a number; the engine's own loader puts the numbers where the weights go; a
    run is broken wherever the next element of the parameter is not the next of the same source shard.
    """
    first_id, total = {}, 0
    for name, _, shape in tensors:
        first_id[name] = total
        total += torch.Size(shape).numel()
    engine = EngineModel(config, rank, world)
    for parameter in engine.parameters():
        parameter.data = torch.full(parameter.shape, -1, dtype=torch.int64)
    engine.load_weights(
        (name, torch.arange(torch.Size(shape).numel()).view(shape) + first_id[name]) for name, _, shape in tensors
    )
    owner, local = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
    for name, _, shape in tensors:
        chunk = -(-shape[0] // sources)
        ids = torch.arange(torch.Size(shape).numel())
        inner = torch.Size(shape[1:]).numel()
        span = slice(first_id[name], first_id[name] + len(ids))
        owner[span], local[span] = ids // inner // chunk, ids + first_id[name]
    nbytes, by_source, runs = 0, Counter[int](), 0
    for parameter in engine.parameters():
        ids = parameter.data.flatten()
        assert bool((ids >= 0).all())
        nbytes += 2 * len(ids)
        for source, count in zip(*torch.unique(owner[ids], return_counts=True), strict=True):
            by_source[int(source)] += 2 * int(count)
        joined = (local[ids[1:]] == local[ids[:-1]] + 1) & (owner[ids[1:]] == owner[ids[:-1]])
        # neighbours of different tensors in one fused parameter are never one run, even if numbered on
        edges = torch.tensor(sorted(first_id.values()))
        joined &= torch.searchsorted(edges, ids[1:], right=True) == torch.searchsorted(edges, ids[:-1], right=True)
        runs += 1 + int((~joined).sum())
    return nbytes, by_source, runs


@pytest.mark.parametrize("world", [1, 2])
def test_a_recorded_engine_is_summarised_as_its_own_loader_loads(world: int) -> None:
    config, tensors = describe_model("tiny")
    summary = summarize_recorded(tensors, "split:0/3", demo_engine(config), world, "lowest")
    ranks = [_runs_of_rank(config, tensors, rank, world, 3) for rank in range(world)]
    assert summary.bytes_by_target == {rank: nbytes for rank, (nbytes, _, _) in enumerate(ranks)}
    assert summary.bytes_by_source == dict(sorted(sum((by for _, by, _ in ranks), Counter()).items()))
    assert summary.runs == sum(runs for _, _, runs in ranks)
    assert sum(summary.runs_by_size.values()) == summary.runs
    assert summary.packed == []
    assert summary.distinct_plans < summary.copies, "layers alike are planned once"


def test_an_engine_is_recorded_against_ranks_that_hold_several_boxes() -> None:
    config, tensors = describe_model("tiny")
    fused, plain = (
        summarize_recorded(tensors, source, demo_engine(config), 2, "lowest") for source in ("gate_up/2", "split:0/2")
    )
    assert fused.bytes_by_target == plain.bytes_by_target
    assert fused.bytes_by_source[0] == fused.bytes_by_source[1]


def test_layouts_of_a_whole_model_are_planned_once_per_shape() -> None:
    _, tensors = describe_model("tiny")
    summary = summarize_layouts(tensors, "dtensor:R,S(0)/2x2", "split:1/2", "lowest")
    assert summary.distinct_plans == len({shape for _, _, shape in tensors})
    needed = sum(2 * torch.Size(s).numel() * (1 if len(s) > 1 else 2) for _, _, s in tensors)
    assert summary.nbytes == needed


def test_element_by_element_layouts_say_so() -> None:
    summary = summarize_layouts([("w", "bfloat16", (64, 2))], "split:0/1", "split:1/2", "lowest")
    assert [(p.what, p.nbytes) for p in summary.packed] == [("w", 256)]
    assert "single elements" in summary.packed[0].why


def test_other_architectures_need_a_layout() -> None:
    config = model_config("tiny")
    config.model_type = "llama"
    with pytest.raises(UnsupportedLayoutError, match="this is llama"):
        demo_engine(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "split:0/2", "--target", "split:1/2"], "either --shape or --model"),
        (["--source", "split:0/2", "--target", "split:1/2", "--shape", "4by4"], "sizes joined by x"),
        (["--source", "split:0/2", "--target", "split:1/2", "--shape", "4x4", "--dtype", "fp7"], "fp7"),
        (["--source", "split:0/2", "--target", "split:1/2", "--model", "gigantic"], "'gigantic' is neither"),
        (["--source", "split:0/2", "--target", "split:1/2", "--shape", "4x4", "--policy", "luck"], "luck"),
        (["--source", "gate_up/3", "--target", "split:1/2", "--shape", "4x4"], "of shape (4, 4): gate/up of 4"),
    ],
)
def test_wrong_arguments_are_refused_in_words(arguments: list[str], message: str) -> None:
    status, out = run(*arguments)
    assert status != 0
    assert message in out


def test_the_summary_fits_a_terminal() -> None:
    from rich.console import Console

    config, tensors = describe_model("tiny")
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(summarize_recorded(tensors, "split:0/2", demo_engine(config), 2, "lowest")))
    text = console.export_text()
    assert "everything lands in place" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_summary_says_what_the_cost_model_takes_and_what_each_way_would_cost() -> None:
    """Columns of 512 bytes: with dear descriptors packed, with free ones direct."""
    columns = [("w", "bfloat16", (20_000, 512))]
    costs = LinkCosts(descriptor_s=1e-4, pack_bytes_per_s=1e12, pack_run_s=1e-12)
    dear = summarize_layouts(columns, "split:0/2", "split:1/2", "lowest", costs)
    assert dear.bytes_by_strategy == {"packed": dear.nbytes}
    assert dear.predicted_s == pytest.approx(min(dear.predicted_s_if_all.values()))
    free = summarize_layouts(columns, "split:0/2", "split:1/2", "lowest", LinkCosts(descriptor_s=1e-12))
    assert free.bytes_by_strategy == {"direct": free.nbytes}
    expected = 10_000 * 2 * 1e-12 + free.nbytes / 2 / LinkCosts().bytes_per_s
    assert free.predicted_s_if_all["direct"] == pytest.approx(expected)
