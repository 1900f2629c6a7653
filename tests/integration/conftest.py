"""Makes `helpers` and `fault_helpers` importable here and in the actors these tests spawn, and `rule_files` here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))
import fault_helpers
import helpers

from weightsync.service import ServiceHandle, Settings, start

ray.cloudpickle.register_pickle_by_value(helpers)
ray.cloudpickle.register_pickle_by_value(fault_helpers)


@pytest.fixture(scope="session")
def shared_service(cluster: None) -> ServiceHandle:
    """One service for all tests that need no settings of their own; it must survive every one of them."""
    return start("shared", settings=Settings(http_port=0, stall_timeout_s=30.0, long_poll_s=1.0))


@pytest.fixture
def service(shared_service: ServiceHandle) -> Iterator[ServiceHandle]:
    """The shared service; whatever a test did, it has no members left afterwards."""
    yield shared_service
    status = shared_service.status()
    assert status.producers == []
    assert status.consumers == []


@pytest.fixture
def fresh(service: ServiceHandle) -> Callable[[], int]:
    """The next version that is above every earlier one."""
    return lambda: (service.status().newest_version or 0) + 1
