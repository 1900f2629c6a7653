"""A real Prometheus, with the files we ship, scrapes real services: every panel and every rule has something to show.

Services, trainers and workers are processes that sync real versions all the while. One service publishes live,
verifies and wants a token, one is staged and wants none; some metrics exist in one mode only.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping

import httpx
import psutil
import pytest
import ray
from fault_helpers import Scene, ingress_processes
from prometheus_server import PrometheusServer, still_empty
from rule_files import CONFIG, rules, without_thresholds

from weightsync.dashboards.queries import ALL, panel_queries

pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: apt-get install prometheus)"
    ),
    pytest.mark.timeout(400),
]

SHORT: Mapping[str, str] = {**ALL, "__rate_interval": "10s", "__interval": "1s", "__range": "5m", "window": "1m"}
"""Variables for scrapes every second and a history of some seconds."""
READ = "a-token-that-may-read"
PATIENCE_S = 90.0
"""For all queries to have a number: three evaluations one after the other where rules read rules, and slow machines."""

EMPTY_ALERTS = {
    "WeightsyncNotScraped": "it looks for the absence of every series, and there are some",
}
"""Alerts whose expression has no series here even without thresholds."""
EMPTY_PANELS = {
    "Speed of links": "links are measured on tensors of at least 1 MiB, and those of the tests are smaller",
}
"""Panels that have no series here. Recorded series: none."""


@pytest.fixture(scope="module")
def live(cluster: None) -> Iterator[Scene]:
    """Two ranks, no workers yet. The watchdog comes after 96 s, well after the alert about a sync that stands still."""
    scene = Scene(trainers=2, http=True, verify="full", stall_timeout_s=120.0, http_read_tokens=[READ])
    yield scene
    scene.close()


@pytest.fixture(scope="module")
def staged(cluster: None) -> Iterator[Scene]:
    """Its watchdog comes after 8 s."""
    scene = Scene(trainers=1, http=True, mode="staged", stall_timeout_s=10.0)
    yield scene
    scene.close()


@pytest.fixture(scope="module")
def prometheus(live: Scene, staged: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """Scrapes both before their workers join: an increase needs a zero that was scraped before."""
    services = [(scene.service.name, str(scene.service.status().http_url)) for scene in (live, staged)]
    server = PrometheusServer(CONFIG, services, tmp_path_factory.mktemp("prometheus"), READ)
    try:
        for name, _ in services:
            _await(lambda name=name: {"registry", "trainer rank 0"} <= server.healthy_members(name), 30)
        for scene in (live, staged):
            scene.set_workers(2)
        yield server
    finally:
        server.stop()


def test_every_member_is_a_target_and_its_series_end_with_it(prometheus: PrometheusServer, live: Scene) -> None:
    name, workers = live.service.name, {"worker w0", "worker w1"}
    everybody = {"ingress", "registry", "trainer rank 0", "trainer rank 1", *workers}
    _await(lambda: prometheus.healthy_members(name) == everybody, 30)
    selector = f'weightsync_consumer_version{{service="{name}", worker="w1"}}'
    assert prometheus.query(selector)
    live.set_workers(1)
    _await(lambda: prometheus.healthy_members(name) == everybody - {"worker w1"}, 30)
    _await(lambda: not prometheus.query(selector), 30)
    assert prometheus.query(selector.replace("w1", "w0"))
    live.set_workers(2)


def test_a_token_that_may_read_is_needed_and_enough(prometheus: PrometheusServer, live: Scene) -> None:
    """The configuration asks with it for `/sd` and for every page that this names."""
    base = str(live.service.status().http_url)
    with httpx.Client(timeout=30) as client:
        assert client.get(f"{base}/sd").status_code == 401
        token = {"Authorization": f"Bearer {READ}"}
        targets = client.get(f"{base}/sd", headers=token).json()
        pages = {f"http://{target['targets'][0]}{target['labels']['__metrics_path__']}" for target in targets}
        assert len(pages) == 1 + 2 + 2, "the registry, ranks and workers"
        assert {client.get(page).status_code for page in pages} == {401}
        assert {client.get(page, headers=token).status_code for page in pages} == {200}
        paused = client.post(f"{base}/v1/publishing/pause", headers=token, json={"reason": "it may not"})
        assert paused.status_code == 403
    named = {target["labels"]["weightsync_member"] for target in targets}
    _await(lambda: prometheus.healthy_members(live.service.name) == {"ingress", *named}, 30)


def test_every_panel_shows_something(prometheus: PrometheusServer, live: Scene, staged: Scene) -> None:
    queries = [query for query in panel_queries(variables=SHORT) if query.panel not in EMPTY_PANELS]
    panels = {query.expr: f"{query.dashboard}, {query.panel}" for query in queries}
    empty = _sync_until(lambda: still_empty(prometheus, panels), live, staged)
    assert [f"{panels[expr]}: {expr}" for expr in empty] == []


def test_variables_offer_the_services(prometheus: PrometheusServer, live: Scene, staged: Scene) -> None:
    services = prometheus.label_values("service", "weightsync_up")
    assert {live.service.name, staged.service.name} <= set(services)
    assert prometheus.label_values("namespace", "weightsync_up") == []


def test_every_rule_is_healthy_and_has_something_to_look_at(
    prometheus: PrometheusServer, live: Scene, staged: Scene
) -> None:
    looks_at = {name: without_thresholds(rule["expr"]) for name, rule in rules("alert").items()}
    looks_at = {name: expr for name, expr in looks_at.items() if name not in EMPTY_ALERTS}
    exprs = [*rules("record"), *looks_at.values()]
    assert _sync_until(lambda: still_empty(prometheus, exprs), live, staged) == []
    loaded = prometheus.rules()
    assert {rule["name"] for rule in loaded} == {*rules("record"), *rules("alert")}
    assert [(rule["name"], rule.get("lastError")) for rule in loaded if rule["health"] != "ok"] == []


def test_nothing_is_wrong_with_services_that_are_well(prometheus: PrometheusServer, live: Scene, staged: Scene) -> None:
    _sync_until(lambda: [] if prometheus.query("weightsync_up") else ["weightsync_up"], live, staged)
    firing = {series["metric"]["alertname"] for series in prometheus.query('ALERTS{alertstate="firing"}')}
    # Tiny tensors take microseconds, of which a cost model for bandwidth says little.
    assert firing - {"WeightsyncPredictionOff"} == set()


def test_a_sync_that_the_watchdog_ends_raises_alerts(prometheus: PrometheusServer, staged: Scene) -> None:
    """A worker that does not begin fills the export ring, so nothing moves. Unit tests of rules see alerts clear."""
    name = staged.service.name
    assert prometheus.alert_states("WeightsyncStalled", service=name) == set()
    victim = staged.workers["w1"]
    ray.get(victim.hold_at.remote("starting"))
    with pytest.raises(ray.exceptions.RayTaskError, match="was aborted: nothing moved for 8 s"):
        ray.get(staged.publish())
    _await(lambda: prometheus.alert_states("WeightsyncStalled", service=name, who="sync") == {"firing"}, 15)
    _await(lambda: prometheus.alert_states("WeightsyncSyncAborted", service=name, reason="stalled") == {"firing"}, 15)
    assert prometheus.alert_states("WeightsyncStalled", service=name, who="worker") == set()
    ray.get(victim.go_on.remote())
    staged.set_workers(2)


def test_what_is_killed_raises_its_alert_which_clears_once_it_is_back(
    prometheus: PrometheusServer, live: Scene, staged: Scene
) -> None:
    """The last one of `staged`: its registry is killed for good, until the ingress makes another, without members."""
    registry_down = ("WeightsyncRegistryDown", staged.service.name)
    ingress_down = ("WeightsyncIngressDown", live.service.name)

    def firing() -> set[tuple[str, str]]:
        found = prometheus.query('ALERTS{alertstate="firing", alertname=~"Weightsync(Registry|Ingress)Down"}')
        return {(series["metric"]["alertname"], series["metric"]["service"]) for series in found}

    def fires_although_serve_replaces_it() -> bool:
        for replica in ingress_processes(live.service.name):
            with contextlib.suppress(psutil.NoSuchProcess):
                replica.kill()
        return ingress_down in firing()

    assert firing() == set()
    ray.kill(staged.service.registry)
    _await(lambda: firing() == {registry_down}, 40)
    _await(fires_although_serve_replaces_it, 60)
    _await(lambda: firing() == set(), 60)
    live.check_sync(["w0", "w1"])


@pytest.mark.slow
def test_a_sync_that_stands_still_raises_the_alert_and_its_end_clears_it(
    prometheus: PrometheusServer, live: Scene
) -> None:
    """The gauge must pass 60 s and be seen for 15 s more; the watchdog would come at 96 s."""
    name = live.service.name
    live.check_sync(["w0", "w1"])
    victim = live.workers["w1"]
    ray.get(victim.hold_at.remote("pulling"))
    publishing = live.publish()
    assert ray.get(victim.reached.remote())
    assert prometheus.alert_states("WeightsyncSyncQuiet", service=name) == set()
    _await(lambda: "pending" in prometheus.alert_states("WeightsyncSyncQuiet", service=name), 75)
    _await(lambda: "firing" in prometheus.alert_states("WeightsyncSyncQuiet", service=name), 30)
    ray.get(victim.go_on.remote())
    report, _ = ray.get(publishing)[0]
    assert report.installed == ["w0", "w1"]
    _await(lambda: prometheus.alert_states("WeightsyncSyncQuiet", service=name) == set(), 15)
    assert prometheus.alert_states("WeightsyncStalled", service=name) == set()


def _await(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.2)


def _sync_until(left: Callable[[], list[str]], *scenes: Scene) -> list[str]:
    """Sync versions until nothing is left or patience is; returns what is left."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for scene in scenes:
            scene.check_sync(sorted(scene.workers))
        if not (rest := left()) or time.monotonic() > deadline:
            return rest
        time.sleep(0.5)
