"""What the HTTP face says and does, against a real service with real syncs."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import httpx
import pytest
import ray
from fault_helpers import Scene

from weightsync.protocol.errors import SyncAborted
from weightsync.protocol.status import ServiceStatus, VersionRecord

REASON = {"reason": "the test says so"}


def problem(response: httpx.Response, status: int) -> str:
    """The detail of a problem."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["status"], body["type"]) == (status, "about:blank")
    return str(body["detail"])


def test_what_is_read_is_what_the_registry_knows(scene: Scene, client: httpx.Client) -> None:
    report = scene.check_sync(["w0", "w1"])
    status = ServiceStatus.model_validate_json(client.get("/v1/status").text)
    assert status.newest_version == scene.version == report.version
    assert {c.worker for c in status.consumers} == {"w0", "w1"}
    assert all(c.ready and not c.torn and c.lag_versions == 0 and c.lag_seconds == 0 for c in status.consumers)
    members = client.get("/v1/members").json()
    assert [p["rank"] for p in members["producers"]] == [0, 1]
    assert sum(p["served_bytes"] for p in members["producers"]) >= report.bytes
    newest, *older = (VersionRecord.model_validate(r) for r in client.get("/v1/versions").json())
    assert newest.version == scene.version
    assert newest.report is not None
    assert newest.report.phases == report.phases
    assert newest.report.workers == {}, "a list has no details"
    assert [r.version for r in older] == sorted((r.version for r in older), reverse=True)
    (detailed,) = client.get(f"/v1/versions/{scene.version}").json()
    assert VersionRecord.model_validate(detailed).report == report
    assert "no attempt to sync version 999" in problem(client.get("/v1/versions/999"), 404)
    assert client.get("/v1/why").json() == {"why": []}
    assert client.get("/healthz").json() == {"status": "ok", "service": scene.service.name}


def hold(scene: Scene, *names: str) -> list[Any]:
    """Start a sync in which these workers stand still; returns what the ranks' publish will return."""
    for name in names:
        ray.get(scene.workers[name].hold_at.remote("pulling"))
    publishing = scene.publish()
    assert all(ray.get([scene.workers[name].reached.remote() for name in names]))
    return publishing


def test_a_running_sync_is_explained_and_aborted(scene: Scene, client: httpx.Client) -> None:
    publishing = hold(scene, "w1")
    why = client.get("/v1/why").json()["why"]
    assert any("worker w1 is pulling: 0 B of 4.0 kB" in line for line in why)
    epoch = client.get("/v1/status").json()["epoch"]
    assert (epoch["version"], epoch["waiting_for"]) == (scene.version, ["worker w1"])
    assert 0 < epoch["progress"] < 1
    other = scene.version + 1
    assert f"no sync of version {other} is running" in problem(
        client.post(f"/v1/versions/{other}/abort", json=REASON), 409
    )
    assert client.post(f"/v1/versions/{scene.version}/abort", json=REASON).status_code == 200
    for publish in publishing:
        with pytest.raises(ray.exceptions.RayTaskError, match="an operator asked for it: the test says so") as raised:
            ray.get(publish)
        assert isinstance(raised.value.cause, SyncAborted)
    ray.get(scene.workers["w1"].go_on.remote())
    (record,) = client.get(f"/v1/versions/{scene.version}").json()
    assert (record["state"], record["fault"], record["report"]) == ("aborted", "operator", None)
    scene.check_sync(["w0", "w1"])


def test_an_evicted_worker_is_left_out_once(scene: Scene, client: httpx.Client) -> None:
    assert "no sync is running that worker 'w1'" in problem(client.post("/v1/members/w1/evict", json=REASON), 409)
    assert "no worker 'nobody' is a member (members: w0, w1)" in problem(
        client.post("/v1/members/nobody/evict", json=REASON), 404
    )
    publishing = hold(scene, "w1")
    assert client.post("/v1/members/w1/evict", json=REASON).status_code == 200
    report, _ = ray.get(publishing)[0]
    assert (report.installed, report.evicted) == (["w0"], ["w1"])
    (record,) = client.get(f"/v1/versions/{scene.version}").json()
    assert record["evicted"] == {"w1": "an operator asked for it: the test says so"}
    ray.get(scene.workers["w1"].go_on.remote())
    behind = {c["worker"]: c["lag_versions"] for c in client.get("/v1/members").json()["consumers"]}
    assert behind["w1"] == 1
    scene.check_sync(["w0", "w1"])


def test_paused_publishing_waits_and_goes_on(scene: Scene, client: httpx.Client) -> None:
    assert client.post("/v1/publishing/pause", json=REASON).status_code == 200
    assert client.get("/v1/status").json()["paused"] == "the test says so"
    publishing = scene.publish()
    assert ray.wait(publishing, timeout=1.0)[0] == [], "ranks wait in publish"
    assert client.get("/v1/status").json()["epoch"] is None
    assert any("paused: the test says so" in line for line in client.get("/v1/why").json()["why"])
    for _ in range(2):
        assert client.post("/v1/publishing/resume").status_code == 200, "idempotent"
    report, _ = ray.get(publishing)[0]
    assert report.installed == ["w0", "w1"]


def test_a_rank_that_waits_too_long_for_paused_publishing_hears_why(scene: Scene, client: httpx.Client) -> None:
    assert client.post("/v1/publishing/pause", json=REASON).status_code == 200
    scene.version += 1
    publishing = [trainer.publish.remote(scene.version, 1.0) for trainer in scene.trainers]
    for publish in publishing:
        with pytest.raises(ray.exceptions.RayTaskError, match="paused: the test says so; `weightsync resume"):
            ray.get(publish)
    assert client.post("/v1/publishing/resume").status_code == 200
    scene.check_sync(["w0", "w1"])


class Listener:
    """Reads a stream of server-sent events in a thread."""

    def __init__(self, client: httpx.Client, last: int | None = None) -> None:
        self.messages: list[tuple[str, Any]] = []
        self.changed = threading.Condition()
        self._client, self._headers = client, {} if last is None else {"Last-Event-ID": str(last)}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(httpx.HTTPError, httpx.StreamError):  # the test is over, and the client closed
            self._read_on()

    def _read_on(self) -> None:
        with self._client.stream("GET", "/v1/events", headers=self._headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            kind = ""
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    kind = value
                elif field == "data":
                    with self.changed:
                        self.messages.append((kind, json.loads(value)))
                        self.changed.notify_all()

    def told(self) -> list[dict[str, Any]]:
        """Workers of running syncs, message after message; each has those that changed."""
        messages = [data["consumers"] for kind, data in self.messages if kind == "progress"]
        return [consumer for consumers in messages for consumer in consumers]

    def silent_about_workers(self, count: int) -> bool:
        """Whether the last `count` progress messages of a running sync name none."""
        messages = [data for kind, data in self.messages if kind == "progress" and data["epoch"]]
        return len(messages) >= count and not any(data["consumers"] for data in messages[-count:])

    def bytes_done(self) -> dict[str, int]:
        """Of the workers of the running sync, as far as told."""
        return {c["worker"]: c["bytes_done"] for c in self.told()}

    def wait_for(self, message: str, **values: Any) -> Any:
        """The first message of this type with these values."""

        def found() -> list[Any]:
            return [
                data for k, data in self.messages if k == message and all(data[name] == v for name, v in values.items())
            ]

        with self.changed:
            assert self.changed.wait_for(lambda: bool(found()), 20), self.messages
            return found()[0]


def test_events_are_streamed_with_progress_and_none_is_lost_on_the_way(scene: Scene, client: httpx.Client) -> None:
    listener = Listener(client)
    listener.wait_for("progress", epoch=None)
    publishing = hold(scene, "w1")
    opened = listener.wait_for("event", kind="opened", version=scene.version)
    with listener.changed:
        assert listener.changed.wait_for(lambda: listener.bytes_done() == {"w0": 4016, "w1": 0}, 10)
    ray.get(scene.workers["w1"].go_on.remote())
    ray.get(publishing)
    committed = listener.wait_for("event", kind="committed", version=scene.version)
    assert committed["number"] > opened["number"]
    late = Listener(client, last=opened["number"])
    assert late.wait_for("event", kind="committed", version=scene.version) == committed
    assert "event's number, got 'x'" in problem(client.get("/v1/events", headers={"Last-Event-ID": "x"}), 422)


def test_progress_says_how_far_behind_a_worker_is_and_does_not_repeat_it_as_it_ages(
    scene: Scene, client: httpx.Client
) -> None:
    scene.version += 1  # w0 and w1 pull it, and w1 does not install it
    publishing = [trainer.publish.remote(scene.version) for trainer in scene.trainers]
    ray.get([scene.workers["w0"].sync.remote(scene.version), *publishing])
    listener = Listener(client)
    listener.wait_for("progress", epoch=None)
    publishing = hold(scene, "w1")
    with listener.changed:
        assert listener.changed.wait_for(lambda: listener.bytes_done() == {"w0": 4016, "w1": 0}, 10)
        assert listener.changed.wait_for(lambda: listener.silent_about_workers(4), 10), "more behind is no news"
        lags = {c["worker"]: (c["lag_versions"], c["lag_seconds"] > 0) for c in listener.told()}
    assert lags == {"w0": (0, False), "w1": (1, True)}
    ray.get(scene.workers["w1"].go_on.remote())
    ray.get(publishing)
    scene.check_sync(["w0", "w1"])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/versions/1/abort", None, 422),
        ("/v1/versions/1/abort", {}, 422),
        ("/v1/versions/1/abort", {"reason": ""}, 422),
        ("/v1/versions/1/abort", {"reason": "x", "force": True}, 422),
        ("/v1/versions/one/abort", REASON, 422),
        ("/v1/versions/-1/abort", REASON, 422),
        ("/v1/publishing/pause", {"reason": 7}, 422),
        ("/v1/publishing/pause", {"reason": "x" * 501}, 422),
        ("/v1/publishing/pause", {"reason": "x" * 5000}, 413),
        ("/v1/publishing/stop", REASON, 404),
    ],
)
def test_what_is_not_valid_changes_nothing(
    scene: Scene, client: httpx.Client, path: str, body: Any, status: int
) -> None:
    before = client.get("/v1/status").json()["events"]
    assert problem(client.post(path, json=body), status)
    after = client.get("/v1/status").json()
    assert (after["events"], after["paused"]) == (before, None)


def test_a_body_of_unknown_length_or_no_json_is_refused(scene: Scene, client: httpx.Client) -> None:
    assert problem(client.post("/v1/publishing/pause", content=iter([b'{"reason": "x"}'])), 411)
    pickled = b"\x80\x04cposix\nsystem\n."
    assert problem(client.post("/v1/publishing/pause", content=pickled), 422)
    assert problem(client.get("/v1/publishing/pause"), 405)
    assert client.get("/v1/status").json()["paused"] is None
