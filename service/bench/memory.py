"""How much memory there is, and how much the processes of a bench hold.

Anonymous memory of every process below this one, and shared memory below /dev/shm, where Ray's object store and
files of ours lie. The thing to watch: pages of shared memory are not counted with the processes that map them, so
nothing is counted twice.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be taken without swapping, also under this container's limit."""
    fields = dict(line.split(":", 1) for line in (_PROC / "meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def available_shared_memory() -> int:
    return shutil.disk_usage(SHARED_MEMORY).free


def held_memory() -> int:
    """Bytes held now: anonymous memory of all descendants of this process, and all shared memory."""
    return sum(_anonymous(pid) for pid in _descendants(os.getpid())) + shutil.disk_usage(SHARED_MEMORY).used


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:  # the name is in parentheses and may hold anything; the parent is the second field after it
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _anonymous(pid: int) -> int:
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0)
