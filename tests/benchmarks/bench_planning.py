"""Planning cost: parameters of many ranks, the known layout changes, DeepSeek-V3- and Kimi-K2-shaped models.

Run it: `python tests/benchmarks/bench_planning.py [--json]`. It prints what it measured and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from weightsync.protocol.affine import (
    AffineMap,
    block_gather_map,
    codegen_block_ids,
    contiguous_split_map,
    segmented_map,
    yuan_o_proj_block_ids,
)
from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.dtypes import dtype_from_name
from weightsync.protocol.segments import PullPlanner
from weightsync.protocol.shards import (
    PublishedShard,
    PublishedTensor,
    build_sources,
    check_complete,
    merge_shard_tables,
)
from weightsync.protocol.transfer import plan_transfer

STAGES, TRAINER_EP, WORKERS = 4, 16, 32


@dataclass(frozen=True)
class MoeShape:
    """A mixture-of-experts model with multi-head latent attention and block-scaled fp8 weights."""

    name: str
    layers: int
    dense_layers: int
    experts: int
    heads: int
    vocabulary: int
    hidden: int = 7168
    expert_width: int = 2048
    dense_width: int = 18432
    block: int = 128


DEEPSEEK_V3 = MoeShape("DeepSeek-V3", 61, 3, 256, 128, 129280)
KIMI_K2 = MoeShape("Kimi-K2", 61, 1, 384, 64, 163840)


def milliseconds(function: Callable[[], object], repeats: int = 3) -> float:
    """Median wall time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


def rows(count: int, ranks: int) -> AffineMap:
    """`count` rows of 16 split evenly."""
    return contiguous_split_map((count, 16), [count // ranks] * ranks, 0)


def scaling() -> list[dict[str, object]]:
    """One parameter, row shards to row shards; layouts are built outside the timed part."""
    table: list[dict[str, object]] = []
    sizes = [(512, 512), (4096, 8), (8, 4096)] + [(n, n) for n in (1024, 2048, 4096, 8192, 16384)]
    for source_ranks, target_ranks in sizes:
        count = max(source_ranks, target_ranks)
        source, target = rows(count, source_ranks), rows(count, target_ranks)
        plan = plan_transfer(target, source)
        table.append(
            {
                "case": f"{source_ranks} rows -> {target_ranks} rows",
                "copies": len(plan.segments),
                "ms": milliseconds(lambda t=target, s=source: plan_transfer(t, s)),
            }
        )
    return table


def known_changes() -> list[dict[str, object]]:
    """Layout changes whose number of copies is known."""

    def query(tp: int) -> AffineMap:
        return segmented_map((48, 8), [(32, False), (16, True)], 0, [[32 // tp] * tp])

    def codegen(tp: int) -> AffineMap:
        block, ids = codegen_block_ids(384, tp)
        return block_gather_map((384, 8), ids, block, 0)

    def yuan(tp: int) -> AffineMap:
        return block_gather_map((8, 64), yuan_o_proj_block_ids(16, tp), 4, 1)

    cases: list[tuple[str, AffineMap, AffineMap, str]] = [
        (f"multi-query TP2 -> TP4, {policy}", query(2), query(4), policy)
        for policy in ("lowest", "highest", "adjacency", "adjacency+balance")
    ]
    cases += [(f"CodeGen TP{a} -> TP{b}", codegen(a), codegen(b), "lowest") for a, b in ((2, 4), (4, 8))]
    cases.append(("Yuan o_proj TP4 -> TP2", yuan(4), yuan(2), "lowest"))
    table: list[dict[str, object]] = []
    for name, source, target, policy in cases:
        plan = plan_transfer(target, source, holder_policy=policy)
        table.append(
            {
                "case": name,
                "copies": len(plan.segments),
                "raw": plan.raw_copies,
                "elements_by_source": dict(plan.statistics.elements_by_source),
                "ms": milliseconds(lambda t=target, s=source, p=policy: plan_transfer(t, s, holder_policy=p)),
            }
        )
    return table


Parameter = tuple[str, tuple[int, int], str, int, int | None]
"""(name, shape, dtype name, pipeline stage, expert or None)."""


def parameters_of(m: MoeShape) -> Iterator[Parameter]:
    """Every parameter in checkpoint naming; fp8 weights bring block scales."""

    def quantised(name: str, shape: tuple[int, int], stage: int, expert: int | None = None) -> Iterator[Parameter]:
        yield name + ".weight", shape, "float8_e4m3fn", stage, expert
        scales = (-(-shape[0] // m.block), -(-shape[1] // m.block))
        yield name + ".weight_scale_inv", scales, "float32", stage, expert

    yield "model.embed_tokens.weight", (m.vocabulary, m.hidden), "bfloat16", 0, None
    for layer in range(m.layers):
        stage, prefix = layer * STAGES // m.layers, f"model.layers.{layer}."
        for name, shape in {
            "q_a_proj": (1536, m.hidden),
            "q_b_proj": (m.heads * 192, 1536),
            "kv_a_proj_with_mqa": (576, m.hidden),
            "kv_b_proj": (m.heads * 256, 512),
            "o_proj": (m.hidden, m.heads * 128),
        }.items():
            yield from quantised(f"{prefix}self_attn.{name}", shape, stage)
        for name, width in {
            "self_attn.q_a_layernorm": 1536,
            "self_attn.kv_a_layernorm": 512,
            "input_layernorm": m.hidden,
            "post_attention_layernorm": m.hidden,
        }.items():
            yield f"{prefix}{name}.weight", (1, width), "bfloat16", stage, None
        dense = layer < m.dense_layers
        width, block = (m.dense_width, "mlp") if dense else (m.expert_width, "mlp.shared_experts")
        blocks: list[tuple[str, int | None]] = [(block, None)]
        if not dense:
            yield f"{prefix}mlp.gate.weight", (m.experts, m.hidden), "bfloat16", stage, None
            yield f"{prefix}mlp.gate.e_score_correction_bias", (1, m.experts), "float32", stage, None
            blocks += [(f"mlp.experts.{e}", e) for e in range(m.experts)]
        for name, expert in blocks:
            for projection, shape in (
                ("gate_proj", (width, m.hidden)),
                ("up_proj", (width, m.hidden)),
                ("down_proj", (m.hidden, width)),
            ):
                yield from quantised(f"{prefix}{name}.{projection}", shape, stage, expert)
    yield "model.norm.weight", (1, m.hidden), "bfloat16", STAGES - 1, None
    yield "lm_head.weight", (m.vocabulary, m.hidden), "bfloat16", STAGES - 1, None


def _table(m: MoeShape) -> list[PublishedTensor]:
    """What 64 trainer ranks (PP4 x EP16) publish: an expert whole on one rank, the rest by rows of its stage."""
    tensors, addr = [], 0
    for name, shape, dtype, stage, expert in parameters_of(m):
        itemsize = dtype_from_name(dtype).itemsize
        if expert is None and shape[0] % TRAINER_EP == 0:
            rows = shape[0] // TRAINER_EP
            boxes = [(stage * TRAINER_EP + r, (r * rows, 0), (rows, shape[1])) for r in range(TRAINER_EP)]
        elif expert is None:
            boxes = [(stage * TRAINER_EP + r, (0, 0), shape) for r in range(TRAINER_EP)]
        else:
            boxes = [(stage * TRAINER_EP + expert * TRAINER_EP // m.experts, (0, 0), shape)]
        shards = tuple(PublishedShard(f"rank{rank}", 0, addr, start, extent) for rank, start, extent in boxes)
        tensors.append(PublishedTensor(name, dtype, itemsize, shape, shards))
        addr += shape[0] * shape[1] * itemsize
    return tensors


def _copies(m: MoeShape, own: range) -> Iterator[RecordedCopy]:
    """What a worker's loader does: gate and up fused, own experts stacked, the rest whole."""
    for name, shape, dtype, _, expert in parameters_of(m):
        if expert is not None and expert not in own:
            continue
        rows, columns = shape
        parameter, row = name, 0
        for part, place in (("gate_proj", 0), ("up_proj", rows)):
            if part in name:
                parameter, row = name.replace(part, "gate_up_proj"), place
        if expert is not None:
            stacked_rows = 2 * rows if parameter != name else rows
            parameter = parameter.replace(f"experts.{expert}", "experts")
            row += (expert - own.start) * stacked_rows
        yield RecordedCopy(name, (), parameter, row * columns, shape, (columns, 1), dtype_from_name(dtype))


def moe(m: MoeShape, worker: int = 5) -> dict[str, object]:
    """Plan what one of 32 expert-parallel workers reads, from published tables to addresses."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    table = _table(m)
    own = range(worker * m.experts // WORKERS, (worker + 1) * m.experts // WORKERS)
    copies = list(_copies(m, own))
    start = time.perf_counter()
    merged = merge_shard_tables([table], replica_offset=worker)
    check_complete(merged)
    sources, _, _ = build_sources(merged)
    merged_s = time.perf_counter() - start
    planner = PullPlanner()
    runs = nbytes = 0
    for copy in copies:
        for own_runs in planner.lower(copy, sources[copy.src_name]):
            runs += len(own_runs.nbytes)
            nbytes += int(own_runs.nbytes.sum())
    return {
        "case": f"{m.name} shape, {STAGES * TRAINER_EP} trainer ranks -> worker {worker} of {WORKERS}",
        "names": len(table),
        "copies": len(copies),
        "distinct_plans": planner.planned,
        "runs": runs,
        "GB": round(nbytes / 1e9, 2),
        "wire_over_needed": nbytes / sum(c.numel * c.dest_dtype.itemsize for c in copies),
        "merge_ms": 1000 * merged_s,
        "ms": 1000 * (time.perf_counter() - start),
        "peak_rss_growth_MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
    arguments = parser.parse_args()
    # The model first: resident memory only ever grows, and the large curves would hide what it needs.
    tables = {"models": [moe(DEEPSEEK_V3), moe(KIMI_K2)], "scaling": scaling(), "known_changes": known_changes()}
    if arguments.json:
        print(json.dumps(tables))
        return
    for title, table in tables.items():
        print(f"\n{title}")
        for row in table:
            cells = [f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items() if k != "case"]
            print(f"  {row['case']:<46} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
