"""`weightsync doctor` as a user runs it: real reads, real services, and nothing left of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.shell import Shell
from weightsync.service import ServiceHandle

NODE_CHECKS = {
    *("nixl", "ucx", "rdma", "memlock", "ptrace", "shared-memory", "torch", "allocator", "registration-cache"),
    *("open-files", "token-auth"),
}


def _examined(shell: Shell, *arguments: str) -> dict[str, Any]:
    status, out, err = shell.run("doctor", "--json", *arguments)
    report: dict[str, Any] = json.loads(out)  # nothing but JSON on standard output
    assert "Traceback" not in err
    assert status == (0 if report["ok"] else 1)
    return report


def test_without_a_cluster_this_machine_is_measured_and_nothing_is_left(shell: Shell) -> None:
    report = _examined(shell)
    assert report["address"] is None
    (node,) = report["nodes"]
    assert {check["id"] for check in node["checks"]} == NODE_CHECKS
    assert all(check["status"] in ("ok", "warning", "problem", "skipped") for check in node["checks"])
    assert all(bool(check["remedy"]) == (check["status"] in ("warning", "problem")) for check in node["checks"])
    assert node["facts"]["nixl"]["backends"] == ["UCX"]
    assert node["facts"]["nixl"]["ucx_domains"]["tcp"]
    (pair,) = report["pairs"]
    measured = pair["measured"]
    assert measured["source"] == measured["target"] == node["node_id"]
    assert measured["error"] is None
    assert measured["bytes_per_s"] > 1e7
    assert 0 < measured["descriptor_s"] < 0.1
    assert measured["carrier"] in ("cma", "shared memory", "tcp")
    assert f"over {measured['carrier']}" in pair["verdict"]
    shell.assert_nothing_left()


def test_without_measuring_no_process_is_started(shell: Shell) -> None:
    report = _examined(shell, "--no-measure")
    assert report["pairs"] == []
    assert {check["id"]: check["status"] for check in report["checks"]}["pairs"] == "skipped"
    assert {check["id"] for check in report["nodes"][0]["checks"]} == NODE_CHECKS
    shell.assert_nothing_left()


def test_an_address_where_nothing_answers_is_one_line_at_once(shell: Shell) -> None:
    begun = time.monotonic()
    status, out, err = shell.run("doctor", "--json", "--address", "127.0.0.1:1")
    assert (status, out) == (1, "")
    assert err.strip() == "error: nothing answers at 127.0.0.1:1; is Ray running there?"
    assert time.monotonic() - begun < 60, "Ray itself tries for minutes"


def test_services_of_the_running_cluster_are_asked_and_stay(
    shell: Shell, make_service: Callable[..., ServiceHandle]
) -> None:
    shell.attach()
    well, ill = make_service(), make_service()
    stopped = ill.status().registry_pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        report = _examined(shell, "--no-measure")
    finally:
        os.kill(stopped, signal.SIGCONT)
    found = {check["id"]: check["status"] for check in report["services"]}
    assert found[f"service:{well.name}"] == "ok"
    assert found[f"service:{ill.name}"] == "problem"
    assert not report["ok"]
    assert report["address"]
    assert len(report["nodes"]) == 1
    assert report["nodes"][0]["clock"]["uncertainty_s"] < 2
    assert ill.status().registry_pid == stopped, "the service goes on"
    assert shell.processes() == []


@pytest.mark.slow
def test_ctrl_c_says_one_line_and_leaves_nothing(shell: Shell) -> None:
    process = shell.start("doctor")
    shell.await_process("raylet")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert out == ""
    assert err.strip().splitlines()[-1] == "Interrupted: everything stopped."
    assert "Traceback" not in err
    shell.assert_nothing_left()
