"""Services on a cluster of its own, from a file and a driver: redeploys, killed ingresses and drivers cost nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from fault_helpers import ingress_processes

from weightsync.service.ports import free_port
from weightsync.service.serving import Application
from weightsync.service.settings import RuntimeSettings, Settings

ROOT = Path(__file__).parents[2]
HELPERS = [ROOT / "tests" / "faults", ROOT / "tests" / "integration"]
CONFIG = ROOT / "deploy" / "serve.yaml"


class Cluster:
    """A Ray head node with a dashboard, in a folder of its own, and commands that run against it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dashboard = free_port()
        self.environment = {**os.environ, "RAY_TMPDIR": str(folder), "TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"}
        self.environment |= {"RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}"}
        self.environment.pop("RAY_ADDRESS", None)
        ports = [f"--dashboard-port={self.dashboard}", "--port=0", f"--dashboard-agent-listen-port={free_port()}"]
        self.head = subprocess.Popen(
            [self._beside("ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2", *ports],
            env=self.environment,
            stdout=(folder / "head.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._await_dashboard()

    def _beside(self, name: str) -> str:
        return str(Path(sys.executable).with_name(name))

    def _await_dashboard(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://127.0.0.1:{self.dashboard}/api/version", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise AssertionError((self.folder / "head.log").read_text())

    def run(self, command: str, *arguments: str) -> str:
        done = subprocess.run(
            [self._beside(command), *arguments], env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ingress_processes(self) -> list[psutil.Process]:
        """Serve's replicas here; other clusters of this machine may have some of the same name."""

        def is_ours(process: psutil.Process) -> bool:
            try:
                return process.environ().get("RAY_TMPDIR") == str(self.folder)
            except psutil.Error:
                return False

        return [process for process in ingress_processes("default") if is_ours(process)]

    def stop(self) -> None:
        parent = psutil.Process(self.head.pid)
        family = [parent, *parent.children(recursive=True)]
        self.head.terminate()
        psutil.wait_procs(family, timeout=20)
        for process in family:
            if process.is_running():
                process.kill()


@pytest.fixture(scope="module")
def cluster_of_its_own() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ws"))  # short: Ray puts socket paths below it
    made = Cluster(folder)
    yield made
    made.stop()
    shutil.rmtree(folder, ignore_errors=True)


class Driver:
    """Trainers and workers in a process of their own, as users have them."""

    def __init__(self, cluster: Cluster) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("redeploy_scene.py"))],
            env={**cluster.environment, "PYTHONPATH": os.pathsep.join(map(str, HELPERS))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = self._answer()

    def tell(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(f"the driver ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


STARTER = """
import sys, time
import weightsync.service as ws
ws.start("default", settings=ws.Settings(http_port=int(sys.argv[1])))
time.sleep(600)
"""


def config(port: int, min_consumers: int = 1) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    read["http_options"]["port"] = port
    read["applications"][0]["deployments"][0]["user_config"]["min_consumers"] = min_consumers
    return read


def deploy(cluster: Cluster, what: dict[str, Any]) -> None:
    path = cluster.folder / "serve.yaml"
    path.write_text(yaml.safe_dump(what))
    cluster.run("serve", "deploy", str(path))


def await_health(url: str, healthy: bool = True) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/healthz", timeout=5).is_success == healthy:
                return
        except httpx.HTTPError:
            if not healthy:
                return
        time.sleep(0.2)
    raise AssertionError(f"{url} did not become {'healthy' if healthy else 'unhealthy'}")


def test_the_file_is_valid_and_names_what_exists() -> None:
    from ray.serve.schema import ServeDeploySchema

    read = config(8000)
    ServeDeploySchema.model_validate(read)
    application = Application(**read["applications"][0]["args"])
    Settings(**application.settings)
    RuntimeSettings(**read["applications"][0]["deployments"][0]["user_config"])


def test_a_redeploy_or_a_killed_ingress_in_a_running_sync_costs_nothing(cluster_of_its_own: Cluster) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    deploy(cluster_of_its_own, config(port))
    await_health(url)
    driver = Driver(cluster_of_its_own)
    try:
        first = driver.tell("sync")
        assert first["installed"] == ["w0", "w1"]
        registry = httpx.get(f"{url}/v1/status").json()["registry_pid"]

        held = driver.tell("hold")["held"]
        deploy(cluster_of_its_own, config(port, min_consumers=2))
        await_health(url)
        assert httpx.get(f"{url}/v1/status").json()["epoch"]["version"] == held
        assert driver.tell("go") == {"version": held, "installed": ["w0", "w1"]}

        held = driver.tell("hold")["held"]
        replicas = cluster_of_its_own.ingress_processes()
        assert len(replicas) == 2
        for replica in replicas:
            replica.kill()
        assert driver.tell("go") == {"version": held, "installed": ["w0", "w1"]}
        await_health(url)
        status = httpx.get(f"{url}/v1/status").json()
        assert status["registry_pid"] == registry, "the same registry through it all"
        assert [c["version"] for c in status["consumers"]] == [held, held]
        metrics = httpx.get(f"{url}/metrics").text
        assert f'weightsync_newest_version{{service="default"}} {held}.0' in metrics
    finally:
        driver.close()
    assert "default" in json.loads(cluster_of_its_own.run("weightsync", "down", "--json"))["service"]
    await_health(url, healthy=False)


def test_the_driver_that_started_a_service_may_be_killed_in_a_running_sync(cluster_of_its_own: Cluster) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(port)], env=cluster_of_its_own.environment)
    driver = None
    try:
        await_health(url)
        driver = Driver(cluster_of_its_own)
        registry = httpx.get(f"{url}/v1/status").json()["registry_pid"]
        held = driver.tell("hold")["held"]
        starter.kill()
        starter.wait()
        assert json.loads(cluster_of_its_own.run("weightsync", "status", "--json"))["epoch"]["version"] == held
        assert f"Version {held} on its way" in httpx.get(f"{url}/").text
        assert 'weightsync_sync_running{service="default"} 1.0' in httpx.get(f"{url}/metrics").text
        assert driver.tell("go") == {"version": held, "installed": ["w0", "w1"]}
        assert driver.tell("sync") == {"version": held + 1, "installed": ["w0", "w1"]}
        status = httpx.get(f"{url}/v1/status").json()
        assert status["registry_pid"] == registry, "the same registry through it all"
        assert [c["version"] for c in status["consumers"]] == [held + 1, held + 1]
        assert f'weightsync_newest_version{{service="default"}} {held + 1}.0' in httpx.get(f"{url}/metrics").text
        assert f"All workers are on version {held + 1}" in httpx.get(f"{url}/").text
    finally:
        starter.kill()
        starter.wait()
        if driver is not None:
            driver.close()
    cluster_of_its_own.run("weightsync", "down")
