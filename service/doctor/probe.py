"""Facts about the node that this process runs on: files below /proc and /sys, limits, and NIXL itself.

The thing to watch: NIXL and UCX read their environment when they are loaded, and `load_nixl` adds to it on ROCm; so
the environment is noted first. What cannot be read is None, never a guess.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import ray
import torch

from weightsync.actors import ucx_endpoints
from weightsync.actors.nixl_package import load_nixl, nixl_problem
from weightsync.service.doctor.facts import NixlFacts, NodeFacts, RdmaPort, first_line

_CAP_IPC_LOCK = 14
_CAP_SYS_PTRACE = 19
_INFINIBAND = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")
_ENVIRONMENT = re.compile(r"UCX_|NIXL_|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF$")


def probe_node(resources: Mapping[str, float] | None = None) -> NodeFacts:
    """Everything this process can find out about its node; loads NIXL. Takes a second or two.

    Args:
        resources: what the node offers, as `ray.nodes()` says; None outside of a cluster.
    """
    environment = {name: value for name, value in sorted(os.environ.items()) if _ENVIRONMENT.match(name)}
    capabilities = parse_capabilities(_text("/proc/self/status") or "")
    shared_memory = shutil.disk_usage(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    scope = _text("/proc/sys/kernel/yama/ptrace_scope")
    store = (resources or {}).get("object_store_memory")
    return NodeFacts(
        host=platform.node(),
        python=platform.python_version(),
        ray=ray.__version__,
        token_auth=_token_auth(),
        weightsync=_version("weightsync"),
        torch=torch.__version__,
        torch_build=_torch_build(),
        accelerators=_accelerators(),
        nixl=probe_nixl(),
        environment=environment,
        rdma_ports=rdma_ports(_INFINIBAND),
        memlock_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        may_lock_memory=bool(capabilities >> _CAP_IPC_LOCK & 1),
        may_trace=bool(capabilities >> _CAP_SYS_PTRACE & 1),
        ptrace_scope=int(scope) if scope else None,
        shared_memory_bytes=shared_memory.total if shared_memory else None,
        shared_memory_free_bytes=shared_memory.free if shared_memory else None,
        object_store_bytes=int(store) if store else None,
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
    )


def probe_nixl() -> NixlFacts:
    """What NIXL and its UCX offer here, asked of an agent made for it."""
    package = "nixl" if torch.version.hip is None else "nixl_rocm"
    problem, version = nixl_problem(), _version(package)
    if problem is not None:
        return NixlFacts(package=package, version=version, problem=problem)
    nixl = load_nixl()
    try:
        config = nixl.nixl_agent_config(enable_prog_thread=False)
        agent = nixl.nixl_agent(f"doctor-{secrets.token_hex(4)}", config)
        plugins, backends = sorted(agent.get_plugin_list()), sorted(agent.backends)
    except Exception as error:
        return NixlFacts(
            package=package,
            version=version,
            problem=f"NIXL imports but cannot make an agent ({first_line(error)}); UCX_LOG_LEVEL=info says why",
        )
    found = ucx_endpoints.loaded_ucx()
    return NixlFacts(
        package=package,
        version=version,
        plugins=plugins,
        backends=backends,
        ucx_version=", ".join(ucx.version for ucx in found) or None,
        ucx_domains={name: list(domains) for ucx in found for name, domains in ucx.domains.items()},
    )


def rdma_ports(folder: Path) -> list[RdmaPort]:
    """Ports of the RDMA devices that the kernel lists below /sys/class/infiniband."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        state = _text(port / "state") or "unknown"
        found.append(
            RdmaPort(
                device=port.parent.parent.name,
                port=int(port.name),
                active="ACTIVE" in state,
                state=state,
                gbits_per_s=parse_rate(_text(port / "rate") or ""),
                link_layer=_text(port / "link_layer") or "unknown",
            )
        )
    return found


def parse_rate(text: str) -> float | None:
    """Gigabits per second.

    Example:
        >>> parse_rate("100 Gb/sec (4X EDR)"), parse_rate("")
        (100.0, None)
    """
    match = re.match(r"([\d.]+)\s*Gb/sec", text)
    return float(match[1]) if match else None


def parse_capabilities(status: str) -> int:
    """Effective capabilities as a bit mask, from the text of /proc/self/status; 0 if it holds none."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, flags=re.MULTILINE)
    return int(match[1], 16) if match else 0


def _token_auth() -> bool | None:
    if not ray.is_initialized():
        return None
    try:  # Ray has no public call for it, and older ones have no tokens
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:
        return None
    return bool(is_token_auth_enabled())


def _torch_build() -> str:
    if torch.version.hip is not None:
        return f"rocm {torch.version.hip}"
    return "cpu" if torch.version.cuda is None else f"cuda {torch.version.cuda}"


def _accelerators() -> dict[str, int]:
    """By device files: Ray hides devices from processes that asked for none, and PyTorch then sees none."""
    device, rendering = Path("/dev"), Path("/dev/dri")
    nvidia = [file for file in device.glob("nvidia*") if file.name[6:].isdigit()]
    amd = list(rendering.glob("renderD*")) if (device / "kfd").exists() else []
    return {vendor: len(files) for vendor, files in (("nvidia", nvidia), ("amd", amd)) if files}


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
