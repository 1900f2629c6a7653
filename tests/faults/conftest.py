"""Makes `fault_helpers` importable here and in the actors these tests spawn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import fault_helpers
import helpers

from weightsync.service import ServiceHandle

ray.cloudpickle.register_pickle_by_value(helpers)
ray.cloudpickle.register_pickle_by_value(fault_helpers)


@pytest.fixture
def scene(make_service: Callable[..., ServiceHandle]) -> Iterator[Callable[..., fault_helpers.Scene]]:
    """Builds trainers and workers around a service of their own; all of them are gone afterwards."""
    scenes: list[fault_helpers.Scene] = []

    def build(**options: object) -> fault_helpers.Scene:
        scene = fault_helpers.Scene(make_service, **options)  # type: ignore[arg-type]
        scenes.append(scene)
        return scene

    yield build
    for made in scenes:
        made.close()
