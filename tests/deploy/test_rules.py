"""Scrape configuration, recording rules and alerts: valid, tested, documented, and about metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from promql_names import kept_labels, known_series, problems
from rule_files import CONFIG, ROOT, RULE_FILES, TEST_FILES, rule_tests, rules, without_thresholds

ALERTS, RECORDED = rules("alert"), rules("record")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def _promtool(*arguments: str | Path) -> str:
    ran = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@needs_promtool
def test_promtool_accepts_the_configuration() -> None:
    assert f"{len(RULE_FILES)} rule files found" in _promtool("check", "config", CONFIG)


@needs_promtool
@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.name)
def test_promtool_accepts_the_rules(path: Path) -> None:
    count = re.search(r"(\d+) rules found", _promtool("check", "rules", path))
    assert count is not None
    assert int(count[1]) == sum(line.strip().startswith(("- alert:", "- record:")) for line in path.open())


@needs_promtool
@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.name)
def test_the_unit_tests_of_rules_pass(path: Path) -> None:
    assert "SUCCESS" in _promtool("test", "rules", path)


@pytest.mark.parametrize("name", [*ALERTS, *RECORDED])
def test_a_rule_reads_series_and_labels_that_exist(name: str) -> None:
    rule = {**ALERTS, **RECORDED}[name]
    assert problems(rule["expr"], known_series(RECORDED)) == []


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_series_is_named_for_the_labels_it_keeps(name: str) -> None:
    level = set(name.split(":")[0].split("_"))
    read = {part for rule in RECORDED if rule in RECORDED[name]["expr"] for part in rule.split(":")[0].split("_")}
    kept = kept_labels(RECORDED[name]["expr"]) or read | {"namespace"}
    if "histogram_quantile" in RECORDED[name]["expr"]:
        kept -= {"le"}
    assert kept - {"namespace"} == level


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_in_one_unit_test_and_not_in_another(name: str) -> None:
    cases = [case for test in rule_tests() for case in test.get("alert_rule_test", []) if case["alertname"] == name]
    assert any(case["exp_alerts"] for case in cases), "no test sees it fire"
    assert any(not case["exp_alerts"] for case in cases), "no test sees it silent"


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_series_has_a_unit_test(name: str) -> None:
    tested = {case["expr"] for test in rule_tests() for case in test.get("promql_expr_test", []) if case["exp_samples"]}
    assert name in tested


def test_unit_tests_name_alerts_that_exist() -> None:
    tested = {case["alertname"] for test in rule_tests() for case in test.get("alert_rule_test", [])}
    assert tested == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_who_has_it_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    kept = kept_labels(_recorded_replaced(alert)) | set(re.findall(r'label_replace\(.*"(\w+)", "\$1"', _flat(alert)))
    for text in (alert["annotations"]["summary"], alert["annotations"]["description"]):
        assert text.strip().endswith(".")
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept
    if "service" in kept:
        assert "$labels.service" in alert["annotations"]["summary"]
    base, anchor = alert["annotations"]["runbook_url"].split("#")
    assert base == "https://github.com/weightsync/weightsync/blob/main/docs/operations.md"
    assert anchor == name.lower()


@pytest.mark.parametrize("name", ALERTS)
def test_the_operations_guide_has_a_section_for_an_alert(name: str) -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    section = re.search(rf"^## {name}\n(.+?)(?=^#|\Z)", guide, re.MULTILINE | re.DOTALL)
    assert section is not None
    for part in ("Symptom", "Command", "Cause", "Remedy"):
        assert f"- **{part}.**" in section[1]


def test_links_within_the_operations_guide_lead_somewhere() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", guide, re.MULTILINE)}
    links = set(re.findall(r"\]\(#([^)]+)\)", guide))
    assert links
    assert links <= anchors


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        ("weightsync_upp == 0", ["no series weightsync_upp"]),
        ("weightsync_sync_seconds > 1", ["no series weightsync_sync_seconds"]),
        ("rate(weightsync_syncs[5m])", ["no series weightsync_syncs"]),
        ('weightsync_up{worker="w0"}', ["no label worker on weightsync_up"]),
        ("max by (service, worker) (weightsync_up)", ["no label worker to group by"]),
        ("sum by (le) (rate(weightsync_pull_seconds_sum[5m]))", ["no label le to group by"]),
        ("increas(weightsync_syncs_total[5m])", ["no function increas"]),
        ('histogram_quantile(0.5, rate(weightsync_pull_seconds_bucket{le!="x"}[5m])) > 1e3', []),
        ('weightsync_up{service=~"a|weightsync_none"} unless on (service) up{job="x"}', []),
    ],
)
def test_the_check_of_names_finds_what_does_not_exist(expr: str, found: list[str]) -> None:
    assert problems(expr, known_series()) == found


def test_an_alert_without_its_thresholds_keeps_its_matchers() -> None:
    expr = 'max by (a) (x{reason!~"b|c", d=""}) >= 3 and y == 0 unless on (a) z > 1'
    assert without_thresholds(expr) == 'max by (a) (x{reason!~"b|c", d=""}) + 3 and y + 0'


def _flat(alert: dict[str, Any]) -> str:
    return " ".join(alert["expr"].split())


def _recorded_replaced(alert: dict[str, Any]) -> str:
    """An expression that begins with a recorded series keeps the labels which that one's name lists."""
    first = alert["expr"].split()[0]
    if first not in RECORDED:
        return str(alert["expr"])
    return f"by (namespace, {first.split(':')[0].replace('_', ', ')})"
