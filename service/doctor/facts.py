"""What was found out, before anybody judges it. Sizes are bytes, durations seconds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Facts(BaseModel):
    """Base of what crosses processes here: fixed once made, and no field by accident."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RdmaPort(Facts):
    """A port below /sys/class/infiniband, which RoCE and EFA devices have too."""

    device: str
    port: int
    active: bool
    state: str = Field(description="as the kernel says it, such as `4: ACTIVE`")
    gbits_per_s: float | None = Field(description="signalling rate; None if the kernel says none")
    link_layer: str

    @property
    def name(self) -> str:
        """As `UCX_NET_DEVICES` takes it."""
        return f"{self.device}:{self.port}"


class NixlFacts(Facts):
    package: str = Field(description="`nixl`, or `nixl_rocm` where PyTorch is one for ROCm")
    version: str | None = None
    problem: str | None = Field(None, description="why it cannot be used, with the remedy")
    plugins: list[str] = Field(default_factory=list, description="backends that the package brings")
    backends: list[str] = Field(default_factory=list, description="backends that an agent started")
    ucx_version: str | None = None
    ucx_domains: dict[str, list[str]] = Field(
        default_factory=dict,
        description="UCX component -> memory domains it opened, such as cma -> [cma] or ib -> [mlx5_0]; none opened: "
        "it found no device. Empty where UCX cannot be asked",
    )


class NodeFacts(Facts):
    """One node as a process there sees it; limits and variables are those that Ray's workers inherit."""

    host: str = Field(description="host name, with the start of the node's id where several nodes share it")
    python: str
    ray: str
    token_auth: bool | None = Field(description="Ray asks for a token; None outside of a cluster or if Ray cannot say")
    weightsync: str | None
    torch: str
    torch_build: str = Field(description="`cpu`, or `cuda` or `rocm` with its version")
    accelerators: dict[str, int] = Field(default_factory=dict, description="device files by vendor: nvidia, amd")
    nixl: NixlFacts
    environment: dict[str, str] = Field(
        default_factory=dict, description="variables of UCX and of PyTorch's allocator that were set before NIXL loaded"
    )
    rdma_ports: list[RdmaPort] = Field(default_factory=list)
    memlock_bytes: int | None = Field(description="soft RLIMIT_MEMLOCK; None: unlimited")
    may_lock_memory: bool = Field(description="CAP_IPC_LOCK, for which that limit does not count")
    may_trace: bool = Field(description="CAP_SYS_PTRACE")
    ptrace_scope: int | None = Field(description="of Yama; None where the kernel has none")
    shared_memory_bytes: int | None = Field(description="size of /dev/shm; None if there is none")
    shared_memory_free_bytes: int | None
    object_store_bytes: int | None = Field(None, description="limit of Ray's object store on this node")
    open_files: int | None = Field(description="soft RLIMIT_NOFILE; None: unlimited")

    @property
    def active_ports(self) -> list[RdmaPort]:
        return [port for port in self.rdma_ports if port.active]


class ClockOffset(Facts):
    """A node's wall clock against the one of the process that asked."""

    seconds: float = Field(description="how far it is ahead")
    uncertainty_s: float = Field(description="half of the round trip")


class PairFacts(Facts):
    """One-sided reads between two processes, in host memory: `target` reads what `source` registered."""

    source: str = Field(description="node id")
    target: str = Field(description="node id")
    nbytes: int
    bytes_per_s: float | None = Field(None, description="one large read")
    descriptor_s: float | None = Field(None, description="of each of many short reads, on top of their bytes")
    carrier: str = Field("unknown", description="what carried them: cma, shared memory, rdma, tcp")
    error: str | None = None


def first_line(error: BaseException) -> str:
    """An error in one line; of one that Ray wrapped, the original."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0] if text else 'no message'}"
