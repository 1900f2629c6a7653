"""One Ray cluster per session, because starting one takes seconds; each test has a service of its own.

`helpers` and `fault_helpers` are importable in every test, and in the actors that tests spawn.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent / "integration"))
sys.path.insert(0, str(Path(__file__).parent / "faults"))
import fault_helpers
import helpers

from tests.shell import shell  # noqa: F401  a fixture
from weightsync.service import ServiceHandle, Settings, start

ray.cloudpickle.register_pickle_by_value(helpers)
ray.cloudpickle.register_pickle_by_value(fault_helpers)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray, away from any other on this machine, with a service that keeps Serve up between tests."""
    ray.init(address="local", namespace="weightsync", log_to_driver=False, include_dashboard=False, num_cpus=2)
    start("keeper", settings=Settings(http_port=0))
    yield
    ray.shutdown()


@pytest.fixture
def make_service(cluster: None) -> Iterator[Callable[..., ServiceHandle]]:
    """Starts services with given settings, with an ingress where `http` says so; all are shut down after the test."""
    handles: list[ServiceHandle] = []

    def make(name: str | None = None, http: bool = False, **settings: object) -> ServiceHandle:
        defaults = {"http_port": 0, "stall_timeout_s": 30.0, "long_poll_s": 1.0}
        begin = start if http else helpers.start_registry
        handle = begin(name or f"t{secrets.token_hex(3)}", settings=Settings(**{**defaults, **settings}))
        handles.append(handle)
        return handle

    yield make
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.shutdown()


@pytest.fixture(scope="session")
def shared_scene(cluster: None) -> Iterator[fault_helpers.Scene]:
    """A whole service with two ranks, for all tests that need no settings of their own; they say which workers.

    Whatever a test does to it must leave a scene whose next sync works.
    """
    made = fault_helpers.Scene(http=True)
    yield made
    made.close()
