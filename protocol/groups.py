"""Gather groups: the unit of publish and free, one decoder layer or the un-indexed block around the layers.

The outermost integer segment of a name is its layer index and what stands before it is its stack:
`model.layers.3.mlp.experts.7.up_proj.weight` is layer 3 of `model.layers`, so experts stay whole. Names
without an integer belong to the leading group if they come before the first indexed name, else to the
trailing one.
"""

from __future__ import annotations

from collections.abc import Sequence


def layerwise_groups(names: Sequence[str]) -> list[list[str]]:
    """Cut names into gather groups, in the order in which a model computes.

    Stacks keep the order in which their prefix first appears and ascend by index inside; names keep their
    given order inside a group. Flattening the result is a permutation of `names`; no group is empty.

    Raises:
        ValueError: a name occurs twice.
    """
    if len(set(names)) != len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ValueError(f"{twice!r} occurs more than once among the names to group")
    leading: list[str] = []
    trailing: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        layer = _layer_of(name)
        if layer is not None:
            stack, index = layer
            stacks.setdefault(stack, {}).setdefault(index, []).append(name)
        elif stacks:
            trailing.append(name)
        else:
            leading.append(name)
    layers = [stack[index] for stack in stacks.values() for index in sorted(stack)]
    return [group for group in (leading, *layers, trailing) if group]


def _layer_of(name: str) -> tuple[str, int] | None:
    """(stack prefix, layer index) by the outermost integer segment, or None."""
    segments = name.split(".")
    for position, segment in enumerate(segments):
        if segment.isascii() and segment.isdigit():
            return ".".join(segments[:position]), int(segment)
    return None
