"""Commands for whoever runs a service: settings, watch, members, versions, evict, abort, pause, resume."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from weightsync.service.terminal import Address, Json, Name, err, print_json, warn_of_variables

Reason = Annotated[str, typer.Option("--reason", "-r", help="said to everybody it concerns")]
_BY_HAND = "by hand, from the command line"


def watch(name: Name = "default", address: Address = None, json_output: Json = False) -> None:
    """Follow a service live: progress of each worker, and what happens. Ends with Ctrl-C.

    With --json, one line per event.
    """
    from weightsync.service.api import connect
    from weightsync.service.watch_view import follow, follow_json

    handle = connect(name, address)
    (follow_json if json_output else follow)(handle)


def members(name: Name = "default", address: Address = None, json_output: Json = False) -> None:
    """List trainer ranks and inference workers, with what each holds and how far it is behind."""
    from weightsync.service.api import connect
    from weightsync.service.status_view import render_members

    status = connect(name, address).status()
    if json_output:
        rows: list[Any] = [*status.producers, *status.consumers]
        print_json([row.model_dump(mode="json") for row in rows])
    else:
        Console().print(render_members(status))


def versions(
    version: Annotated[int | None, typer.Argument(help="only this one, with what each worker measured")] = None,
    name: Name = "default",
    address: Address = None,
    json_output: Json = False,
) -> None:
    """List the last versions with seconds per phase, newest first; or the attempts to sync one."""
    from weightsync.service.api import connect
    from weightsync.service.status_view import render_versions

    handle = connect(name, address)
    records = handle.versions() if version is None else handle.version(version)
    if json_output:
        print_json([record.model_dump(mode="json") for record in records])
    elif records:
        Console().print(render_versions(records, workers=version is not None))
    else:
        err.print("no version was synced yet" if version is None else f"no attempt at version {version} is remembered")
    if version is not None and not records:
        raise typer.Exit(1)


def evict(
    worker: Annotated[str, typer.Argument(help="its name, as `members` lists it")],
    reason: Reason = _BY_HAND,
    name: Name = "default",
    address: Address = None,
    json_output: Json = False,
) -> None:
    """Take a worker out of the running sync; the others finish, and it takes part in the next one."""
    from weightsync.service.api import connect

    connect(name, address).evict(worker, reason)
    _say({"service": name, "evicted": worker}, f"worker {worker} was taken out of the running sync", json_output)


def abort(
    version: Annotated[int, typer.Argument(help="the running one, as `status` shows it")],
    reason: Reason = _BY_HAND,
    name: Name = "default",
    address: Address = None,
    json_output: Json = False,
) -> None:
    """Give a running sync up: every rank's `publish` raises, workers keep what they had."""
    from weightsync.service.api import connect

    connect(name, address).abort(version, reason)
    _say({"service": name, "aborted": version}, f"version {version} was given up", json_output)


def pause(
    reason: Reason = _BY_HAND, name: Name = "default", address: Address = None, json_output: Json = False
) -> None:
    """Open no more versions until `resume`; trainer ranks wait in `publish`."""
    from weightsync.service.api import connect

    connect(name, address).pause(reason)
    _say({"service": name, "paused": reason}, "publishing is paused; `weightsync resume` ends it", json_output)


def resume(name: Name = "default", address: Address = None, json_output: Json = False) -> None:
    """Open versions again after `pause`."""
    from weightsync.service.api import connect

    connect(name, address).resume()
    _say({"service": name, "paused": None}, "publishing goes on", json_output)


def settings(json_output: Json = False) -> None:
    """List the settings of a service: name, what it is now here, and what it means. Checks environment and file."""
    from weightsync.service.settings import Settings
    from weightsync.service.settings_view import describe, render_settings

    warn_of_variables()
    rows = describe(Settings())
    if json_output:
        print_json(rows)
    else:
        Console().print(render_settings(rows))


COMMANDS = (settings, watch, members, versions, evict, abort, pause, resume)


def _say(done: dict[str, Any], text: str, json_output: bool) -> None:
    if json_output:
        print_json(done)
    else:
        err.print(text, markup=False)
