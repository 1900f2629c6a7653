"""An engine that is killed in the middle of a sync, and comes back, while trainer and other engine go on."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.vllm.models import read
from weightsync.service import Publisher, ServiceHandle, StateDictSource

Checkpoints = Callable[[str, int], Path]


class Engine:
    """A process that runs `engine_process`, in a group of its own."""

    def __init__(self, folder: Path, service: str, name: str) -> None:
        command = [sys.executable, "-m", "tests.vllm.engine_process", str(folder), service, name]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=Path(__file__).parents[2]
        )
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> dict[str, Any]:
        """The next thing it says."""
        said = self._lines.get(timeout=120)
        assert said is not None, f"it ended with {self._process.wait()}"
        return said

    def signal(self, number: int) -> None:
        """To all its processes."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """With everything it started, which then cannot tidy up: vLLM's shared memory is removed here."""
        if self._process.poll() is not None:
            return
        root = psutil.Process(self._process.pid)
        mapped = {m.path for one in (root, *root.children(recursive=True)) for m in one.memory_maps()}
        self.signal(signal.SIGKILL)
        self._process.wait()
        for path in mapped:
            if path.startswith("/dev/shm/"):
                Path(path).unlink(missing_ok=True)

    def end(self) -> int:
        """As Ctrl-C does; the exit status. It has to go in time."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(60)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.kill()


def test_killed_in_a_sync_and_started_again(
    make_service: Callable[..., ServiceHandle],
    reachable: None,
    checkpoints: Checkpoints,
    engines: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = make_service(stall_timeout_s=120.0)
    monkeypatch.setenv("WEIGHTSYNC_SERVICE", service.name)
    values = {version: read(checkpoints("llama", 20 + version)) for version in (1, 2, 3)}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in values[1].items()}
    with Publisher(service, 0, 1, StateDictSource(tensors)) as publisher:

        def publish(version: int) -> Any:
            for name, tensor in tensors.items():
                tensor.copy_(values[version][name])
            return publisher.publish(version)

        engines += [Engine(checkpoints("llama", 1), service.name, name) for name in ("one", "two")]
        assert [engine.next() for engine in engines] == [{"ready": True}] * 2
        publish(1)
        first = [engine.next() for engine in engines]
        assert first[0] == first[1]
        assert first[0]["made_by"] == ["1"]

        engines[1].signal(signal.SIGSTOP)  # it has no part in version 2 until it is killed in the middle of it
        killing = threading.Timer(1.0, engines[1].kill)
        killing.start()
        report = publish(2)
        killing.join()
        assert (report.installed, report.evicted) == (["one-dp0-rank0"], ["two-dp0-rank0"])
        second = engines[0].next()
        assert second["version"] == 2
        assert second["tokens"] != first[0]["tokens"]

        engines.append(Engine(checkpoints("llama", 1), service.name, "two"))
        assert engines[2].next() == {"ready": True}
        report = publish(3)
        assert sorted(report.installed) == ["one-dp0-rank0", "two-dp0-rank0"]
        third = [engines[0].next(), engines[2].next()]
        assert third[0] == third[1]
        assert third[0]["made_by"] == ["3"]

        assert engines[0].end() != 0
        assert [member.worker for member in service.status().consumers] == ["two-dp0-rank0"], "it left the service"
