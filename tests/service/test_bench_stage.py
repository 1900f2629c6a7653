"""The folder of a bench in shared memory: what a killed one leaves the next one removes, a living one keeps its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weightsync.service.bench.stage import _claim, _sweep

_HOLDER = """
import sys, time
from pathlib import Path
from weightsync.service.bench.stage import _claim
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "rank0.safetensors").write_bytes(b"x")
claimed = _claim(folder)
print("up", flush=True)
time.sleep(60)
"""


def test_only_the_folder_of_a_killed_bench_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / f"weightsync-bench-{name}" for name in ("dead", "alive")]
    benches = [
        subprocess.Popen([sys.executable, "-c", _HOLDER, str(folder)], stdout=subprocess.PIPE) for folder in folders
    ]
    try:
        for bench in benches:
            assert bench.stdout is not None
            assert bench.stdout.readline() == b"up\n"
        os.kill(benches[0].pid, signal.SIGKILL)
        benches[0].wait()
        monkeypatch.setattr("weightsync.service.bench.stage.SHARED_MEMORY", tmp_path)
        _sweep()
        assert [folder.exists() for folder in folders] == [False, True]
        assert (folders[1] / "rank0.safetensors").exists()
    finally:
        for bench in benches:
            bench.kill()
            bench.wait()
    os.close(_claim(folders[1]))  # with its owner gone it is free
