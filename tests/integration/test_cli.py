"""The command line as a user has it: its own processes, its own Ray, and nothing left of them afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner

from tests.shell import Shell
from weightsync.service import ServiceHandle
from weightsync.service.cli import app


def _refuses_connections(url: str) -> bool:
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port or 80)) != 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="live"),
        pytest.param(["--mode", "staged", "--install", "in_place"], id="staged in place", marks=pytest.mark.slow),
        pytest.param(["--transport", "object_store"], id="object store", marks=pytest.mark.slow),
    ],
)
def test_the_demo_verifies_every_version_and_leaves_nothing(shell: Shell, options: list[str]) -> None:
    status, out, err = shell.run("demo", "--size", "tiny", "--versions", "3", "--json", *options)
    assert status == 0, err
    result = json.loads(out)  # nothing but JSON on standard output
    assert [version["version"] for version in result["versions"]] == [1, 2, 3]
    assert result["failures"] == []
    for version in result["versions"]:
        assert version["report"]["bytes"] == version["report"]["needed_bytes"] > 0
        assert version["report"]["installed"] == ["tp0", "tp1"]
    assert "Traceback" not in err
    shell.assert_nothing_left()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("starting", marks=pytest.mark.slow),
        pytest.param("service demo-", marks=pytest.mark.slow),
        "version 2  loss",
    ],
)
def test_ctrl_c_in_the_demo_says_one_line_and_leaves_nothing(shell: Shell, moment: str) -> None:
    process = shell.start("demo", "--size", "tiny", "--versions", "200")
    assert process.stdout is not None
    said, url = "", None
    if moment == "starting":
        shell.await_process("gcs_server")  # Ray is coming up, and has to go down again
    while moment != "starting" and moment not in said:
        line = process.stdout.readline()
        assert line, f"ended before it said {moment!r}: {said}"
        said += line
        url = line.split()[3] if line.startswith("service demo-") else url
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: everything in the foreground gets it
    out, err = process.communicate(timeout=150)
    assert process.returncode == 130, out + err
    assert out.strip().splitlines()[-1] == "Interrupted: everything stopped."
    assert "Traceback" not in out + err
    shell.assert_nothing_left()
    assert url is None or _refuses_connections(url)


@pytest.mark.slow  # `test_bench` compares ways in the default run, on a Ray that runs already
def test_the_bench_compares_ways_and_leaves_nothing(shell: Shell) -> None:
    status, out, err = shell.run(
        *(
            "bench",
            "--sizes",
            "16MB",
            "--producers",
            "1",
            "--rounds",
            "2",
            "--ways",
            "bare,live-in-place,objects",
            "--json",
        )
    )
    assert status == 0, err
    result = json.loads(out)  # nothing but JSON on standard output
    (case,) = result["cases"]
    assert case["failures"] == []
    assert [row["way"] for row in case["rows"]] == ["bare", "live-in-place", "objects"]
    assert all(seconds > 0 for row in case["rows"] for seconds in row["seconds"].values())
    assert all(list(row["seconds"]) == ["0", "1"] for row in case["rows"])
    assert result["machine"]["cores"]
    assert "Traceback" not in err
    shell.assert_nothing_left()


@pytest.mark.slow
def test_ctrl_c_in_the_bench_says_one_line_and_leaves_nothing(shell: Shell) -> None:
    process = shell.start(
        *("bench", "--sizes", "16MB", "--producers", "1", "--consumers", "1", "--rounds", "500", "--ways", "files,live")
    )
    folder = Path("/dev/shm")
    deadline = time.monotonic() + 60
    while not list(folder.glob("weightsync-bench-*/*.safetensors")):  # members are up and moving bytes
        assert time.monotonic() < deadline, "nothing was measured in 60 s"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 130, err
    assert out == ""
    assert err.strip().splitlines()[-1] == "Interrupted: everything stopped."
    assert "Traceback" not in err
    shell.assert_nothing_left()


def test_ctrl_c_ends_watch_with_its_exit_code_and_nothing_else(shell: Shell, service: ServiceHandle) -> None:
    shell.attach()
    shell.environment["FORCE_COLOR"] = "1"  # as in a terminal: otherwise nothing is shown before the end
    service.pause("so that there is an event to show")
    service.resume()
    watching = [shell.start("watch", "--name", service.name, *options) for options in ([], ["--json"])]
    for process in watching:
        assert process.stdout is not None
        assert process.stdout.readline(), "it shows what is"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, out + err
        assert "Traceback" not in out + err
    assert service.status().paused is None, "the service is as it was"


@pytest.mark.slow
def test_up_status_and_down_of_two_services_on_a_ray_of_their_own(shell: Shell) -> None:
    status, out, err = shell.run("up", "--json")
    assert status == 0, err
    first = json.loads(out)
    assert first["transport"] == "nixl"
    assert httpx.get(first["http_url"] + "healthz").json() == {"status": "ok", "service": "default"}

    status, _, err = shell.run("up", "--name", "second")
    assert status == 0, err
    assert "service second is up" in err
    status, out, _ = shell.run("status", "--name", "second", "--json")
    assert status == 0
    assert json.loads(out)["http_url"] == first["http_url"] + "second"
    status, again, _ = shell.run("up", "--json")
    assert status == 0
    assert json.loads(again) == first, "a second `up` attaches"

    status, _, err = shell.run("status", "--name", "third")
    assert status == 1
    assert "no service 'third' on this Ray cluster (running: default, second)" in err.replace("\n", " ")

    assert shell.run("down", "--name", "second")[0] == 0
    assert httpx.get(first["http_url"] + "healthz").status_code == 200, "the other one stays"
    status, out, _ = shell.run("down", "--json")
    assert status == 0
    assert json.loads(out) == {"service": "default", "stopped_ray": True}
    shell.assert_nothing_left()
    status, _, err = shell.run("status")
    assert status == 1
    assert err.strip() == "error: no Ray cluster is running here; start one with `weightsync up --name default`"


def test_a_dead_cluster_that_ray_still_has_a_note_of_is_not_waited_for(shell: Shell) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    noted = Path(shell.environment["RAY_TMPDIR"]) / "ray" / "ray_current_cluster"
    noted.parent.mkdir()
    noted.write_text(f"127.0.0.1:{port}")
    begun = time.monotonic()
    status, _, err = shell.run("status")
    assert status == 1
    assert "no Ray cluster is running here" in err
    assert time.monotonic() - begun < 60, "Ray itself tries for minutes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--mode", "fast"], "'fast'"),
        (["demo", "--install", "maybe"], "'maybe'"),
        (["demo", "--versions", "0"], "--versions"),
        (["demo", "--size", "huge"], "'huge'"),
        (["up", "--transport", "pigeon"], "'pigeon'"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_imported(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["up", "--name", "no/slash"], 1, "no/slash"),
        (["up", "--http-port", "70000"], 2, "http_port"),
    ],
)
def test_wrong_arguments_are_one_line_and_start_nothing(
    shell: Shell, arguments: list[str], status: int, message: str
) -> None:
    found, out, err = shell.run(*arguments)
    assert found == status
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert shell.processes() == []
