"""An examination, start to finish.

    1. join the cluster, or start a temporary one here; if Ray will not, look at this machine without it
    2. an examiner on every node finds its facts, all at once; clocks are compared by request and answer
    3. pairs of nodes are measured, one after another, so that they do not disturb each other
    4. services are asked; everything started is ended; findings are judged

The thing to watch: every way out goes through `_Cluster.close`, and a node that does not answer is a finding, not the
end.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.actors.spawn import find_registry
from weightsync.protocol.errors import WeightsyncError
from weightsync.service.api import ensure_ray, list_services
from weightsync.service.doctor.examiner import Examiner, Served
from weightsync.service.doctor.facts import ClockOffset, NodeFacts, PairFacts, first_line
from weightsync.service.doctor.judge_cluster import judge_clocks, judge_pair, judge_service, judge_versions
from weightsync.service.doctor.judge_node import judge_node
from weightsync.service.doctor.probe import probe_node
from weightsync.service.doctor.report import Check, DoctorReport, Finding, NodeReport, PairReport
from weightsync.service.doctor.thresholds import ALL_PAIRS_NODES, MEASURED_BYTES, SERVICE_ANSWER_S
from weightsync.service.interrupts import Interrupts
from weightsync.service.local_ray import answers, find_cluster

Say = Callable[[str], None]
"""Told what is done now."""

_NODE_ANSWER_S = 90.0
"""A process with PyTorch and NIXL starts in seconds, and in a minute from a cold network file system."""
_PAIR_ANSWER_S = 60.0
_CLOCK_ROUNDS = 7


class NoAnswerError(WeightsyncError):
    """A node, an actor or a registry did not do what was asked; the message is why."""


def examine(address: str | None, *, measure: bool, interrupts: Interrupts, say: Say) -> DoctorReport:
    """Look at everything, change nothing.

    Args:
        address: Ray address; None takes the running cluster, or this machine if there is none.
        measure: whether pairs of nodes are measured.

    Raises:
        ConnectionError: nothing answers at `address`.
    """
    started = time.monotonic()
    say("looking for a Ray cluster ...")
    joined = not ray.is_initialized()
    wanted = address or (find_cluster() if joined else None)
    if joined and wanted is not None and re.fullmatch(r"[^/]+:\d+", wanted) and not answers(wanted):
        raise ConnectionError(f"nothing answers at {wanted}; is Ray running there?")  # Ray itself tries for minutes
    running = wanted is not None or not joined
    if not running and not measure:  # nothing that needs another process
        return _this_machine(started, Check(id="cluster", title="Ray cluster", status=Finding.OK, detail=_NONE_RUNS))
    try:
        owns_ray = _join(address)
    except RuntimeError as error:
        if interrupts.caused(error):
            raise KeyboardInterrupt from error
        refused = Check(
            id="cluster",
            title="Ray cluster",
            status=Finding.PROBLEM,
            detail=f"{'cannot be joined' if running else 'cannot be started'}: {first_line(error)}",
            remedy="give this process the Ray and Python versions of the cluster"
            if running
            else "see the logs of the newest session below /tmp/ray; `ray start --head` says more",
        )
        return _this_machine(started, refused)
    cluster = _Cluster(owns_ray, joined, say)
    try:
        with interrupts.raised():  # again: Ray has put a handler of its own in place
            return cluster.report(started, measure)
    finally:
        with interrupts.noted():
            cluster.close()


def choose_pairs(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """(source, target) of the reads to measure: every ordered pair, or a ring of neighbours if there are too many.

    Example:
        >>> choose_pairs(["a", "b"])
        [('a', 'a'), ('a', 'b'), ('b', 'a'), ('b', 'b')]
    """
    if len(nodes) <= ALL_PAIRS_NODES:
        return [(source, target) for source in nodes for target in nodes]
    return list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))


def unique_names(hosts: Mapping[str, str]) -> dict[str, str]:
    """Node id -> host name, with the start of the id where nodes share a host."""
    shared = Counter(hosts.values())
    return {node: host if shared[host] == 1 else f"{host} {node[:8]}" for node, host in hosts.items()}


_NONE_RUNS = "none runs here; this machine was looked at"


def _join(address: str | None) -> bool:
    try:
        return ensure_ray(address)
    except BaseException:  # Ctrl-C too: half a Ray must not stay
        ray.shutdown()
        raise


def _this_machine(started: float, cluster: Check) -> DoctorReport:
    facts = probe_node()
    return DoctorReport(
        address=None,
        checks=[cluster, *judge_versions({facts.host: facts}), _not_measured(cluster.status is Finding.OK)],
        nodes=[NodeReport(node_id="", host=facts.host, facts=facts, checks=judge_node(facts))],
        pairs=[],
        services=[],
        seconds=time.monotonic() - started,
    )


def _not_measured(asked: bool) -> Check:
    why = "not measured, as asked" if asked else "not measured, for want of a cluster"
    return Check(id="pairs", title="bandwidth", status=Finding.SKIPPED, detail=why)


class _Cluster:
    """The connected Ray cluster, and the actors that were spawned on it.

    Args:
        owns_ray: it was launched for this examination.
        joined: it was connected to for this examination; an earlier connection stays.
    """

    def __init__(self, owns_ray: bool, joined: bool, say: Say) -> None:
        self._owns_ray, self._joined, self._say = owns_ray, joined, say
        self._actors: list[Any] = []

    def report(self, started: float, measure: bool) -> DoctorReport:
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        self._say(f"asking {_count(len(alive), 'node')} ...")
        examiners = {node: self._spawn(node) for node in alive}
        readers = {node: self._spawn(node) for node in alive} if measure else {}
        asked = {node: examiner.facts.remote(alive[node]["Resources"]) for node, examiner in examiners.items()}
        answers = _answers(asked, _NODE_ANSWER_S)
        found = {node: facts for node, facts in answers.items() if isinstance(facts, NodeFacts)}
        names = unique_names(
            {node: found[node].host if node in found else alive[node]["NodeManagerHostname"] for node in alive}
        )
        found = {node: facts.model_copy(update={"host": names[node]}) for node, facts in found.items()}
        self._say("comparing clocks ...")
        clocks = {node: clock for node in found if (clock := _clock(examiners[node])) is not None}
        pairs = list(self._measured(found, examiners, readers)) if measure else []
        self._say("asking services ...")
        services = _services()
        checks = [
            self._described(len(alive)),
            *judge_versions({facts.host: facts for facts in found.values()}),
            judge_clocks({names[node]: clock for node, clock in clocks.items()}),
            _described_pairs(found, measure),
        ]
        return DoctorReport(
            address=None if self._owns_ray else ray.get_runtime_context().gcs_address,
            checks=checks,
            nodes=[
                _node_report(node, names[node], answers[node], found.get(node), clocks.get(node), len(alive))
                for node in alive
            ],
            pairs=pairs,
            services=services,
            seconds=time.monotonic() - started,
        )

    def _described(self, nodes: int) -> Check:
        detail = f"{_count(nodes, 'node')} at {ray.get_runtime_context().gcs_address}"
        return Check(
            id="cluster",
            title="Ray cluster",
            status=Finding.OK,
            detail=f"{_NONE_RUNS} with a temporary Ray" if self._owns_ray else detail,
        )

    def _spawn(self, node: str) -> Any:
        remote: Any = ray.remote(Examiner)
        where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = remote.options(num_cpus=0, scheduling_strategy=where).remote()
        self._actors.append(actor)
        return actor

    def _measured(
        self, found: Mapping[str, NodeFacts], examiners: Mapping[str, Any], readers: dict[str, Any]
    ) -> Iterator[PairReport]:
        able = [node for node, facts in found.items() if facts.nixl.problem is None]
        served = _answers({node: examiners[node].serve.remote() for node in able}, _NODE_ANSWER_S)
        pairs = choose_pairs(able)
        for number, (source, target) in enumerate(pairs, 1):
            self._say(f"measuring pair {number} of {len(pairs)}: {found[source].host} to {found[target].host} ...")
            pair = _read(readers[target], source, target, served[source])
            if pair.error is not None:  # it may hang, or what it posted may still be under way
                ray.kill(readers[target])
                readers[target] = self._spawn(target)
            yield judge_pair(pair, found[source], found[target])

    def close(self) -> None:
        """End every actor, and the connection with a Ray that was launched here. Idempotent."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._actors = []
        if self._joined:
            ray.shutdown()


def _read(reader: Any, source: str, target: str, served: Served | NoAnswerError) -> PairFacts:
    if isinstance(served, NoAnswerError):
        return PairFacts(source=source, target=target, nbytes=MEASURED_BYTES, error=f"nothing is served: {served}")
    answer = _answers({target: reader.read.remote(source, target, served)}, _PAIR_ANSWER_S)[target]
    if isinstance(answer, NoAnswerError):
        return PairFacts(source=source, target=target, nbytes=MEASURED_BYTES, error=str(answer))
    pair: PairFacts = answer
    return pair


def _answers(calls: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Results of Ray calls by key; a NoAnswerError where one failed or did not end in time."""
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    results: dict[str, Any] = {}
    for key, call in calls.items():
        if call not in done:
            results[key] = NoAnswerError(f"no answer in {timeout_s:g} s")
            continue
        try:
            results[key] = ray.get(call)
        except Exception as error:
            results[key] = NoAnswerError(first_line(error))
    return results


def _clock(examiner: Any) -> ClockOffset | None:
    """Of the shortest of several round trips, whose middle is nearest to when the other clock was read."""
    best: ClockOffset | None = None
    for _ in range(_CLOCK_ROUNDS):
        sent, begun = time.time(), time.perf_counter()
        try:
            there = ray.get(examiner.now.remote(), timeout=SERVICE_ANSWER_S)
        except ray.exceptions.RayError:
            return best
        half = (time.perf_counter() - begun) / 2
        if best is None or half < best.uncertainty_s:
            best = ClockOffset(seconds=there - (sent + half), uncertainty_s=half)
    return best


def _services() -> list[Check]:
    registries = {name: find_registry(name) for name in list_services()}
    answers = _answers(
        {name: registry.status.remote() for name, registry in registries.items() if registry is not None},
        SERVICE_ANSWER_S,
    )
    return [
        judge_service(name, None, str(answer)) if isinstance(answer, NoAnswerError) else judge_service(name, answer)
        for name, answer in answers.items()
    ]


def _node_report(
    node: str, name: str, answer: object, facts: NodeFacts | None, clock: ClockOffset | None, nodes: int
) -> NodeReport:
    if facts is not None:
        return NodeReport(node_id=node, host=name, facts=facts, clock=clock, checks=judge_node(facts, nodes))
    silent = Check(
        id="node",
        title="node",
        status=Finding.PROBLEM,
        detail=f"could not be looked at: {answer}",
        remedy="install weightsync, of the same version, on that node, and see that it can start Ray actors",
    )
    return NodeReport(node_id=node, host=name, facts=None, checks=[silent])


def _described_pairs(found: Mapping[str, NodeFacts], measure: bool) -> Check:
    if not measure:
        return _not_measured(asked=True)
    able = [facts for facts in found.values() if facts.nixl.problem is None]
    if not able:
        return Check(id="pairs", title="bandwidth", status=Finding.SKIPPED, detail="NIXL loads on no node")
    every = len(able) <= ALL_PAIRS_NODES
    which = "every ordered pair" if every else f"a sample: each of {len(able)} nodes by its neighbour in a ring"
    detail = f"{which}; {MEASURED_BYTES >> 20} MiB of host memory, read one-sidedly over NIXL"
    return Check(id="pairs", title="bandwidth", status=Finding.OK, detail=detail)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
