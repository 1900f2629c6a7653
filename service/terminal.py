"""What the commands share: where they print, and the options that mean the same in each."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

Name = Annotated[str, typer.Option("--name", "-n", help="service name")]
Address = Annotated[str | None, typer.Option("--address", help="Ray address; default: the running cluster")]
Json = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]

err = Console(stderr=True, highlight=False)
"""For people: standard output is for what was asked for."""


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def warn_of_variables() -> None:
    """Name what is set in the environment and has no effect; for commands that read settings."""
    from weightsync.service.settings_variables import warnings

    for warning in warnings(os.environ):
        err.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
