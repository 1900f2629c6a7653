"""A local Ray cluster that outlives the command that launched it, for `weightsync up` on a bare machine.

What was launched is noted in a small file of this user, so that `down` stops that cluster and never another.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray

from weightsync.actors.spawn import NAMESPACE
from weightsync.protocol.errors import SyncError

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 30.0


def ensure_cluster() -> bool:
    """Connect to the running cluster, or launch a head node in the background; True if launched.

    Raises:
        SyncError: Ray did not come up; the message holds the end of its output.
    """
    if ray.is_initialized() or _try_connect():
        return False
    log = _note().with_suffix(".log")
    log.parent.mkdir(mode=0o700, exist_ok=True)
    command = [
        _ray_command(),
        "start",
        "--head",
        "--block",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _try_connect():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise SyncError(f"`{' '.join(command)}` did not come up: {log.read_text()[-400:].strip()}")
        time.sleep(0.5)
    _note().write_text(json.dumps({"pid": process.pid, "address": _address()}))
    return True


def stop_launched_cluster() -> bool:
    """Stop the connected cluster if `ensure_cluster` launched it; True if so."""
    try:
        noted = json.loads(_note().read_text())
    except (OSError, ValueError):
        return False
    if noted["address"] != _address():
        return False
    ray.shutdown()
    try:
        os.kill(noted["pid"], signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while _alive(noted["pid"]) and time.monotonic() < deadline:
            time.sleep(0.1)
    except ProcessLookupError:
        pass
    _note().unlink(missing_ok=True)
    _note().with_suffix(".log").unlink(missing_ok=True)
    return True


def _note() -> Path:
    return Path(tempfile.gettempdir()) / f"weightsync-{os.getuid()}" / "ray-head.json"


def _address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _ray_command() -> str:
    beside_python = Path(sys.executable).with_name("ray")
    return str(beside_python) if beside_python.exists() else (shutil.which("ray") or "ray")


def _try_connect() -> bool:
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except ConnectionError:
        return False
    return True


def _alive(pid: int) -> bool:
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)  # ours if this very process launched it
        return done == 0
    except ChildProcessError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
