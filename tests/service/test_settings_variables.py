"""A variable that means nothing is named, with the one that was meant; other programs' are left alone."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from weightsync.service.cli import app
from weightsync.service.settings_variables import known_variables, warnings


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("WEIGHTSYNC_STALL_TIMEOUT", "did you mean WEIGHTSYNC_STALL_TIMEOUT_S?"),
        ("WEIGHTSYNC_HTP_PORT", "did you mean WEIGHTSYNC_HTTP_PORT?"),
        ("weightsync_lease", "did you mean WEIGHTSYNC_LEASE_S?"),
        ("WEIGHTSYNC_SETTING_FILE", "did you mean WEIGHTSYNC_SETTINGS_FILE?"),
        ("WEIGHTSYNC_COLOUR_OF_THE_SKY", "`weightsync settings` lists those that have"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest_known_one(variable: str, meant: str) -> None:
    assert list(warnings({variable: "1", "PATH": "/bin"})) == [f"{variable} is set and has no effect; {meant}"]


def test_known_ones_in_any_case_and_those_of_other_programs_are_left_alone() -> None:
    kubernetes = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    engines = [f"WEIGHTSYNC_{name}" for name in ("SERVICE", "ENGINE", "IN_FLIGHT", "INSTALL")]  # of docs/vllm.md
    known = [*known_variables(), *engines, "weightsync_lease_s", *(f"WEIGHTSYNC_{name}" for name in kubernetes)]
    assert list(warnings(dict.fromkeys(known, "1"))) == []
    assert list(warnings({"WEIGHTSYNC_PORT": "1"})) != [], "with no such service it is a mistake"


@pytest.mark.parametrize("command", [["settings", "--json"], ["up", "--http-port", "70000"]])
def test_commands_that_read_settings_warn_and_go_on(command: list[str]) -> None:
    """`up` is stopped by the next mistake, before it starts anything."""
    result = CliRunner(env={"WEIGHTSYNC_LEASE": "3", "COLUMNS": "200"}).invoke(app, command)
    assert "warning: WEIGHTSYNC_LEASE is set and has no effect; did you mean WEIGHTSYNC_LEASE_S?" in result.stderr
    assert "WEIGHTSYNC_LEASE is" not in result.stdout
    assert (result.exit_code == 0) == (command[0] == "settings")
