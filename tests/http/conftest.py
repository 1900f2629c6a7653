"""One service with trainers and workers that can be held at a point of a sync, and a client of its HTTP face."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import fault_helpers
import helpers

ray.cloudpickle.register_pickle_by_value(helpers)
ray.cloudpickle.register_pickle_by_value(fault_helpers)


@pytest.fixture(scope="session")
def shared_scene(cluster: None) -> Iterator[fault_helpers.Scene]:
    made = fault_helpers.Scene()
    yield made
    made.close()


@pytest.fixture
def scene(shared_scene: fault_helpers.Scene) -> fault_helpers.Scene:
    """Two ranks, and exactly the workers w0 and w1, both at the newest version."""
    shared_scene.set_workers(2)
    return shared_scene


@pytest.fixture
def client(shared_scene: fault_helpers.Scene) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(shared_scene.service.status().http_url), timeout=30.0) as made:
        yield made
