"""Documents that are made from code are as the code is now."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TABLES = runpy.run_path(str(DOCS / "tables.py"))["tables"]()


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_table_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == TABLES[name], "run `python docs/tables.py`"


def test_every_metric_and_setting_is_explained() -> None:
    assert TABLES["metrics.md"].count("\n| `weightsync_") > 40
    assert "| None |" not in TABLES["settings.md"]
