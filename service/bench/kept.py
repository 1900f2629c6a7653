"""Cases that were measured already, so that a long run which was interrupted goes on where it was."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from pydantic import ValidationError

from weightsync.service.bench.cases import Case
from weightsync.service.bench.results import CaseResult

KEPT_FOR_S = 12 * 3600.0
"""Older figures belong to another state of machine and code."""


class Kept:
    """A file with a line of JSON per case.

    Args:
        path: made at the first case; None keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._results: list[CaseResult] = []
        if path is not None and path.exists() and time.time() - path.stat().st_mtime < KEPT_FOR_S:
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValidationError):  # cut off, or of another version of this program
                    self._results.append(CaseResult.model_validate_json(line))

    def find(self, case: Case) -> CaseResult | None:
        """What was measured of exactly this case, if nothing failed."""
        return next((result for result in self._results if result.case == case and not result.failures), None)

    def add(self, result: CaseResult) -> CaseResult:
        """Note a result; returns it."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(result.model_dump_json() + "\n")
        return result

    def forget(self) -> None:
        """The run is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
