"""What a figure means nothing without: the machine, the versions of what was measured, and how busy it was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

_PACKAGES = (
    "weightsync",
    "torch",
    "ray",
    "nixl",
    "numpy",
    "safetensors",
    "modelexpress",
    "mooncake-transfer-engine-non-cuda",
)


def machine_facts() -> dict[str, str]:
    """Cores, memory, kernel and load at this moment, by name."""
    cpu = _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or "unknown"
    total = _field(Path("/proc/meminfo"), "MemTotal")
    return {
        "CPU": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(total.split()[0]) / (1 << 20):.1f} GiB" if total else "unknown",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def package_versions() -> dict[str, str]:
    """Versions of the installed ones of what takes part."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _field(path: Path, name: str) -> str | None:
    """The value of the first `name: value` line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
