"""One Ray cluster per session, because starting one takes seconds; each test has a service of its own."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator

import pytest
import ray

from tests.shell import shell  # noqa: F401  a fixture
from weightsync.service import ServiceHandle, Settings, start


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray, away from any other on this machine, with a service that keeps Serve up between tests."""
    ray.init(address="local", namespace="weightsync", log_to_driver=False, include_dashboard=False, num_cpus=2)
    start("keeper", settings=Settings(http_port=0))
    yield
    ray.shutdown()


@pytest.fixture
def make_service(cluster: None) -> Iterator[Callable[..., ServiceHandle]]:
    """Starts services with given settings; all are shut down after the test."""
    handles: list[ServiceHandle] = []

    def make(name: str | None = None, **settings: object) -> ServiceHandle:
        defaults = {"http_port": 0, "stall_timeout_s": 30.0, "long_poll_s": 1.0}
        handle = start(name or f"t{secrets.token_hex(3)}", settings=Settings(**{**defaults, **settings}))
        handles.append(handle)
        return handle

    yield make
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.shutdown()
