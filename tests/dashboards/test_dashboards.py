"""Dashboards: checked in as the code makes them; every panel asks for what exists and says what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql_names import kept_labels, known_series, legend_labels, problems, series_in

from weightsync.dashboards import queries
from weightsync.dashboards.queries import PanelQuery, panel_queries
from weightsync.protocol import metric_names as names

BOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in queries.FOLDER.glob("*.json")}
PANELS = [(uid, panel) for uid, board in BOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
QUERIES = list(panel_queries())

each_panel = pytest.mark.parametrize(("uid", "panel"), PANELS, ids=lambda value: getattr(value, "get", str)("title"))
each_query = pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.dashboard}-{query.panel}")


def test_what_is_checked_in_is_what_the_generator_makes() -> None:
    generate = pytest.importorskip("weightsync.dashboards.generate", reason="needs weightsync[dashboards]")
    assert generate.outdated() == [], "run python -m weightsync.dashboards"


def test_the_generator_finds_missing_changed_and_stale_files(tmp_path: Path) -> None:
    generate = pytest.importorskip("weightsync.dashboards.generate", reason="needs weightsync[dashboards]")
    written = [path.name for path in generate.write(tmp_path)]
    assert sorted(written) == sorted(f"{uid}.json" for uid in BOARDS)
    (tmp_path / written[0]).unlink()
    (tmp_path / written[1]).write_text("{}")
    (tmp_path / "old.json").write_text("{}")
    assert generate.outdated(tmp_path) == sorted([written[0], written[1], "old.json"])
    generate.write(tmp_path)
    assert generate.outdated(tmp_path) == []


@pytest.mark.parametrize("uid", BOARDS)
def test_a_dashboard_lives_beside_those_of_others(uid: str) -> None:
    board = BOARDS[uid]
    assert board["uid"] == uid
    assert uid.startswith("weightsync-")
    assert board["tags"] == ["weightsync"]
    assert board["description"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("uid", BOARDS)
def test_a_dashboard_takes_any_data_source_and_any_service(uid: str) -> None:
    variables = {variable["name"]: variable for variable in BOARDS[uid]["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    assert "weightsync_up" in variables["service"]["query"]["query"]
    for name in ("service", "namespace"):
        assert variables[name]["includeAll"]
        assert variables[name]["allValue"] == ".*", "which matches series without the label too"
    used = {key for panel in BOARDS[uid]["panels"] for key in _datasources(panel)}
    assert used == {"${datasource}"}


@each_panel
def test_a_panel_says_what_it_shows_in_which_unit(uid: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    assert defaults.get("unit") or panel["options"]["yAxis"]["unit"]
    assert all(target["legendFormat"] for target in panel["targets"])
    ids = [target["refId"] for target in panel["targets"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_lie_side_by_side_without_overlap(uid: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[uid]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@each_query
def test_a_query_reads_series_and_labels_that_exist(query: PanelQuery) -> None:
    assert problems(query.expr, known_series()) == []


@each_query
def test_a_legend_names_labels_that_the_query_keeps(query: PanelQuery) -> None:
    assert legend_labels(query.legend) <= kept_labels(query.expr)


def test_every_query_filters_by_service_and_namespace() -> None:
    for board in BOARDS.values():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                selectors = target["expr"].count("{")
                assert selectors
                assert target["expr"].count('{namespace=~"$namespace", service=~"$service"') == selectors


def test_tables_join_on_labels_that_every_column_keeps() -> None:
    tables = [panel for _, panel in PANELS if panel["type"] == "table"]
    assert tables
    for panel in tables:
        kept = [kept_labels(target["expr"]) for target in panel["targets"]]
        assert all(labels == kept[0] for labels in kept), panel["title"]


def test_every_metric_is_on_some_dashboard() -> None:
    shown = {name for query in QUERIES for name in series_in(query.expr)}
    for metric in names.ALL:
        samples = {metric.full_name, f"{metric.full_name}_bucket"}
        assert samples & shown, f"no panel shows {metric.full_name}"


def test_a_variable_that_nobody_fills_in_is_an_error(tmp_path: Path) -> None:
    target = {"expr": "weightsync_up{service=~'$servise'}", "legendFormat": "x"}
    board = {"title": "t", "panels": [{"title": "p", "targets": [target]}]}
    (tmp_path / "b.json").write_text(json.dumps(board))
    with pytest.raises(KeyError, match="servise"):
        list(panel_queries(tmp_path))


def test_provisioning_puts_them_into_a_folder_of_their_own() -> None:
    folder = queries.FOLDER.parent / "provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards" / "weightsync.yaml").read_text())["providers"]
    assert (provider["name"], provider["folderUid"], provider["type"]) == ("weightsync", "weightsync", "file")
    assert provider["options"]["path"].endswith(queries.FOLDER.name)
    (source,) = yaml.safe_load((folder / "datasources" / "weightsync.yaml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", False)


def _datasources(panel: dict[str, Any]) -> set[str]:
    sources = [panel.get("datasource"), *(target.get("datasource") for target in panel.get("targets", ()))]
    return {source["uid"] for source in sources if source}
