"""Planning cost: parameters of many ranks, the known layout changes, and a DeepSeek-V3-shaped model.

Run it: `python tests/benchmarks/bench_planning.py [--json]`. It prints what it measured and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from statistics import median

from weightsync.protocol.affine import (
    AffineMap,
    block_gather_map,
    codegen_block_ids,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    yuan_o_proj_block_ids,
)
from weightsync.protocol.plan_cache import PlanCache
from weightsync.protocol.transfer import plan_transfer

LAYERS, DENSE_LAYERS, EXPERTS = 61, 3, 256
HIDDEN, EXPERT_WIDTH, DENSE_WIDTH, VOCABULARY, BLOCK = 7168, 2048, 18432, 129280, 128
STAGES, TRAINER_EP, WORKERS = 4, 16, 32


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


def deepseek_parameters() -> Iterator[tuple[str, tuple[int, int], int, int, int | None]]:
    """(name, shape, bytes an element, pipeline stage, expert or None); fp8 weights bring block scales."""

    def quantised(
        name: str, shape: tuple[int, int], stage: int, expert: int | None = None
    ) -> Iterator[tuple[str, tuple[int, int], int, int, int | None]]:
        yield name + ".weight", shape, 1, stage, expert
        yield name + ".weight_scale_inv", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)), 4, stage, expert

    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), 2, 0, None
    for layer in range(LAYERS):
        stage, prefix = layer * STAGES // LAYERS, f"model.layers.{layer}."
        for name, shape in {
            "q_a_proj": (1536, HIDDEN),
            "q_b_proj": (128 * 192, 1536),
            "kv_a_proj_with_mqa": (576, HIDDEN),
            "kv_b_proj": (128 * 256, 512),
            "o_proj": (HIDDEN, 128 * 128),
        }.items():
            yield from quantised(f"{prefix}self_attn.{name}", shape, stage)
        for name, width in {
            "self_attn.q_a_layernorm": 1536,
            "self_attn.kv_a_layernorm": 512,
            "input_layernorm": HIDDEN,
            "post_attention_layernorm": HIDDEN,
        }.items():
            yield f"{prefix}{name}.weight", (1, width), 2, stage, None
        dense = layer < DENSE_LAYERS
        width, block = (DENSE_WIDTH, "mlp") if dense else (EXPERT_WIDTH, "mlp.shared_experts")
        blocks: list[tuple[str, int | None]] = [(block, None)]
        if not dense:
            yield f"{prefix}mlp.gate.weight", (EXPERTS, HIDDEN), 2, stage, None
            yield f"{prefix}mlp.gate.e_score_correction_bias", (1, EXPERTS), 4, stage, None
            blocks += [(f"mlp.experts.{e}", e) for e in range(EXPERTS)]
        for name, expert in blocks:
            for projection, shape in (
                ("gate_proj", (width, HIDDEN)),
                ("up_proj", (width, HIDDEN)),
                ("down_proj", (HIDDEN, width)),
            ):
                yield from quantised(f"{prefix}{name}.{projection}", shape, stage, expert)
    yield "model.norm.weight", (1, HIDDEN), 2, STAGES - 1, None
    yield "lm_head.weight", (VOCABULARY, HIDDEN), 2, STAGES - 1, None


def deepseek(worker: int = 5) -> dict[str, object]:
    """Plan what one of 32 expert-parallel workers reads from 64 trainer ranks (PP4 x EP16), to addresses."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    cache = PlanCache()
    layouts: dict[tuple[object, ...], AffineMap] = {}

    def layout(shape: tuple[int, int], ranks: int) -> AffineMap:
        # Non-expert weights are FSDP-sharded by rows over the stage's ranks where they divide, else repeated.
        key = (shape, ranks)
        if key not in layouts:
            split = ranks > 1 and shape[0] % ranks == 0
            layouts[key] = (
                contiguous_split_map(shape, [shape[0] // ranks] * ranks, 0) if split else replicated_map(shape, ranks)
            )
        return layouts[key]

    own = range(worker * EXPERTS // WORKERS, (worker + 1) * EXPERTS // WORKERS)
    names = parameters = runs = nbytes = wanted = addr = 0
    for _, shape, itemsize, stage, expert in deepseek_parameters():
        names += 1
        addr += 4096  # any address: what counts is that each parameter has its own
        if expert is not None and expert not in own:
            continue
        parameters += 1
        wanted += shape[0] * shape[1] * itemsize
        if expert is None:
            ranks = range(stage * TRAINER_EP, (stage + 1) * TRAINER_EP)
        else:
            holder = stage * TRAINER_EP + expert * TRAINER_EP // EXPERTS
            ranks = range(holder, holder + 1)
        plan = cache.plan(layout(shape, 1), layout(shape, len(ranks)), holder_policy="adjacency+balance")
        for placed in cache.place(plan, itemsize, dict.fromkeys(ranks, addr), source_ranks=ranks):
            runs += len(placed.nbytes)
            nbytes += int(placed.nbytes.sum())
    return {
        "case": f"DeepSeek-V3 shape, {STAGES * TRAINER_EP} trainer ranks -> worker {worker} of {WORKERS}",
        "names": names,
        "parameters": parameters,
        "distinct_plans": len(cache),
        "runs": runs,
        "GB": round(nbytes / 1e9, 2),
        "wire_over_needed": nbytes / wanted,
        "ms": 1000 * (time.perf_counter() - start),
        "peak_rss_growth_MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    arguments = parser.parse_args()
    # The model first: resident memory only ever grows, and the large curves would hide what it needs.
    tables = {"deepseek": [deepseek()], "scaling": scaling(), "known_changes": known_changes()}
    if arguments.json:
        print(json.dumps(tables, indent=2))
        return
    for title, table in tables.items():
        print(f"\n{title}")
        for row in table:
            cells = [f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items() if k != "case"]
            print(f"  {row['case']:<46} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
