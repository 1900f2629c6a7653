"""From dashboards as code to the JSON that Grafana reads, and back to where it lies.

The thing to watch: the same code must give the same bytes, because a test compares what is checked in with it. Panels
get their numbers here, in order, since the SDK leaves them out and Grafana would give new ones at each import.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from weightsync.dashboards.data_path import data_path
from weightsync.dashboards.faults import faults
from weightsync.dashboards.fleet import fleet
from weightsync.dashboards.members import members
from weightsync.dashboards.queries import FOLDER
from weightsync.dashboards.sync import sync

DASHBOARDS: tuple[Callable[[], Dashboard], ...] = (fleet, sync, members, data_path, faults)


def generate() -> dict[str, str]:
    """File name -> content of each dashboard."""
    return {f"{board['uid']}.json": _text(board) for board in (_board(make) for make in DASHBOARDS)}


def write(folder: Path = FOLDER) -> list[Path]:
    """Write all dashboards, remove files that are none any more, and return what was written."""
    files = generate()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in set(folder.glob("*.json")) - {folder / name for name in files}:
        stale.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def outdated(folder: Path = FOLDER) -> list[str]:
    """Names of files that are missing, too many, or not what the code makes."""
    files = generate()
    there = {path.name: path.read_text() for path in folder.glob("*.json")}
    return sorted(name for name in files.keys() | there.keys() if files.get(name) != there.get(name))


def _board(make: Callable[[], Dashboard]) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(json.dumps(make().build(), cls=JSONEncoder))
    for number, panel in enumerate(board["panels"], start=1):
        panel["id"] = number
    return board


def _text(board: dict[str, Any]) -> str:
    return json.dumps(board, indent=2, sort_keys=True) + "\n"
