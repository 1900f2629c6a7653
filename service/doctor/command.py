"""`weightsync doctor`: from options to an examination, to what is printed and the exit code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import ray
from rich.console import Console

from weightsync.protocol.errors import WeightsyncError
from weightsync.service.doctor.examine import examine
from weightsync.service.doctor.facts import first_line
from weightsync.service.doctor.view import render
from weightsync.service.interrupts import Interrupts


def doctor_command(*, address: str | None, measure: bool, json_output: bool) -> int:
    """Run the command; returns the process exit code (0 no problem, 1 a problem, 130 interrupted).

    Raises:
        ConnectionError: nothing answers at `address`.
    """
    interrupts, console = Interrupts(), Console(stderr=True, highlight=False)
    try:
        with interrupts.raised(), _stdout_as_stderr(), console.status("") as spinner:
            report = examine(address, measure=measure, interrupts=interrupts, say=spinner.update)
    except (KeyboardInterrupt, WeightsyncError, ConnectionError, ray.exceptions.RayError) as error:
        if interrupts.caused(error):
            console.print("Interrupted: everything stopped.")
            return 130
        if not isinstance(error, ray.exceptions.RayError):
            raise
        console.print(f"[red]error:[/] the cluster went away meanwhile: {first_line(error)}", soft_wrap=True)
        return 1
    if json_output:
        sys.stdout.write(report.model_dump_json(indent=2) + "\n")
    else:
        Console(highlight=False).print(render(report))
    return 0 if report.ok else 1


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Whatever is printed inside goes to standard error, from C too: UCX and NIXL log to standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
