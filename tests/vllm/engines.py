"""Engines, and what they answer to fixed prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig

PROMPTS = [{"prompt_token_ids": [(17 * i + 5 * j) % 247 + 3 for j in range(24 + i)]} for i in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, detokenize=False, ignore_eos=True)

Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]
"""Per prompt: tokens, and the logprob of each."""


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments of a small engine."""
    return {
        "model": str(folder),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "seed": 0,
        **more,
    }


def following() -> WeightTransferConfig:
    """What `--weight-transfer-config '{"backend": "weightsync"}'` makes."""
    return WeightTransferConfig(backend="weightsync")


def answers(llm: LLM) -> Answers:
    """Greedy tokens of every prompt, with their logprobs."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [_answer(output.outputs[0]) for output in outputs]


def _answer(completion: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    tokens = tuple(completion.token_ids)
    return tokens, tuple(step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True))


def fresh_answers(folder: Path, **more: Any) -> Answers:
    """The answers of an engine that loaded this checkpoint, and is gone afterwards."""
    llm = LLM(**options(folder, **more))
    try:
        return answers(llm)
    finally:
        stop(llm)


def stop(llm: LLM) -> None:
    """End an engine's processes now, not when it is collected."""
    llm.llm_engine.engine_core.shutdown()
