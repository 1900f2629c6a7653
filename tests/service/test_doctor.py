"""What the doctor says follows from facts alone: each check has a good side and a bad one, and a remedy for that."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from weightsync.protocol.status import ServiceStatus
from weightsync.service.doctor import judge_cluster, judge_node
from weightsync.service.doctor.examine import choose_pairs, unique_names
from weightsync.service.doctor.facts import ClockOffset, NixlFacts, NodeFacts, PairFacts, RdmaPort
from weightsync.service.doctor.probe import parse_capabilities, parse_rate, rdma_ports
from weightsync.service.doctor.report import Check, DoctorReport, Finding, NodeReport, PairReport
from weightsync.service.doctor.view import render

OK, WARNING, PROBLEM, SKIPPED = Finding.OK, Finding.WARNING, Finding.PROBLEM, Finding.SKIPPED
OPENED = {"cma": ["cma"], "ib": ["mlx5_0"], "tcp": ["tcp"]}


def nixl(**changes: Any) -> NixlFacts:
    good = {"package": "nixl", "version": "1.5.1", "plugins": ["UCX"], "backends": ["UCX"], "ucx_version": "1.23.0"}
    return NixlFacts(**{**good, "ucx_domains": OPENED, **changes})


def port(active: bool = True, gbits_per_s: float | None = 100.0) -> RdmaPort:
    state = "4: ACTIVE" if active else "1: DOWN"
    return RdmaPort(
        device="mlx5_0", port=1, active=active, state=state, gbits_per_s=gbits_per_s, link_layer="InfiniBand"
    )


def node(**changes: Any) -> NodeFacts:
    """A node with nothing to complain about."""
    good = {
        "host": "n0",
        "python": "3.11.7",
        "ray": "2.60.0",
        "token_auth": True,
        "weightsync": "0.1.0",
        "torch": "2.13.0",
        "torch_build": "cuda 13.0",
        "accelerators": {"nvidia": 8},
        "nixl": nixl(),
        "rdma_ports": [port()],
        "memlock_bytes": None,
        "may_lock_memory": False,
        "may_trace": False,
        "ptrace_scope": 0,
        "shared_memory_bytes": 512 << 30,
        "shared_memory_free_bytes": 500 << 30,
        "object_store_bytes": 200 << 30,
        "open_files": 65536,
    }
    return NodeFacts(**{**good, **changes})


def check(facts: NodeFacts, name: str, nodes: int = 2) -> Check:
    (found,) = [check for check in judge_node.judge_node(facts, nodes) if check.id == name]
    return found


def test_a_good_node_passes_every_check_that_applies() -> None:
    checks = judge_node.judge_node(node(), nodes=2)
    assert {check.id: check.status for check in checks if check.status is not OK} == {"registration-cache": SKIPPED}
    assert len({check.id for check in checks}) == len(checks)
    assert not any(check.remedy for check in checks)


BAD: list[tuple[str, dict[str, Any], Finding, str, str]] = [
    ("nixl", {"nixl": nixl(problem="not installed", version=None)}, PROBLEM, "not installed", "pip install nixl"),
    ("nixl", {"nixl": nixl(problem="does not import")}, PROBLEM, "not import", "--force-reinstall nixl"),
    ("nixl", {"nixl": nixl(backends=["POSIX"])}, PROBLEM, "starts POSIX, and not UCX", "reinstall nixl"),
    (
        "ucx",
        {"nixl": nixl(ucx_domains={"cma": [], "tcp": ["tcp"]}), "environment": {"UCX_TLS": "tcp,self"}},
        WARNING,
        "UCX_TLS is tcp,self",
        "add cma",
    ),
    ("ucx", {"nixl": nixl(ucx_domains={"cma": [], "tcp": ["tcp"]})}, WARNING, "UCX_TLS is not set", "SYS_PTRACE"),
    ("rdma", {"rdma_ports": []}, WARNING, "other nodes go over TCP", "/dev/infiniband"),
    ("rdma", {"rdma_ports": [port(active=False)]}, WARNING, "mlx5_0:1 is 1: DOWN", "ibstat"),
    (
        "rdma",
        {"nixl": nixl(ucx_domains={"ib": [], "cma": ["cma"]})},
        PROBLEM,
        "mlx5_0:1 100 Gb/s InfiniBand; but UCX opened none",
        "/dev/infiniband",
    ),
    (
        "rdma",
        {"nixl": nixl(ucx_domains={"ib": [], "cma": ["cma"]}), "environment": {"UCX_TLS": "tcp"}},
        PROBLEM,
        "UCX_TLS=tcp",
        "add rc",
    ),
    ("memlock", {"memlock_bytes": 8 << 20}, PROBLEM, "at most 8.4 MB", "ulimit -l unlimited"),
    ("memlock", {"memlock_bytes": 64 << 30}, WARNING, "registering more than that", "memlock=-1"),
    (
        "ptrace",
        {"ptrace_scope": 1, "nixl": nixl(ucx_domains={"cma": []})},
        WARNING,
        "1: processes may not read",
        "sysctl kernel.yama.ptrace_scope=0",
    ),
    ("ptrace", {"ptrace_scope": 1, "nixl": nixl(ucx_domains={})}, WARNING, "1: ", "ptrace_scope=0"),
    ("ptrace", {"ptrace_scope": 2}, WARNING, "2: ", "CAP_SYS_PTRACE"),
    ("shared-memory", {"shared_memory_bytes": None}, PROBLEM, "not there", "tmpfs"),
    ("shared-memory", {"shared_memory_bytes": 64 << 20}, PROBLEM, "by default", "--shm-size"),
    ("shared-memory", {"shared_memory_bytes": 100 << 30}, WARNING, "object store on disk", "enlarge"),
    ("shared-memory", {"shared_memory_bytes": 200 << 30}, WARNING, "0 B is left", "--object-store-memory"),
    ("shared-memory", {"shared_memory_free_bytes": 100 << 20}, WARNING, "104.9 MB is left", "enlarge"),
    ("torch", {"torch_build": "cpu"}, WARNING, "8 nvidia, which this PyTorch cannot use", "pytorch.org"),
    (
        "allocator",
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        WARNING,
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "remove expandable_segments",
    ),
    (
        "allocator",
        {"environment": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}},
        WARNING,
        "PYTORCH_ALLOC_CONF=",
        "remove expandable_segments",
    ),
    (
        "registration-cache",
        {"torch_build": "rocm 6.4", "environment": {"UCX_RCACHE_MAX_UNRELEASED": "inf"}},
        WARNING,
        "is inf",
        "UCX_RCACHE_MAX_UNRELEASED=1024",
    ),
    ("open-files", {"open_files": 1024}, WARNING, "1024;", "ulimit -n"),
    ("token-auth", {"token_auth": False}, WARNING, "can run code", "RAY_AUTH_MODE=token"),
]


@pytest.mark.parametrize(("name", "changes", "status", "detail", "remedy"), BAD)
def test_what_is_wrong_with_a_node_is_found_with_what_to_do(
    name: str, changes: dict[str, Any], status: Finding, detail: str, remedy: str
) -> None:
    found = check(node(**changes), name)
    assert found.status is status
    assert detail in found.detail
    assert remedy in found.remedy


def test_every_check_of_a_node_has_a_bad_side_that_is_tested() -> None:
    assert {name for name, *_ in BAD} == {check.id for check in judge_node.judge_node(node())}


@pytest.mark.parametrize(
    ("name", "changes", "status", "detail"),
    [
        ("ucx", {"nixl": nixl(problem="NIXL is not installed")}, SKIPPED, "does not load"),
        ("ucx", {"nixl": nixl(ucx_domains={})}, SKIPPED, "cannot be asked"),
        ("rdma", {"nixl": nixl(ucx_domains={})}, OK, "active: mlx5_0:1"),
        ("rdma", {"environment": {"UCX_NET_DEVICES": "mlx5_0:1"}}, OK, "UCX_NET_DEVICES is mlx5_0:1"),
        ("memlock", {"memlock_bytes": 8 << 20, "may_lock_memory": True}, OK, "CAP_IPC_LOCK"),
        ("memlock", {"memlock_bytes": 8 << 20, "rdma_ports": []}, OK, "only with RDMA"),
        ("ptrace", {"ptrace_scope": None}, OK, "no Yama"),
        ("ptrace", {"ptrace_scope": 1}, OK, "all the same"),
        ("ptrace", {"ptrace_scope": 2, "may_trace": True}, OK, "CAP_SYS_PTRACE"),
        ("torch", {"torch_build": "cpu", "accelerators": {}}, OK, "accelerators: none"),
        ("allocator", {"torch_build": "cpu"}, SKIPPED, "CPU"),
        (
            "allocator",
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}},
            OK,
            "expandable_segments:False",
        ),
        ("registration-cache", {"torch_build": "rocm 6.4"}, OK, "weightsync sets 1024"),
        (
            "registration-cache",
            {"torch_build": "rocm 6.4", "environment": {"UCX_RCACHE_MAX_UNRELEASED": "64"}},
            OK,
            "is 64",
        ),
        ("open-files", {"open_files": None}, OK, "unlimited"),
        ("token-auth", {"token_auth": None}, SKIPPED, "no cluster"),
    ],
)
def test_what_does_no_harm_here_is_no_finding(name: str, changes: dict[str, Any], status: Finding, detail: str) -> None:
    found = check(node(**changes), name)
    assert found.status is status
    assert detail in found.detail
    assert not found.remedy


def test_one_node_alone_needs_no_rdma() -> None:
    assert check(node(rdma_ports=[]), "rdma", nodes=1).status is OK
    unused = node(nixl=nixl(ucx_domains={"ib": [], "cma": ["cma"]}))
    assert check(unused, "rdma", nodes=1).status is WARNING


def test_versions_that_differ_are_named_with_the_nodes_that_have_them() -> None:
    same = {check.id: check for check in judge_cluster.judge_versions({"n0": node(), "n1": node()})}
    assert {check.status for check in same.values()} == {OK}
    assert same["ray-version"].detail == "2.60.0 on all 2 nodes"
    other = node(ray="2.50.0", python="3.12.1", nixl=nixl(version=None))
    found = {check.id: check for check in judge_cluster.judge_versions({"n0": node(), "n1": other})}
    assert found["ray-version"].status is found["python-version"].status is PROBLEM
    assert found["ray-version"].detail == "2.50.0 on n1; 2.60.0 on n0"
    assert found["nixl-version"].status is WARNING
    assert "not installed on n1" in found["nixl-version"].detail
    assert found["torch-version"].status is OK


def test_clocks_are_apart_only_if_the_uncertainty_does_not_explain_it() -> None:
    def judged(*offsets: tuple[float, float]) -> Check:
        clocks = {f"n{i}": ClockOffset(seconds=s, uncertainty_s=u) for i, (s, u) in enumerate(offsets)}
        return judge_cluster.judge_clocks(clocks)

    assert judged((5.0, 0.001)).status is SKIPPED
    assert judged((0.0, 0.001), (0.05, 0.001), (-0.02, 0.001)).status is OK
    apart = judged((0.0, 0.001), (0.5, 0.001))
    assert apart.status is WARNING
    assert "n1 is 500.0 ms ahead of n0 (give or take 2.0 ms)" in apart.detail
    assert "NTP" in apart.remedy
    assert judged((0.0, 0.001), (0.5, 0.6)).status is OK


PLAIN = node(rdma_ports=[])


def pair(
    gbytes_per_s: float | None, carrier: str, source: NodeFacts, target: NodeFacts | None = None, error: str = ""
) -> PairReport:
    """Reads between two nodes, or within one."""
    measured = PairFacts(
        source="a",
        target="a" if target is None else "b",
        nbytes=1 << 26,
        bytes_per_s=None if gbytes_per_s is None else gbytes_per_s * 1e9,
        descriptor_s=1e-6,
        carrier=carrier,
        error=error or None,
    )
    return judge_cluster.judge_pair(measured, source, target or source)


@pytest.mark.parametrize(
    ("found", "status", "verdict", "remedy"),
    [
        (pair(6.0, "cma", PLAIN), OK, "this pair runs at 6 GB/s over cma", ""),
        (pair(2.0, "tcp", PLAIN), WARNING, "emulated by messages", "`ucx` and `ptrace`"),
        (pair(0.4, "cma", PLAIN), WARNING, "slow for a copy within one node", "idle node"),
        (pair(11.0, "rdma", node(), node()), OK, "this pair runs at 11 GB/s over rdma", ""),
        (pair(4.0, "rdma", node(), node()), WARNING, "less than half of the 100 Gb/s", "UCX_NET_DEVICES"),
        (pair(4.0, "rdma", node(rdma_ports=[port(gbits_per_s=None)]), node()), OK, "over rdma", ""),
        (pair(0.3, "tcp", node(), node()), PROBLEM, "they are not used", "UCX_NET_DEVICES=mlx5_0:1 on n0"),
        (
            pair(0.3, "tcp", PLAIN, PLAIN),
            WARNING,
            "this pair runs at 0.3 GB/s over tcp: no RDMA device is used, for want of an active one on n0",
            "give n0 an RDMA device",
        ),
        (pair(3.0, "tcp", PLAIN, PLAIN), OK, "no RDMA device is used", ""),
        (pair(3.0, "tcp", node(), PLAIN), OK, "no RDMA device is used", ""),
        (pair(0.3, "unknown", PLAIN, PLAIN), WARNING, "slow for a network", "fastest device"),
        (pair(3.0, "unknown", PLAIN, PLAIN), OK, "over unknown", ""),
        (pair(None, "unknown", PLAIN, PLAIN, "no answer in 60 s"), PROBLEM, "no answer in 60 s", "open the ports"),
        (pair(None, "unknown", PLAIN), PROBLEM, "nothing was measured", "UCX_LOG_LEVEL"),
    ],
)
def test_a_pair_gets_a_verdict_by_what_carried_its_bytes_and_how_fast(
    found: PairReport, status: Finding, verdict: str, remedy: str
) -> None:
    assert found.status is status
    assert verdict in found.verdict
    assert remedy in found.remedy
    assert bool(remedy) == bool(found.remedy)


def service(last_error: str | None, **more: Any) -> ServiceStatus:
    return ServiceStatus(
        service="s",
        address=None,
        transport="nixl",
        transport_reason="",
        http_url=None,
        registry_pid=1,
        generation=0,
        world_size=None,
        newest_version=3,
        epoch=None,
        producers=[],
        consumers=[],
        syncs_committed=3,
        syncs_aborted=0,
        last_report=None,
        last_error=last_error,
        **more,
    )


def test_a_service_is_judged_by_its_answer_and_its_last_error() -> None:
    well = judge_cluster.judge_service("s", service(None))
    assert (well.status, well.id) == (OK, "service:s")
    assert "version 3" in well.detail
    ill = judge_cluster.judge_service("s", service("version 4 was aborted"))
    assert ill.status is WARNING
    assert "version 4 was aborted" in ill.detail
    silent = judge_cluster.judge_service("s", None)
    assert silent.status is PROBLEM
    assert "nothing came for 2 s" in silent.detail
    assert "weightsync down --name s" in silent.remedy


def test_an_error_that_a_version_came_after_is_over() -> None:
    failed = {"last_error": "version 4 was aborted", "last_error_at": 200.0}
    assert judge_cluster.judge_service("s", service(**failed, committed_at=100.0)).status is WARNING
    overcome = judge_cluster.judge_service("s", service(**failed, committed_at=300.0))
    assert overcome.status is OK
    assert "aborted" not in overcome.detail


def test_all_pairs_are_measured_up_to_8_nodes_and_a_ring_beyond() -> None:
    assert len(choose_pairs([str(i) for i in range(8)])) == 64
    many = [str(i) for i in range(9)]
    ring = choose_pairs(many)
    assert len(ring) == 9
    assert {source for source, _ in ring} == {target for _, target in ring} == set(many)
    assert choose_pairs([]) == []


def test_nodes_of_one_host_are_told_apart() -> None:
    hosts = {"aaaaaaaa1": "h", "bbbbbbbb2": "h", "cccccccc3": "i"}
    assert unique_names(hosts) == {"aaaaaaaa1": "h aaaaaaaa", "bbbbbbbb2": "h bbbbbbbb", "cccccccc3": "i"}


def test_rdma_ports_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    for device, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "")):
        folder = tmp_path / device / "ports" / "1"
        folder.mkdir(parents=True)
        for name, text in (("state", state), ("rate", rate), ("link_layer", "Ethernet")):
            (folder / name).write_text(text + "\n")
    up, down = rdma_ports(tmp_path)
    assert (up.name, up.active, up.gbits_per_s, up.link_layer) == ("mlx5_0:1", True, 400.0, "Ethernet")
    assert (down.name, down.active, down.gbits_per_s) == ("mlx5_1:1", False, None)
    assert rdma_ports(tmp_path / "nothing") == []


def test_what_the_kernel_writes_is_parsed_or_taken_as_nothing() -> None:
    assert parse_rate("2.5 Gb/sec (1X SDR)") == 2.5
    assert parse_rate("unknown") is None
    assert parse_capabilities("CapPrm:\t01\nCapEff:\t0000000000084000\n") == (1 << 14) | (1 << 19)
    assert parse_capabilities("") == 0


def report(*checks: Check) -> DoctorReport:
    return DoctorReport(
        address=None,
        checks=[],
        nodes=[NodeReport(node_id="0123456789", host="n0", facts=node(), checks=list(checks))],
        pairs=[pair(6.0, "cma", PLAIN)],
        services=[judge_cluster.judge_service("s", service(None))],
        seconds=3.0,
    )


def test_only_a_problem_makes_a_report_not_ok() -> None:
    slow = check(node(open_files=1024), "open-files")
    broken = check(node(nixl=nixl(problem="NIXL is not installed")), "nixl")
    assert report(slow).ok
    assert not report(slow, broken).ok
    again = DoctorReport.model_validate_json(report(broken).model_dump_json())
    assert not again.ok
    assert '"ok":false' in report(broken).model_dump_json()


def test_the_terminal_shows_findings_remedies_and_a_summary_in_80_columns() -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(render(report(check(node(open_files=1024), "open-files"))))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "node n0 (01234567)" in text
    assert "to do: `ulimit -n 65536`" in text
    assert "6.00" in text
    assert "service s" in text
    assert text.strip().splitlines()[-1] == "0 problems, 1 warning; 2 ok, 3 s"
