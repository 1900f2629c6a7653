"""What Prometheus reads: every metric of the table, the right values, pages by member, and nobody who left."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import ray
from fault_helpers import Scene
from prometheus_client.parser import text_string_to_metric_families

from weightsync.protocol import metric_names as names
from weightsync.protocol.faults import Fault
from weightsync.protocol.metric_names import Metric

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Samples:
    """(sample name, labels but `service`) -> value; a sample twice is an error."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset((k, v) for k, v in sample.labels.items() if k != "service")
            assert (sample.name, labels) not in found, sample
            found[sample.name, labels] = sample.value
    return found


def value(samples: Samples, metric: Metric, suffix: str = "", **labels: str) -> float:
    return samples.get((metric.full_name + suffix, frozenset(labels.items())), 0.0)


@pytest.fixture
def scrape(client: httpx.Client) -> Any:
    def get(path: str = "/metrics") -> Samples:
        response = client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        return read(response.text)

    return get


def test_a_sync_is_counted_once_with_its_bytes_and_phases(scene: Scene, scrape: Any) -> None:
    before = scrape()
    report = scene.check_sync(["w0", "w1"])
    after = scrape()

    def added(metric: Metric, suffix: str = "", **labels: str) -> float:
        return value(after, metric, suffix, **labels) - value(before, metric, suffix, **labels)

    assert added(names.SYNCS, outcome="committed") == 1
    assert added(names.SYNCS, outcome="aborted") == 0
    assert added(names.SYNC_SECONDS, "_count", mode="live") == 1
    assert added(names.SYNC_SECONDS, "_sum", mode="live") == pytest.approx(report.seconds)
    for phase, seconds in report.phases.items():
        assert added(names.PHASE_SECONDS, "_count", phase=phase) == 1
        assert value(after, names.LAST_PHASE_SECONDS, phase=phase) == pytest.approx(seconds)
    strategies = {s for pull in report.workers.values() for s in pull.strategies}
    assert sum(added(names.BYTES_IN, strategy=s) for s in strategies) == report.bytes
    assert sum(added(names.PRODUCER_SERVED, rank=str(rank)) for rank in (0, 1)) == report.bytes
    held = [value(after, names.PRODUCER_HELD, rank=str(rank)) for rank in (0, 1)]
    assert held[0] != held[1]
    served = [added(names.PRODUCER_SERVED, rank=str(rank)) for rank in (0, 1)]
    assert served == [2 * nbytes for nbytes in held], "each of two workers takes all that a rank holds, from that rank"
    assert added(names.BYTES_NEEDED) == report.needed_bytes
    assert added(names.PULL_SECONDS, "_count") == 2
    assert added(names.WAIT_SECONDS, "_count", wait="free_barrier") == 2
    assert value(after, names.NEWEST_VERSION) == scene.version
    assert value(after, names.THROUGHPUT) == pytest.approx(report.bytes / report.seconds)
    for worker in ("w0", "w1"):
        assert value(after, names.CONSUMER_VERSION, worker=worker) == scene.version
        assert value(after, names.CONSUMER_READY, worker=worker) == 1
        assert value(after, names.CONSUMER_LAG, worker=worker) == 0
    assert added(names.PREPARED, what="registrations") == 0, "steady state"


def test_every_metric_of_the_table_is_there_and_no_other(scene: Scene, scrape: Any) -> None:
    scene.check_sync(["w0", "w1"])
    known = {metric.full_name for metric in names.ALL}
    for samples in (scrape(), scrape("/metrics/registry")):
        for name, _ in samples:
            bare = name
            for suffix in ("_bucket", "_sum", "_count"):
                if name.removesuffix(suffix) in known:
                    bare = name.removesuffix(suffix)
            assert bare in known, name
    seen = {name for name, _ in scrape()}
    rare = {  # there once the thing they count has happened
        names.STALLS,
        names.REFUSALS,
        names.GATHER_SECONDS,
        names.PREPARED,
        names.PREDICTION,
        names.LINK_BYTES_PER_S,
    }
    for metric in names.ALL:
        if metric not in rare:
            assert metric.full_name in seen or metric.full_name + "_count" in seen, metric.full_name


def test_faults_are_counted_by_a_closed_set_of_reasons(scene: Scene, scrape: Any) -> None:
    before = scrape()
    ray.get(scene.workers["w1"].break_next_pull.remote())
    report, _ = ray.get(scene.publish())[0]
    assert report.evicted == ["w1"]
    after = scrape()
    reasons = {dict(labels)["reason"] for name, labels in after if name == names.EVICTIONS.full_name}
    assert reasons == {fault.value for fault in Fault}
    assert (
        value(after, names.EVICTIONS, reason="pull_failed") == value(before, names.EVICTIONS, reason="pull_failed") + 1
    )
    assert value(after, names.CONSUMER_LAG, worker="w1") == 1
    assert value(after, names.MAX_LAG) == 1
    assert value(after, names.MAX_LAG_SECONDS) > 0
    scene.check_sync(["w0", "w1"])


def test_discovery_lists_a_page_per_member_that_adds_up_to_everything(
    scene: Scene, client: httpx.Client, scrape: Any
) -> None:
    scene.check_sync(["w0", "w1"])
    targets = client.get("/sd").json()
    assert sorted(t["labels"]["weightsync_member"] for t in targets) == [
        "registry",
        "trainer rank 0",
        "trainer rank 1",
        "worker w0",
        "worker w1",
    ]
    together: set[Any] = set()
    for target in targets:
        (address,) = target["targets"]
        response = httpx.get(f"http://{address}{target['labels']['__metrics_path__']}")
        assert response.status_code == 200
        page = set(read(response.text))
        assert page
        assert not page & together, "no series on two pages"
        together |= page
    assert together == set(scrape())
    assert client.get("/metrics/consumers/nobody").status_code == 404
    assert client.get("/metrics/producers/7").status_code == 404


def test_nothing_of_a_member_that_left_stays(scene: Scene, client: httpx.Client, scrape: Any) -> None:
    scene.set_workers(3)
    assert any(dict(labels).get("worker") == "w2" for _, labels in scrape())
    scene.set_workers(2)
    assert not any(dict(labels).get("worker") == "w2" for _, labels in scrape())
    assert "worker w2" not in client.get("/sd").text
