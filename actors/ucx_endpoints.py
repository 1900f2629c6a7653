"""What carries the bytes to a peer, as UCX itself says: the transports of the endpoint NIXL opened to it.

NIXL does not hand its endpoints out. UCX lists those of each context in its object tree (named after the NIXL agent),
and `ucp_ep_query`, its public interface, names the transports of one. A read goes over a transport that reads remote
memory by itself (RDMA, CMA, xpmem, CUDA or ROCm IPC) if the endpoint has one, and is emulated by messages over what
is left otherwise; `UCX_PROTO_INFO` says the same, but only in print.

The thing to watch: an endpoint is asked about only while UCX lists it. Where UCX cannot be asked (another NIXL
backend, a UCX that does not export its tree) the answer is "unknown", never a guess.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_NAME_BYTES = 31
"""UCX cuts names of contexts and workers."""
_MAX_TRANSPORTS = 64
_QUERY_TRANSPORTS = 1 << 3
_ONE_SIDED_HOST = (
    ("rdma", re.compile(r"(rc|dc|ud|gga|srd)(_|$)")),
    ("cma", re.compile("cma$")),
    ("shared memory", re.compile("xpmem$|knem$")),
)
_ONE_SIDED_DEVICE = (_ONE_SIDED_HOST[0], ("cuda ipc", re.compile("cuda_ipc$")), ("rocm ipc", re.compile("rocm_ipc$")))
_BY_MESSAGE = (
    ("shared memory", re.compile("posix$|sysv$")),
    ("tcp", re.compile("tcp$")),
    ("self", re.compile("self$")),
)

Endpoint = tuple[str, int]
"""Path of the UCX library that made it (a process may have several loaded), and its address."""


@dataclass(frozen=True)
class Ucx:
    """One UCX library of this process: its version, and the memory domains that each of its components opened.

    A component without any found no device, or may not use it: `ib` without RDMA, `cma` where ptrace is forbidden.
    """

    version: str
    domains: dict[str, tuple[str, ...]]


class _Transport(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    """`ucp_ep_attr_t`; fields that we do not ask for are not written."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_address", ctypes.c_char * 128),
        ("remote_address", ctypes.c_char * 128),
        ("transports", ctypes.c_void_p),
        ("num_transports", ctypes.c_uint),
        ("transport_nbytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


_OnEntry = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)


def carrier(transports: Iterable[str], *, device_memory: bool = False) -> str:
    """What a read uses of an endpoint's UCX transports; "a or b" if UCX may take either.

    Example:
        >>> carrier(["tcp", "cma"]), carrier(["tcp", "tcp"]), carrier([])
        ('cma', 'tcp', 'unknown')
    """
    names = set(transports)
    one_sided = _ONE_SIDED_DEVICE if device_memory else _ONE_SIDED_HOST
    direct = [kind for kind, pattern in one_sided if any(pattern.match(name) for name in names)]
    if direct:
        return " or ".join(direct)
    return next((kind for kind, pattern in _BY_MESSAGE if any(pattern.match(name) for name in names)), "unknown")


def endpoints(agent_name: str) -> set[Endpoint]:
    """Endpoints that a NIXL agent of this process has open now; empty where UCX cannot be asked."""
    ours = agent_name.encode()[:_NAME_BYTES].decode(errors="ignore")
    found: set[Endpoint] = set()
    for path, (ucs, _) in _libraries().items():
        _entries(ucs, "/ucp")  # UCX fills a folder in when the one above is listed
        for context in _entries(ucs, "/ucp/context"):
            if not context.startswith(ours):
                continue
            for worker in _entries(ucs, f"/ucp/context/{context}/worker"):
                _entries(ucs, f"/ucp/context/{context}/worker/{worker}")
                listed = _entries(ucs, f"/ucp/context/{context}/worker/{worker}/ep")
                found.update((path, int(name, 16)) for name in listed if name.startswith("0x"))
    return found


def transports(agent_name: str, wanted: Iterable[Endpoint]) -> list[str]:
    """UCX transports of these endpoints, as far as the agent still has them."""
    names: list[str] = []
    for path, address in endpoints(agent_name) & set(wanted):
        entries = (_Transport * _MAX_TRANSPORTS)()
        asked = _Attributes(
            field_mask=_QUERY_TRANSPORTS,
            transports=ctypes.addressof(entries),
            num_transports=_MAX_TRANSPORTS,
            transport_nbytes=ctypes.sizeof(_Transport),
        )
        if _libraries()[path][1].ucp_ep_query(ctypes.c_void_p(address), ctypes.byref(asked)) == 0:
            names += [entry.name.decode() for entry in entries[: asked.num_transports] if entry.name]
    return names


def loaded_ucx() -> list[Ucx]:
    """Each UCX of this process that can be asked; domains are there once something, such as an agent, opened them."""
    found = []
    for ucs, ucp in _libraries().values():
        _entries(ucs, "/uct")
        domains = {}
        for component in sorted(_entries(ucs, "/uct/component")):
            _entries(ucs, f"/uct/component/{component}")
            domains[component] = tuple(sorted(_entries(ucs, f"/uct/component/{component}/memory_domain")))
        ucp.ucp_get_version_string.restype = ctypes.c_char_p
        found.append(Ucx(ucp.ucp_get_version_string().decode(), domains))
    return found


def _entries(ucs: ctypes.CDLL, path: str) -> list[str]:
    names: list[str] = []
    ucs.ucs_vfs_path_list_dir(path.encode(), _OnEntry(lambda name, _: names.append(name.decode())), None)
    return names


def _libraries() -> dict[str, tuple[ctypes.CDLL, ctypes.CDLL]]:
    """Path -> (libucs, libucp) of each UCX that is loaded in this process and can be asked."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return {}
    at = {which: sorted(set(re.findall(rf"(/\S*/lib{which}[-.]\S*)", mapped))) for which in ("ucs", "ucp")}
    pairs = [(ucs, ucp) for ucs in at["ucs"] for ucp in at["ucp"] if Path(ucs).parent == Path(ucp).parent]
    return {ucs: loaded for ucs, ucp in pairs if (loaded := _loaded(ucs, ucp)) is not None}


@cache
def _loaded(ucs_path: str, ucp_path: str) -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    ucs, ucp = ctypes.CDLL(ucs_path), ctypes.CDLL(ucp_path)
    return (ucs, ucp) if hasattr(ucs, "ucs_vfs_path_list_dir") and hasattr(ucp, "ucp_ep_query") else None
