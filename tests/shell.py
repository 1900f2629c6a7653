"""The command line as a user has it: its own processes, its own Ray, and nothing left of them afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import ray

MARK = "TEST_MARK_OF_WEIGHTSYNC"


def attached() -> dict[str, str]:
    """What another process needs in its environment to join the Ray that this one is connected to."""
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAY_AUTH_MODE": "token"}


class Shell:
    """Runs `weightsync` where no Ray is running yet, and finds every process that came of it."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid4().hex
        self.environment = {
            **os.environ,
            MARK: self.mark,
            "RAY_TMPDIR": str(folder),
            "TMPDIR": str(folder),
            "WEIGHTSYNC_HTTP_PORT": "0",
        }
        self.environment.pop("RAY_ADDRESS", None)
        self.shared_memory = set(os.listdir("/dev/shm"))

    def attach(self) -> None:
        """From now on commands join the Ray that this process is connected to."""
        del self.environment["RAY_TMPDIR"]
        self.environment |= attached()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "weightsync.service.cli", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=200)
        return process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def await_process(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while name not in {p.info["name"] for p in psutil.process_iter(["name"]) if self._is_ours(p)}:
            assert time.monotonic() < deadline, f"no {name} in 60 s"
            time.sleep(0.1)

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []
        assert set(os.listdir("/dev/shm")) - self.shared_memory == set()


@pytest.fixture
def shell() -> Iterator[Shell]:
    folder = Path(tempfile.mkdtemp(prefix="ws"))  # short: Ray puts socket paths below it
    shell = Shell(folder)
    yield shell
    for process in shell.processes():
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
