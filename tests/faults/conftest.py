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

ray.cloudpickle.register_pickle_by_value(helpers)
ray.cloudpickle.register_pickle_by_value(fault_helpers)


@pytest.fixture(scope="module")
def scenes(cluster: None) -> Iterator[dict[str, fault_helpers.Scene]]:
    """Scenes of this module by their options: processes take seconds to start, so tests take over what survived."""
    made: dict[str, fault_helpers.Scene] = {}
    yield made
    for scene in made.values():
        scene.close()


@pytest.fixture
def scene(scenes: dict[str, fault_helpers.Scene]) -> Callable[..., fault_helpers.Scene]:
    """A scene with these options and exactly `workers` workers, w0 and up, each of them at the newest version."""

    def build(workers: int = 2, **options: object) -> fault_helpers.Scene:
        key = repr(sorted({"install": "shadow", "mode": "live", "verify": "off", **options}.items()))
        if key not in scenes:
            scenes[key] = fault_helpers.Scene(**options)  # type: ignore[arg-type]
        scenes[key].set_workers(workers)
        return scenes[key]

    return build
