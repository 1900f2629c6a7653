"""The demo's trainer and engine in two real processes over gloo, without a service.

Each process is one FSDP2 rank and one tensor-parallel rank. Weights go from one to the other by plain loading
of the gathered state dict, so what is tested is the stage, not the sync: training changes the weights, the
reference is the trainer's state, and the logits check passes for a version's own weights and fails for those
of the version before.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from weightsync.service.demo import workers
from weightsync.service.demo.engine import EngineModel
from weightsync.service.demo.models import build_model, model_config
from weightsync.service.demo.reference import bit_differences, expected_parameters, logits_distance
from weightsync.service.demo.run import LOGITS_TOLERANCE
from weightsync.service.ports import free_port

WORLD = 2
VERSIONS = 3
SIZE = "tiny"


@dataclass
class Seen:
    """What one process saw of one version."""

    loss: float
    unchanged: list[str]
    local: dict[str, torch.Tensor]
    full: dict[str, torch.Tensor]
    problems: list[str]
    reference: dict[str, torch.Tensor] = field(default_factory=dict)
    stale_distance: float = 0.0
    own_distance: float = 0.0
    trainer_to_unsharded: float = 0.0


class _NoPublisher:
    """Stands in for the publisher: these processes have no service to publish to."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None: ...


def _rank_main(rank: int, port: int, folder: str) -> None:
    workers.Publisher = _NoPublisher  # type: ignore[assignment,misc]
    workers.ray.put = deepcopy  # the object store copies too: what FSDP frees afterwards must not show
    trainer = workers.TrainerRank("none", SIZE, "live", rank, WORLD, port)
    engine = EngineModel(model_config(SIZE), rank, WORLD)
    seen = [_one_version(trainer, engine, rank) for _ in range(VERSIONS)]
    torch.save([vars(version) for version in seen], Path(folder) / f"{rank}.pt")
    trainer.close()


def _one_version(trainer: workers.TrainerRank, engine: EngineModel, rank: int) -> Seen:
    config = model_config(SIZE)
    tokens = torch.randint(0, config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))
    loss, unchanged = trainer.train_step()
    named = dict(trainer._model.named_parameters())
    full = {name: _full(parameter) for name, parameter in named.items()}
    reference = trainer.reference(tokens)
    stale = engine(tokens)
    engine.load_weights(full.items())
    own = engine(tokens)
    held = {name: parameter.detach() for name, parameter in engine.named_parameters()}
    seen = Seen(
        loss=loss,
        unchanged=unchanged,
        local={name: workers._local(p).clone() for name, p in trainer._model.named_parameters()},
        full=full,
        problems=bit_differences(held, expected_parameters(full, config, rank, WORLD)),
    )
    if reference is not None:
        arrays, logits = reference
        seen.reference = {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in arrays.items()}
        seen.stale_distance = logits_distance(stale, logits)
        seen.own_distance = logits_distance(own, logits)
        seen.trainer_to_unsharded = logits_distance(_unsharded_logits(full, tokens), logits)
    return seen


def _full(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.detach().full_tensor().clone()


@torch.no_grad()
def _unsharded_logits(full: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """What transformers computes in one process from the same weights."""
    model = build_model(SIZE)
    missing, unexpected = model.load_state_dict(full, strict=False)
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    return model(input_ids=tokens).logits.float()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[Seen]]:
    """[rank][version]"""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_rank_main, args=(free_port(), str(folder)), nprocs=WORLD)
    return [[Seen(**version) for version in torch.load(folder / f"{rank}.pt")] for rank in range(WORLD)]


def test_every_step_changes_every_parameter_the_norms_included(ranks: list[list[Seen]]) -> None:
    """One that stays as it was could be left out of every later version unseen."""
    for versions in ranks:
        assert [version.unchanged for version in versions] == [[]] * VERSIONS
        for before, after in pairwise(versions):
            same = [name for name in after.full if torch.equal(before.full[name], after.full[name])]
            assert same == []


def test_norms_of_different_layers_differ(ranks: list[list[Seen]]) -> None:
    """Or one in the place of another could not be seen."""
    for seen in ranks[0]:
        norms = [tensor for name, tensor in seen.full.items() if "norm" in name]
        assert len({tuple(norm.tolist()) for norm in norms}) == len(norms)


def test_ranks_hold_different_shards_that_together_are_the_model(ranks: list[list[Seen]]) -> None:
    for first, second in zip(*ranks, strict=True):
        for name, whole in first.full.items():
            assert torch.equal(torch.cat([first.local[name], second.local[name]]), whole), name
            if whole.dim() > 1:
                assert not torch.equal(first.local[name], second.local[name]), f"{name}: both ranks the same"


def test_the_tied_head_is_trained_and_gathered_once(ranks: list[list[Seen]]) -> None:
    assert "lm_head.weight" not in ranks[0][0].full
    assert "model.embed_tokens.weight" in ranks[0][0].full


def test_the_reference_is_the_gathered_state_of_each_version_bit_for_bit(ranks: list[list[Seen]]) -> None:
    for seen in ranks[0]:
        assert bit_differences(seen.reference, seen.full) == []


def test_the_engine_holds_each_version_on_both_ranks(ranks: list[list[Seen]]) -> None:
    assert [seen.problems for versions in ranks for seen in versions] == [[]] * WORLD * VERSIONS


def test_the_engines_logits_are_the_trainers_within_the_tolerance(ranks: list[list[Seen]]) -> None:
    for seen in ranks[0]:
        assert seen.own_distance <= LOGITS_TOLERANCE / 2, "must pass with room to spare"
        assert seen.trainer_to_unsharded <= LOGITS_TOLERANCE / 2, "and so must transformers in one process"


def test_the_weights_of_the_version_before_fail_the_logits_check(ranks: list[list[Seen]]) -> None:
    for seen in ranks[0][1:]:
        assert seen.stale_distance > 1.5 * LOGITS_TOLERANCE, "must fail with room to spare"


def test_weights_that_never_arrived_fail_the_logits_check(ranks: list[list[Seen]]) -> None:
    nothing_loaded_yet = ranks[0][0].stale_distance
    assert not nothing_loaded_yet <= LOGITS_TOLERANCE


def test_losses_are_finite_and_differ_from_step_to_step(ranks: list[list[Seen]]) -> None:
    losses = [seen.loss for seen in ranks[0]]
    assert all(0 < loss < 100 for loss in losses)
    assert len(set(losses)) == VERSIONS
