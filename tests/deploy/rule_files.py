"""The rule files of `deploy/prometheus` and their unit tests, as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
CONFIG = FOLDER / "prometheus.yml"
RULE_FILES = tuple(FOLDER / name for name in yaml.safe_load(CONFIG.read_text())["rule_files"])
TEST_FILES = tuple(sorted((FOLDER / "tests").glob("*.yml")))

_OPERATOR = re.compile(r"==|!=|>=|<=|>|<")
_PROTECTED = re.compile(r'(\{[^}]*\}|"(?:[^"\\]|\\.)*")')


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """Name -> rule, of all that are of this kind: `alert` or `record`."""
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule[kind]: rule for group in groups for rule in group["rules"] if kind in rule}


def rule_tests() -> Iterator[dict[str, Any]]:
    """All cases of all unit tests of rules."""
    for path in TEST_FILES:
        yield from yaml.safe_load(path.read_text())["tests"]


def without_thresholds(expr: str) -> str:
    """What an alert looks at: its expression with every comparison made a sum, and without what silences it.

    A sum has a result wherever both sides have series, whatever their values.
    """
    parts = _PROTECTED.split(expr.split(" unless ")[0].split("\nunless ")[0])
    return "".join(part if part.startswith(("{", '"')) else _OPERATOR.sub("+", part) for part in parts)
