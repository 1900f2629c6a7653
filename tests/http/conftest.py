"""The shared service with trainers and workers that can be held at a point of a sync, and a client of its HTTP face."""

from __future__ import annotations

from collections.abc import Iterator

import fault_helpers
import httpx
import pytest


@pytest.fixture
def scene(shared_scene: fault_helpers.Scene) -> fault_helpers.Scene:
    """Two ranks, and exactly the workers w0 and w1, both at the newest version."""
    shared_scene.set_workers(2)
    return shared_scene


@pytest.fixture
def client(shared_scene: fault_helpers.Scene) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(shared_scene.service.status().http_url), timeout=30.0) as made:
        yield made
