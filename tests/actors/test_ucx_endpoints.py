"""What carries the bytes is what UCX uses for them, checked against what UCX prints and what it is forced to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightsync.actors.ucx_endpoints import carrier, endpoints

ROOT = Path(__file__).parents[2]

READER = """
import subprocess, sys
import numpy as np, torch
from weightsync.actors.nixl_transport import NixlTransport
from weightsync.actors.reads import read_all
from weightsync.actors.transport import Peer, ReadContext

if sys.argv[1:] == ["serve"]:
    served = NixlTransport("the-rank-that-is-read-has-a-long-name", serves=True)
    memory = torch.full((1 << 20,), 7, dtype=torch.uint8)
    served.register([memory])
    print(memory.data_ptr(), served.metadata().hex(), flush=True)
    sys.stdin.read()
    sys.exit()

server = subprocess.Popen([sys.executable, "-c", READ, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for line in server.stdout:
    if line.split()[0].isdigit():
        addr, metadata = line.split()
        break
reader = NixlTransport("a-reader-whose-name-is-longer-than-ucx-keeps", serves=False)
peer = Peer(0, 0, bytes.fromhex(metadata.decode()), None)
print("before:", reader.carrier(peer))
reader.connect(peer)
print("connected:", reader.carrier(peer))
into = torch.zeros(1 << 20, dtype=torch.uint8)
reader.register([into])
one = lambda value, kind: np.array([value], dtype=kind)
read = reader.prepare(peer, one(int(addr), np.uint64), one(into.data_ptr(), np.uint64), one(1 << 20, np.int64))
read_all(reader, [read], ReadContext(1, 0))
assert bool((into == 7).all())
print("after:", reader.carrier(peer))
reader.connect(peer)
print("again:", reader.carrier(peer))
server.stdin.close()
server.wait()
"""


def _read(**environment: str) -> tuple[dict[str, str], str]:
    """(what `carrier` said when, what UCX printed about reads) of a reader and a rank in two processes."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", f"READ = {READER!r}\nexec(READ)"],
        env={**clean, "PYTHONPATH": str(ROOT), "UCX_PROTO_INFO": "*remote memory read*", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.split(":")[0] in _STEPS)
    printed = [line for line in done.stdout.splitlines() if "inf |" in line]
    return said, "\n".join(printed)


_STEPS = ("before", "connected", "after", "again")


@pytest.mark.parametrize(("forced", "expected"), [({}, None), ({"UCX_TLS": "tcp,self"}, "tcp")])
def test_the_carrier_is_what_ucx_says_it_reads_over(forced: dict[str, str], expected: str | None) -> None:
    said, printed = _read(**forced)
    assert said["before"] == "unknown"
    assert said["connected"] == said["after"] == said["again"]
    assert printed, "UCX printed nothing to compare with"
    assert f"{said['after']}/" in printed, printed
    assert expected in (None, said["after"])


@pytest.mark.parametrize(
    ("transports", "host", "device"),
    [
        (["tcp", "cma"], "cma", "tcp"),
        (["tcp"], "tcp", "tcp"),
        (["rc_mlx5", "ud_mlx5"], "rdma", "rdma"),
        (["dc_mlx5", "cma"], "rdma or cma", "rdma"),
        (["srd"], "rdma", "rdma"),
        (["tcp", "cuda_ipc", "cma"], "cma", "cuda ipc"),
        (["rocm_ipc", "tcp"], "tcp", "rocm ipc"),
        (["posix", "tcp"], "shared memory", "shared memory"),
        (["xpmem", "tcp"], "shared memory", "tcp"),
        ([], "unknown", "unknown"),
        (["something_new"], "unknown", "unknown"),
    ],
)
def test_one_sided_transports_carry_reads_and_messages_only_without_them(
    transports: list[str], host: str, device: str
) -> None:
    assert carrier(transports) == host
    assert carrier(transports, device_memory=True) == device


def test_an_agent_that_is_not_there_has_no_endpoints() -> None:
    assert endpoints("nobody-has-this-name") == set()


LIST_DOMAINS = """
from weightsync.actors.nixl_transport import NixlTransport
from weightsync.actors.ucx_endpoints import loaded_ucx

transport = NixlTransport("asks", serves=False)
(ucx,) = loaded_ucx()
print("version:", ucx.version)
print("opened:", *(name for name, domains in ucx.domains.items() if domains))
print("closed:", *(name for name, domains in ucx.domains.items() if not domains))
"""


def test_components_that_ucx_may_not_use_have_opened_nothing() -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", LIST_DOMAINS],
        env={**clean, "UCX_TLS": "tcp,self"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert said["version"].count(".") == 2
    assert {"tcp", "self"} <= set(said["opened"].split())
    assert "cma" in said["closed"].split()
