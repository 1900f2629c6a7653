"""From a node's facts to findings: one pure function per check, all of the same shape.

Each says what was measured whatever the finding is, and what to do whenever it is not ok. The thing to watch: a limit
or a variable is that of Ray's processes, so a remedy takes effect when Ray on that node is started again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from weightsync.protocol.amounts import format_bytes
from weightsync.service.doctor.facts import NodeFacts
from weightsync.service.doctor.report import Check, Finding
from weightsync.service.doctor.thresholds import (
    DOCKER_SHARED_MEMORY_BYTES,
    LEAST_MEMLOCK_BYTES,
    LEAST_OPEN_FILES,
    LEAST_SHARED_MEMORY_BYTES,
    UNRELEASED_ON_ROCM,
)

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_UNRELEASED = "UCX_RCACHE_MAX_UNRELEASED"


def judge_node(facts: NodeFacts, nodes: int = 1) -> list[Check]:
    """All checks of a node.

    Args:
        nodes: of the cluster; with several, reads between them need a network.
    """
    judges: list[Callable[[NodeFacts], Check]] = [
        judge_nixl,
        judge_ucx,
        partial(judge_rdma, nodes=nodes),
        judge_memlock,
        judge_ptrace,
        judge_shared_memory,
        judge_torch,
        judge_allocator,
        judge_registration_cache,
        judge_open_files,
        judge_token_auth,
    ]
    return [judge(facts) for judge in judges]


def judge_nixl(facts: NodeFacts) -> Check:
    nixl, check = facts.nixl, partial(Check, id="nixl", title="NIXL")
    version = f"{nixl.package} {nixl.version or 'of unknown version'}"
    if nixl.problem is not None:
        again = "--force-reinstall " if nixl.version else ""
        return check(status=Finding.PROBLEM, detail=nixl.problem, remedy=f"pip install {again}{nixl.package}")
    if "UCX" not in nixl.backends:
        return check(
            status=Finding.PROBLEM,
            detail=f"{version} starts {', '.join(nixl.backends) or 'no backend'}, and not UCX",
            remedy=f"reinstall {nixl.package}; NIXL_PLUGIN_DIR must not point to another one's plugins",
        )
    return check(status=Finding.OK, detail=f"{version}, backend UCX; plugins: {', '.join(nixl.plugins)}")


def judge_ucx(facts: NodeFacts) -> Check:
    nixl, check = facts.nixl, partial(Check, id="ucx", title="UCX transports")
    if nixl.problem is not None:
        return check(status=Finding.SKIPPED, detail="NIXL does not load")
    if not nixl.ucx_domains:
        return check(status=Finding.SKIPPED, detail="this UCX cannot be asked what it opened")
    limit = facts.environment.get("UCX_TLS")
    opened = [name for name, domains in nixl.ucx_domains.items() if domains]
    detail = f"UCX {nixl.ucx_version}: {', '.join(opened)}; UCX_TLS " + (f"is {limit}" if limit else "is not set")
    if "cma" in opened:
        return check(status=Finding.OK, detail=detail)
    return check(
        status=Finding.WARNING,
        detail=f"{detail}; without cma, reads within the node are emulated by messages",
        remedy="unset UCX_TLS, or add cma to it"
        if limit
        else "let processes of one user read each other's memory, which CMA (process_vm_readv) needs: see `ptrace`; in "
        "a container also its seccomp profile, such as with `docker run --cap-add SYS_PTRACE`",
    )


def judge_rdma(facts: NodeFacts, nodes: int) -> Check:
    check = partial(Check, id="rdma", title="RDMA devices")
    active = ", ".join(f"{port.name} {_rate(port.gbits_per_s)} {port.link_layer}" for port in facts.active_ports)
    if not facts.rdma_ports:
        return check(
            status=Finding.OK if nodes == 1 else Finding.WARNING,
            detail="none" + ("; one node needs none" if nodes == 1 else "; reads from and to other nodes go over TCP"),
            remedy=""
            if nodes == 1
            else "use nodes with InfiniBand, RoCE or EFA; in a container, pass them in: `docker run --device "
            "/dev/infiniband`, or the device plugin of the cluster",
        )
    if not facts.active_ports:
        states = ", ".join(f"{port.name} is {port.state}" for port in facts.rdma_ports)
        return check(
            status=Finding.WARNING,
            detail=f"no port is active: {states}",
            remedy="check cables, the switch and (InfiniBand) that a subnet manager runs; `ibstat` shows the ports",
        )
    if facts.nixl.ucx_domains and not facts.nixl.ucx_domains.get("ib"):
        limit = facts.environment.get("UCX_TLS")
        return check(
            status=Finding.PROBLEM if nodes > 1 else Finding.WARNING,
            detail=f"active: {active}; but UCX opened none" + (f", with UCX_TLS={limit}" if limit else ""),
            remedy="unset UCX_TLS, or add rc to it"
            if limit
            else "pass /dev/infiniband into the container, raise the memlock limit, and see with UCX_LOG_LEVEL=info "
            "what UCX says",
        )
    devices = facts.environment.get("UCX_NET_DEVICES")
    return check(status=Finding.OK, detail=f"active: {active}" + (f"; UCX_NET_DEVICES is {devices}" if devices else ""))


def judge_memlock(facts: NodeFacts) -> Check:
    """Registering memory with an RDMA device pins it; nothing else here does."""
    check = partial(Check, id="memlock", title="locked memory")
    limit = "unlimited" if facts.memlock_bytes is None else f"at most {format_bytes(facts.memlock_bytes)}"
    if facts.memlock_bytes is None:
        return check(status=Finding.OK, detail=limit)
    if facts.may_lock_memory:
        return check(status=Finding.OK, detail=f"{limit}, which does not count for a process with CAP_IPC_LOCK")
    if not facts.rdma_ports:
        return check(status=Finding.OK, detail=f"{limit}; matters only with RDMA devices, of which there are none")
    low = facts.memlock_bytes < LEAST_MEMLOCK_BYTES
    return check(
        status=Finding.PROBLEM if low else Finding.WARNING,
        detail=f"{limit}; "
        + ("too low for UCX to use RDMA at all" if low else "registering more than that with an RDMA device fails"),
        remedy="`ulimit -l unlimited` before `ray start`, LimitMEMLOCK=infinity in its systemd unit, or `docker run "
        "--ulimit memlock=-1`",
    )


def judge_ptrace(facts: NodeFacts) -> Check:
    """CMA needs the right to trace the other process, which Yama may restrict.

    UCX copes with scope 1 by letting everybody trace it (PR_SET_PTRACER); 2 takes CAP_SYS_PTRACE, 3 forbids it. What
    UCX opened tells the outcome where it can be asked.
    """
    check = partial(Check, id="ptrace", title="ptrace scope")
    scope = facts.ptrace_scope
    if scope is None:
        return check(status=Finding.OK, detail="this kernel has no Yama")
    opened = facts.nixl.ucx_domains
    allowed = bool(opened["cma"]) if "cma" in opened else scope == 0
    if scope == 0 or (allowed and (scope == 1 or facts.may_trace)):
        how = {0: "processes of one user may read each other", 1: "UCX lets its processes be read all the same"}
        return check(status=Finding.OK, detail=f"{scope}: {how.get(scope, 'this process has CAP_SYS_PTRACE')}")
    return check(
        status=Finding.WARNING,
        detail=f"{scope}: processes may not read each other's memory (CMA) unless one is the parent of the other; "
        "reads within the node go another, slower way",
        remedy="`sysctl kernel.yama.ptrace_scope=0`, or give Ray's processes CAP_SYS_PTRACE",
    )


def judge_shared_memory(facts: NodeFacts) -> Check:
    """Ray's object store lies in /dev/shm, and so do our export rings (staged mode) and mirrors (rdt, object_store)."""
    check = partial(Check, id="shared-memory", title="/dev/shm")
    size, free, store = facts.shared_memory_bytes, facts.shared_memory_free_bytes, facts.object_store_bytes
    larger = "enlarge it: `mount -o remount,size=... /dev/shm`, `docker run --shm-size=...`, or a memory emptyDir there"
    if size is None or free is None:
        return check(status=Finding.PROBLEM, detail="not there", remedy="mount a tmpfs at /dev/shm")
    detail = f"{format_bytes(size)}, {format_bytes(free)} free" + (
        f", {format_bytes(store)} of it for Ray's object store" if store else ""
    )
    if size <= DOCKER_SHARED_MEMORY_BYTES:
        return check(status=Finding.PROBLEM, detail=f"{detail}; what a container gets by default", remedy=larger)
    if store and store > size:
        return check(status=Finding.WARNING, detail=f"{detail}: Ray keeps its object store on disk", remedy=larger)
    left = min(free, size - (store or 0))
    if left < LEAST_SHARED_MEMORY_BYTES:
        return check(
            status=Finding.WARNING,
            detail=f"{detail}: {format_bytes(left)} is left for staged mode's export rings",
            remedy=f"{larger}; or give Ray less: `ray start --object-store-memory=...`",
        )
    return check(status=Finding.OK, detail=detail)


def judge_torch(facts: NodeFacts) -> Check:
    check = partial(Check, id="torch", title="PyTorch")
    devices = ", ".join(f"{count} {vendor}" for vendor, count in facts.accelerators.items()) or "none"
    detail = f"{facts.torch}, built for {facts.torch_build}; accelerators: {devices}"
    if facts.accelerators and facts.torch_build == "cpu":
        return check(
            status=Finding.WARNING,
            detail=f"{detail}, which this PyTorch cannot use",
            remedy="install the build of PyTorch for these devices; see pytorch.org",
        )
    return check(status=Finding.OK, detail=detail)


def judge_allocator(facts: NodeFacts) -> Check:
    """UCX makes no IPC handles of expandable segments, and then emulates reads over TCP (nixl issue 1754)."""
    check = partial(Check, id="allocator", title="PyTorch allocator")
    if facts.torch_build == "cpu":
        return check(status=Finding.SKIPPED, detail="PyTorch for CPUs has none that matters")
    settings = [f"{name}={facts.environment[name]}" for name in _ALLOCATOR_VARIABLES if name in facts.environment]
    if not any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings):
        return check(status=Finding.OK, detail=", ".join(settings) or "defaults")
    return check(
        status=Finding.WARNING,
        detail=f"{', '.join(settings)}: memory of expandable segments cannot be read through CUDA or ROCm IPC; reads "
        "within a node stay right and fall to a hundredth of the speed, without an error",
        remedy="remove expandable_segments:True where trainers and engines allocate their weights",
    )


def judge_registration_cache(facts: NodeFacts) -> Check:
    check = partial(Check, id="registration-cache", title="UCX registrations")
    if not facts.torch_build.startswith("rocm"):
        return check(status=Finding.SKIPPED, detail="matters only on ROCm")
    value = facts.environment.get(_UNRELEASED)
    if value is None:
        return check(status=Finding.OK, detail=f"{_UNRELEASED} is not set; weightsync sets {UNRELEASED_ON_ROCM}")
    if value.isdigit():
        return check(status=Finding.OK, detail=f"{_UNRELEASED} is {value}")
    return check(
        status=Finding.WARNING,
        detail=f"{_UNRELEASED} is {value}: UCX keeps registrations of freed device memory until none is left",
        remedy=f"set {_UNRELEASED}={UNRELEASED_ON_ROCM}, or unset it",
    )


def judge_open_files(facts: NodeFacts) -> Check:
    check = partial(Check, id="open-files", title="open files")
    if facts.open_files is None or facts.open_files >= LEAST_OPEN_FILES:
        return check(status=Finding.OK, detail="unlimited" if facts.open_files is None else f"{facts.open_files}")
    return check(
        status=Finding.WARNING,
        detail=f"{facts.open_files}; each worker takes connections to Ray, to the registry and to every rank",
        remedy="`ulimit -n 65536` before `ray start`, or `docker run --ulimit nofile=65536`",
    )


def judge_token_auth(facts: NodeFacts) -> Check:
    check = partial(Check, id="token-auth", title="Ray token auth")
    if facts.token_auth is None:
        return check(status=Finding.SKIPPED, detail="no cluster to ask, or a Ray that knows no tokens")
    if facts.token_auth:
        return check(status=Finding.OK, detail="on")
    return check(
        status=Finding.WARNING,
        detail="off: whoever reaches Ray's ports can run code, and pull the weights",
        remedy="start every node with RAY_AUTH_MODE=token and one token (`ray get-auth-token --generate`), or keep its "
        "ports in a closed network",
    )


def _rate(gbits_per_s: float | None) -> str:
    return "at an unknown rate" if gbits_per_s is None else f"{gbits_per_s:g} Gb/s"
