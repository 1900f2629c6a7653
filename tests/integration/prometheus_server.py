"""A real Prometheus that scrapes services under test, configured by what `deploy/prometheus` ships.

A test cannot wait for scrapes every 15 s, so time runs `FASTER` times as fast: scrapes, evaluations, and the `for` of
alerts, which so waits for as many scrapes as it does in earnest. Besides that, targets differ from the shipped files,
and where a token is given, the lines about it that are commented out there are not. Thresholds, ranges and everything
else are as shipped.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from weightsync.service.ports import free_port

FASTER = 15
INTERVAL = "1s"
"""15 s in earnest."""

_TOKEN_LINES = re.compile(r"^( *)# authorization:\n\1#   type: (.*)\n\1#   credentials_file: .*$", flags=re.MULTILINE)
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class PrometheusServer:
    """Runs until `stop`. `services` are pairs of a service's name and its URL; all are asked with `token`, if given.

    Raises:
        RuntimeError: it ended by itself, or is not ready within 30 s; with what it printed.
    """

    def __init__(
        self, shipped: Path, services: Sequence[tuple[str, str]], folder: Path, token: str | None = None
    ) -> None:
        self._log = folder / "prometheus.log"
        port = free_port("127.0.0.1")
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        config = folder / "prometheus.yml"
        read = yaml.safe_load(_with_token(shipped.read_text(), folder, token))
        config.write_text(yaml.safe_dump(_with_targets(read, shipped.parent, services, folder)))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self._client.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"Prometheus does not run:\n{self._log.read_text()[-4000:]}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant query now that have a number; NaN counts as none."""
        found = self._get("/api/v1/query", query=expr)["result"]
        return [series for series in found if not math.isnan(float(series["value"][1]))]

    def label_values(self, label: str, selector: str) -> list[str]:
        values: list[str] = self._get(f"/api/v1/label/{label}/values", **{"match[]": selector})
        return values

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def alert_states(self, name: str, **labels: str) -> set[str]:
        """`pending`, `firing`, for those alerts of this name that have these labels."""
        return {
            alert["state"]
            for alert in self._get("/api/v1/alerts")["alerts"]
            if alert["labels"]["alertname"] == name and labels.items() <= alert["labels"].items()
        }

    def healthy_members(self, service: str) -> set[str]:
        """`weightsync_member` of the service's targets that answer."""
        targets = self._get("/api/v1/targets", state="active")["activeTargets"]
        ours = [target for target in targets if target["labels"].get("weightsync_service") == service]
        return {target["labels"]["weightsync_member"] for target in ours if target["health"] == "up"}

    def _get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(path, params=parameters)
        body = json.loads(answer.text)
        assert body["status"] == "success", f"{path} {parameters}: {body}"
        return body["data"]


def _with_token(shipped: str, folder: Path, token: str | None) -> str:
    """What an operator does who is asked for one: a file, and the lines that name it."""
    if token is None:
        return shipped
    path = folder / "token"
    path.write_text(token)
    text, count = _TOKEN_LINES.subn(
        lambda found: f"{found[1]}authorization: {{type: {found[2]}, credentials_file: {path}}}", shipped
    )
    assert count == 3, "for discovery, for what it finds, and for the ingress"
    return text


def _with_targets(
    config: dict[str, Any], rules: Path, services: Sequence[tuple[str, str]], folder: Path
) -> dict[str, Any]:
    config["global"] = dict.fromkeys(config["global"], INTERVAL)
    config["rule_files"] = [_faster(rules / name, folder) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        for kind, example in (("http_sd_configs", _discovered), ("static_configs", _static)):
            if kind in job:
                (shape,) = job[kind]
                job[kind] = [example(shape, name, url) for name, url in services]
    return config


def _discovered(shape: dict[str, Any], name: str, url: str) -> dict[str, Any]:
    return {**shape, "url": f"{url.rstrip('/')}{urlsplit(shape['url']).path}", "refresh_interval": INTERVAL}


def _static(shape: dict[str, Any], name: str, url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    path = parts.path.rstrip("/") + shape["labels"]["__metrics_path__"]
    labels = {**shape["labels"], "__metrics_path__": path, "weightsync_service": name}
    return {**shape, "targets": [parts.netloc], "labels": labels}


def _faster(rules: Path, folder: Path) -> str:
    """A copy of a rule file all of whose groups are evaluated at the global interval, and whose alerts wait less."""
    content = yaml.safe_load(rules.read_text())
    for group in content["groups"]:
        group.pop("interval", None)
        for rule in group["rules"]:
            if "for" in rule:
                shipped_s = int(rule["for"][:-1]) * _SECONDS[rule["for"][-1]]
                rule["for"] = f"{math.ceil(shipped_s / FASTER)}s"
    copy = folder / rules.name
    copy.write_text(yaml.safe_dump(content))
    return str(copy)


def still_empty(prometheus: PrometheusServer, exprs: Iterable[str]) -> list[str]:
    """Those expressions that have no number now."""
    return [expr for expr in exprs if not prometheus.query(expr)]
