"""From what several nodes said to findings about them together. Pure, like `judge_node`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from weightsync.protocol.status import ServiceStatus
from weightsync.service.doctor.facts import ClockOffset, NodeFacts, PairFacts
from weightsync.service.doctor.report import Check, Finding, PairReport
from weightsync.service.doctor.thresholds import (
    CLOCK_SKEW_S,
    LEAST_RDMA_SHARE,
    SERVICE_ANSWER_S,
    SLOW_NETWORK_BYTES_PER_S,
    SLOW_NODE_BYTES_PER_S,
)

_VERSIONS: dict[str, tuple[str, Finding, Callable[[NodeFacts], str | None]]] = {
    "ray": ("Ray", Finding.PROBLEM, lambda facts: facts.ray),
    "python": ("Python", Finding.PROBLEM, lambda facts: facts.python),
    "weightsync": ("weightsync", Finding.PROBLEM, lambda facts: facts.weightsync),
    "nixl": ("NIXL", Finding.WARNING, lambda facts: facts.nixl.version),
    "torch": ("PyTorch", Finding.WARNING, lambda facts: facts.torch),
}
"""What has to be one version everywhere: for Ray, Python and weightsync because objects are pickled between them."""


def judge_versions(nodes: Mapping[str, NodeFacts]) -> list[Check]:
    """A check per package; none if no node answered.

    Args:
        nodes: facts by host.
    """
    if not nodes:
        return []
    checks = []
    for key, (title, finding, version_of) in _VERSIONS.items():
        hosts: dict[str, list[str]] = {}
        for host, facts in nodes.items():
            hosts.setdefault(version_of(facts) or "not installed", []).append(host)
        check = partial(Check, id=f"{key}-version", title=f"{title} version")
        if len(hosts) == 1:
            (version,) = hosts
            checks.append(
                check(status=Finding.OK, detail=version + (f" on all {len(nodes)} nodes" if len(nodes) > 1 else ""))
            )
            continue
        found = "; ".join(f"{version} on {_some(names)}" for version, names in sorted(hosts.items()))
        checks.append(
            check(status=finding, detail=found, remedy=f"install one version of {title} on all nodes and restart Ray")
        )
    return checks


def judge_clocks(clocks: Mapping[str, ClockOffset]) -> Check:
    """How far apart the nodes' wall clocks are, at least.

    Args:
        clocks: by host, all against one clock.
    """
    check = partial(Check, id="clocks", title="wall clocks")
    if len(clocks) < 2:
        return check(status=Finding.SKIPPED, detail="one node")
    by_time = sorted(clocks, key=lambda host: clocks[host].seconds)
    behind, ahead = by_time[0], by_time[-1]
    skew = clocks[ahead].seconds - clocks[behind].seconds
    uncertainty = clocks[ahead].uncertainty_s + clocks[behind].uncertainty_s
    detail = f"{ahead} is {1e3 * skew:.1f} ms ahead of {behind} (give or take {1e3 * uncertainty:.1f} ms)"
    if skew - uncertainty <= CLOCK_SKEW_S:
        return check(status=Finding.OK, detail=detail)
    return check(
        status=Finding.WARNING,
        detail=f"{detail}; lag and event times are wall clock",
        remedy="run chrony or another NTP client on every node",
    )


def judge_pair(pair: PairFacts, source: NodeFacts, target: NodeFacts) -> PairReport:
    """A verdict on what one node reads from another, or from itself."""
    report = partial(PairReport, measured=pair, source_host=source.host, target_host=target.host)
    if pair.error is not None or pair.bytes_per_s is None:
        return report(
            status=Finding.PROBLEM,
            verdict=f"reads fail: {pair.error or 'nothing was measured'}",
            remedy="open the ports between the nodes (UCX takes ephemeral ones) and set UCX_NET_DEVICES to an "
            "interface that reaches the other node; UCX_LOG_LEVEL=info says more",
        )
    runs = f"this pair runs at {pair.bytes_per_s / 1e9:.2g} GB/s over {pair.carrier}"
    finding, reason, remedy = _within_node(pair) if pair.source == pair.target else _between_nodes(pair, source, target)
    return report(status=finding, verdict=f"{runs}: {reason}" if reason else runs, remedy=remedy)


_Verdict = tuple[Finding, str, str]


def _within_node(pair: PairFacts) -> _Verdict:
    assert pair.bytes_per_s is not None
    if pair.carrier in ("tcp", "self"):
        return (
            Finding.WARNING,
            "processes of this node cannot read each other's memory, so reads are emulated by messages",
            "see the findings `ucx` and `ptrace` of this node",
        )
    if pair.bytes_per_s < SLOW_NODE_BYTES_PER_S:
        return (
            Finding.WARNING,
            "slow for a copy within one node",
            "measure again on an idle node; if it stays, look for a CPU limit of the container and for other load",
        )
    return Finding.OK, "", ""


def _between_nodes(pair: PairFacts, source: NodeFacts, target: NodeFacts) -> _Verdict:
    assert pair.bytes_per_s is not None
    without = [facts.host for facts in (source, target) if not facts.active_ports]
    slow = pair.bytes_per_s < SLOW_NETWORK_BYTES_PER_S
    if "rdma" in pair.carrier:
        rated = [
            max((port.gbits_per_s or 0.0 for port in facts.active_ports), default=0.0) for facts in (source, target)
        ]
        wanted = min(rated) * 1e9 / 8 * LEAST_RDMA_SHARE
        if pair.bytes_per_s < wanted:
            return (
                Finding.WARNING,
                f"less than half of the {min(rated):g} Gb/s of the slower node's fastest port",
                "choose the port nearest to the memory with UCX_NET_DEVICES, and measure while the fabric is idle",
            )
        return Finding.OK, "", ""
    if pair.carrier == "tcp" and not without:
        ports = ",".join(port.name for port in target.active_ports)
        return (
            Finding.PROBLEM,
            "both nodes have active RDMA ports, and they are not used",
            f"unset UCX_TLS or add rc to it, set UCX_NET_DEVICES={ports} on {target.host} and as fits on "
            f"{source.host}, and see `rdma` and `memlock`",
        )
    if pair.carrier == "tcp":
        hosts = " and ".join(dict.fromkeys(without))
        return (
            Finding.WARNING if slow else Finding.OK,
            f"no RDMA device is used, for want of an active one on {hosts}",
            f"give {hosts} an RDMA device (InfiniBand, RoCE, EFA), or set UCX_NET_DEVICES to the fastest interface"
            if slow
            else "",
        )
    if slow:
        return Finding.WARNING, "slow for a network", "set UCX_NET_DEVICES to the fastest device of each node"
    return Finding.OK, "", ""


def judge_service(name: str, status: ServiceStatus | None, error: str | None = None) -> Check:
    """Health of a running service.

    Args:
        status: None if its registry did not answer.
        error: what came instead.
    """
    check = partial(Check, id=f"service:{name}", title=f"service {name}")
    if status is None:
        return check(
            status=Finding.PROBLEM,
            detail=f"its registry does not answer: {error or f'nothing came for {SERVICE_ANSWER_S:g} s'}",
            remedy=f"look at its log (`ray logs actor`), then run `weightsync down --name {name}` and `weightsync up "
            f"--name {name}`",
        )
    newest = "no version yet" if status.newest_version is None else f"version {status.newest_version}"
    detail = (
        f"answers; {newest}, {len(status.producers)} trainer ranks, {len(status.consumers)} workers, transport "
        f"{status.transport}"
    )
    if status.last_error and not _overcome(status):
        return check(
            status=Finding.WARNING,
            detail=f"{detail}; last error, and no version since: {status.last_error}",
            remedy=f"`weightsync status --name {name}` shows the members; `--why` who waits for whom in a running sync",
        )
    return check(status=Finding.OK, detail=detail)


def _overcome(status: ServiceStatus) -> bool:
    """Whether a version was committed after the last error: what it was about is over."""
    committed_at, failed_at = status.committed_at, status.last_error_at
    return committed_at is not None and failed_at is not None and committed_at > failed_at


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
