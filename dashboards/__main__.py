"""`python -m weightsync.dashboards` writes all dashboards; with `--check` it only says which are out of date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from weightsync.dashboards.queries import FOLDER


def main() -> int:
    """Returns 0 if everything is written, or up to date."""
    parser = argparse.ArgumentParser(prog="python -m weightsync.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the JSON files lie")
    arguments = parser.parse_args()
    try:
        from weightsync.dashboards.generate import outdated, write
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("grafana_foundation_sdk"):
            raise
        print("the generator needs its SDK: pip install 'weightsync[dashboards]'", file=sys.stderr)
        return 2
    if not arguments.check:
        for path in write(arguments.folder):
            print(path)
        return 0
    stale = outdated(arguments.folder)
    for name in stale:
        print(f"{name} is not what the code makes; run python -m weightsync.dashboards", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
