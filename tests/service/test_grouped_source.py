"""Exporters yield what they announced, group after group, or are refused by the name of the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.service.pulls import assert_equal
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.messages import TensorMeta
from weightsync.service import (
    GroupedSource,
)

WEIGHTS = {
    "embed": torch.ones(2),
    "layers.0.a": torch.ones(3),
    "layers.0.b": torch.ones(4),
    "layers.1.a": torch.ones(5),
}
METADATA = [TensorMeta(name, "float32", tuple(tensor.shape)) for name, tensor in WEIGHTS.items()]


def yielding(*steps: list[str]) -> Callable[[], Any]:
    return lambda: iter([(names, [WEIGHTS.get(name, torch.zeros(1)) for name in names]) for names in steps])


def gathered(source: GroupedSource) -> dict[str, torch.Tensor]:
    source.refresh()
    return {name: tensor for group in source.groups for name, tensor in source.gather(group).items()}


@pytest.mark.parametrize(
    "steps",
    [
        [["embed"], ["layers.0.a", "layers.0.b"], ["layers.1.a"]],
        [["embed"], ["layers.0.b"], [], ["layers.0.a"], ["layers.1.a"]],
    ],
)
def test_an_exporter_yields_groups_or_parts_of_them_version_after_version(steps: Any) -> None:
    source = GroupedSource(METADATA, yielding(*steps))
    for _ in range(3):
        assert_equal(gathered(source), WEIGHTS)
    helper = GroupedSource(METADATA, yielding(*steps), serves=False)
    assert gathered(helper) == {}
    assert helper.held_names() == ()


def test_a_version_that_was_given_up_half_way_leaves_nothing_behind() -> None:
    closed = []

    def export() -> Any:
        try:
            for name, tensor in WEIGHTS.items():
                yield [name], [tensor]
        finally:
            closed.append(True)

    source = GroupedSource(METADATA, export)
    source.refresh()
    source.gather(source.groups[0])
    assert_equal(gathered(source), WEIGHTS)
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([["embed"], ["layers.0.a"]], r"ended without \['layers.0.b'\]"),
        ([["layers.0.a"]], r"yielded 'layers.0.a' while \['embed'\] of the present"),
        ([["embed"], ["embed"]], "'embed' a second time"),
        ([["embed", "embed"]], "twice"),
        ([["x"]], "'x', which its metadata does not announce"),
        ([["embed"], ["layers.0.a", "layers.0.b"], ["layers.1.a"], ["x"]], "'x', which its metadata"),
        ([["embed"], ["layers.0.a", "layers.0.b"], ["layers.1.a"], ["embed"]], "'embed' a second time"),
    ],
)
def test_an_exporter_that_does_not_keep_its_word_is_refused_by_name(steps: Any, message: str) -> None:
    with pytest.raises(InvalidLayoutError, match=message):
        gathered(GroupedSource(METADATA, yielding(*steps)))


def test_an_exporter_can_only_be_published_staged() -> None:
    with pytest.raises(UnsupportedLayoutError, match="mode='staged'"):
        GroupedSource(METADATA, yielding()).shards()
