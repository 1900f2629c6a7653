"""The service that most tests here share, and a browser; makes `rule_files` importable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from devtools import NAMES, Browser, Page, find_chromium
from helpers import start_registry

from weightsync.service import ServiceHandle, Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))


@pytest.fixture(scope="session")
def shared_service(cluster: None) -> ServiceHandle:
    """One service for all tests that need no settings of their own; it must survive every one of them."""
    return start_registry("shared", settings=Settings(stall_timeout_s=30.0, long_poll_s=1.0))


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        pytest.skip(f"Chromium is not installed; none of {', '.join(NAMES)} is on the PATH")
    with Browser(executable) as running:
        yield running


@pytest.fixture
def tab(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens tabs; all are closed after the test."""
    with ExitStack() as stack:

        def new(**options: Any) -> Page:
            page = browser.page(**options)
            stack.callback(page.close)
            return page

        yield new
