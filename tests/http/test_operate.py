"""The operators' commands, against a service with real syncs; what `watch` shows; the typed settings."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import ray
from fault_helpers import Scene
from pydantic import ValidationError
from rich.console import Console
from typer.testing import CliRunner, Result

from weightsync.protocol.errors import NothingRunningError, UnknownMemberError
from weightsync.service import Settings
from weightsync.service.cli import app
from weightsync.service.settings import FILE_VARIABLE, RuntimeSettings
from weightsync.service.watch_view import view


@pytest.fixture
def run(scene: Scene) -> Any:
    def run(*arguments: str) -> Result:
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, "--name", scene.service.name])

    return run


def test_members_and_versions_are_listed_for_people_and_scripts(scene: Scene, run: Any) -> None:
    report = scene.check_sync(["w0", "w1"])
    rows = json.loads(run("members", "--json").stdout)
    assert [row.get("rank", row.get("worker")) for row in rows[:2]] == [0, 1]
    assert {row["worker"] for row in rows[2:]} == {"w0", "w1"}
    shown = run("members").stdout
    assert all(member in shown for member in ("trainer rank 0/2", "worker w0", "worker w1"))
    newest = json.loads(run("versions", "--json").stdout)[0]
    assert (newest["version"], newest["state"]) == (scene.version, "committed")
    (record,) = json.loads(run("versions", str(scene.version), "--json").stdout)
    assert record["report"]["workers"]["w1"]["bytes_wire"] == report.workers["w1"].bytes_wire
    assert "on 2 workers" in run("versions").stdout
    nothing = run("versions", "99999")
    assert nothing.exit_code == 1
    assert "no attempt at version 99999" in nothing.stderr


def test_a_running_sync_is_watched_left_and_given_up(scene: Scene, run: Any) -> None:
    ray.get([w.hold_at.remote("pulling") for w in scene.workers.values()])
    publishing = scene.publish()
    assert all(ray.get([w.reached.remote() for w in scene.workers.values()]))
    console = Console(file=io.StringIO(), width=200)
    news = scene.service.news(0, 0.0)
    console.print(view(scene.service.status(), news, news.events))
    frame = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"syncing version {scene.version}" in frame
    assert "0 B of 4.0 kB" in frame
    assert f"version {scene.version}: 2 workers begin to pull from 2 trainer ranks" in frame
    assert json.loads(run("evict", "w1", "--reason", "try", "--json").stdout)["evicted"] == "w1"
    assert run("abort", str(scene.version), "-r", "enough").exit_code == 0
    for publish in publishing:
        with pytest.raises(ray.exceptions.RayTaskError, match="an operator asked for it: enough"):
            ray.get(publish)
    ray.get([w.go_on.remote() for w in scene.workers.values()])
    scene.check_sync(["w0", "w1"])


def test_what_cannot_be_done_says_so(scene: Scene, run: Any) -> None:
    for arguments, error in (
        (("abort", "77777"), NothingRunningError),
        (("evict", "w0"), NothingRunningError),
        (("evict", "nobody"), UnknownMemberError),
    ):
        assert isinstance(run(*arguments).exception, error)


def test_pause_is_in_the_status_until_resumed(scene: Scene, run: Any) -> None:
    assert json.loads(run("pause", "-r", "new nodes", "--json").stdout)["paused"] == "new nodes"
    assert "publishing is paused: new nodes" in run("status").stdout
    assert run("resume").exit_code == 0
    assert "paused" not in run("status").stdout
    scene.check_sync(["w0", "w1"])


def test_settings_come_from_arguments_environment_file_and_defaults_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weightsync.yaml"
    path.write_text("lease_s: 3\nstall_timeout_s: 30\nmin_consumers: 4\n")
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    monkeypatch.setenv("WEIGHTSYNC_STALL_TIMEOUT_S", "40")
    read = Settings(min_consumers=5)
    assert (read.min_consumers, read.stall_timeout_s, read.lease_s, read.join_grace_s) == (5, 40, 3, 30)
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["settings", "--json"]).stdout)}
    assert (rows["lease_s"]["value"], rows["lease_s"]["default"]) == (3.0, 10.0)
    assert rows["lease_s"]["variable"] == "WEIGHTSYNC_LEASE_S"
    path.write_text("leese_s: 3\n")
    with pytest.raises(ValidationError, match="leese_s"):
        Settings()
    path.write_text("lease_s: -3\n")
    with pytest.raises(ValidationError, match="lease_s"):
        Settings()
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "missing.yaml"))
    with pytest.raises(ValueError, match=r"missing\.yaml', which is no file"):
        Settings()


def test_only_what_the_registry_alone_reads_may_change_while_members_run(scene: Scene) -> None:
    assert set(RuntimeSettings.model_fields) <= set(Settings.model_fields)
    with pytest.raises(ValidationError, match="transport"):
        RuntimeSettings(transport="rdt")
    ray.get(scene.service.registry.reconfigure.remote({"min_consumers": 3}))
    publishing = [t.publish.remote(scene.version + 1, 1.0) for t in scene.trainers]
    with pytest.raises(ray.exceptions.RayTaskError, match="3 inference worker"):
        ray.get(publishing)
    ray.get(scene.service.registry.reconfigure.remote({"min_consumers": 1}))
    scene.check_sync(["w0", "w1"])
