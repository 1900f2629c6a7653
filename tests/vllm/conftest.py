"""Tests with a real vLLM, which has a venv of its own (`make test-vllm`); elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """(kind of model, seed) -> folder with a random checkpoint, as transformers saves it."""
    from tests.vllm.models import save

    made: dict[tuple[str, int], Path] = {}

    def checkpoint(kind: str, seed: int) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = save(kind, seed, tmp_path_factory.mktemp(f"{kind}-{seed}"))
        return made[kind, seed]

    return checkpoint


@pytest.fixture
def reachable(cluster: None) -> Iterator[None]:
    """Processes that the test starts join its Ray cluster."""
    import ray

    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    yield
    del os.environ["RAY_ADDRESS"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine takes half a minute to start here, and some tests start four."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
