"""Scenes of trainers and workers that tests of faults share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import fault_helpers
import pytest


@pytest.fixture(scope="module")
def scenes(cluster: None) -> Iterator[dict[str, fault_helpers.Scene]]:
    """Scenes of this module by their options: processes take seconds to start, so tests take over what survived."""
    made: dict[str, fault_helpers.Scene] = {}
    yield made
    for scene in made.values():
        scene.close()


@pytest.fixture
def scene(scenes: dict[str, fault_helpers.Scene], request: pytest.FixtureRequest) -> Callable[..., fault_helpers.Scene]:
    """A scene with these options and exactly `workers` workers, w0 and up, each of them at the newest version.

    Without options it is the one that all modules share.
    """

    def build(workers: int = 2, **options: object) -> fault_helpers.Scene:
        given = {name: value for name, value in options.items() if _DEFAULTS.get(name) != value}
        key = repr(sorted(given.items()))
        if not given:
            made: fault_helpers.Scene = request.getfixturevalue("shared_scene")
        elif key not in scenes:
            made = scenes[key] = fault_helpers.Scene(**given)  # type: ignore[arg-type]
        else:
            made = scenes[key]
        made.set_workers(workers)
        return made

    return build


_DEFAULTS = {"install": "shadow", "mode": "live", "transport": "nixl", "verify": "off"}
"""Options that need not be given."""
