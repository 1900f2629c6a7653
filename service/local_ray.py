"""A local Ray cluster that outlives the command that launched it, for `weightsync up` on a bare machine.

What was launched is noted in a small file of this user, so that `down` stops that cluster and never another.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray

from weightsync.protocol.errors import SyncError

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 30.0
_PROBE_TIMEOUT_S = 2.0


def ensure_cluster() -> bool:
    """Connect to the running cluster, or launch a head node in the background; True if launched.

    Raises:
        SyncError: Ray did not come up; the message holds the end of its output.
    """
    if ray.is_initialized() or find_cluster() is not None:
        return False
    log = _note().with_suffix(".log")
    log.parent.mkdir(mode=0o700, exist_ok=True)
    command = [
        _ray_command(),
        "start",
        "--head",
        "--port=0",
        "--block",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        address = _await_head(process, log)
    except BaseException:  # Ctrl-C too: a head node nobody waits for must not stay
        process.terminate()
        process.wait()
        raise
    _note().write_text(json.dumps({"pid": process.pid, "address": address}))
    return True


def _await_head(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while (address := find_cluster()) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SyncError(f"`ray start --head` did not come up: {log.read_text()[-400:].strip()}")
        time.sleep(0.5)
    return address


def find_cluster() -> str | None:
    """Address of the cluster that `ray.init(address="auto")` would join, if something answers there.

    Ray keeps the address of the last head node in a file that outlives a killed one, and then tries to reach it
    for minutes; a probe tells at once.
    """
    given = os.environ.get("RAY_ADDRESS")
    if given and given != "auto":
        return given
    try:
        address = _pointer().read_text().strip()
    except OSError:
        return None
    return address if answers(address) else None


def answers(address: str) -> bool:
    """Whether something listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S):
            return True
    except (OSError, ValueError):
        return False


def _pointer() -> Path:
    """Where Ray notes the address of this host's newest head node."""
    return Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"


def stop_launched_cluster() -> bool:
    """Stop the cluster that `ensure_cluster` launched; True if so, False if we run on another one."""
    try:
        noted = json.loads(_note().read_text())
    except (OSError, ValueError):
        return False
    if ray.is_initialized() and noted["address"] != ray.get_runtime_context().gcs_address:
        return False
    ray.shutdown()
    try:
        os.kill(noted["pid"], signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while _alive(noted["pid"]) and time.monotonic() < deadline:
            time.sleep(0.1)
    except ProcessLookupError:
        pass
    for leftover in (_pointer(), _note(), _note().with_suffix(".log")):
        leftover.unlink(missing_ok=True)
    return True


def _note() -> Path:
    return Path(tempfile.gettempdir()) / f"weightsync-{os.getuid()}" / "ray-head.json"


def _ray_command() -> str:
    beside_python = Path(sys.executable).with_name("ray")
    return str(beside_python) if beside_python.exists() else (shutil.which("ray") or "ray")


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
