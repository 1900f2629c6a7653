"""The status page of a real service in a browser: what its syncs do shows by itself.

`test_page_browser` asks the page for everything else, in front of a scripted server.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import ray
from devtools import Page
from fault_helpers import Scene, kill

HEADLINE = "document.getElementById('headline').dataset.state"
NEWEST = "document.querySelector('#summary dd b').textContent"
RELOADS_WITHIN_S = 20.0
"""Without scripts it is asked for again every 5 s."""

_WATCH = """{
  window.seen = {whole: [], w1: []};
  const watch = (name, bar) => { if (bar && seen[name].at(-1) !== bar.value) seen[name].push(bar.value); };
  setInterval(() => {
    watch("whole", document.getElementById("sync-progress"));
    watch("w1", document.querySelector("#sync li[data-worker=w1] progress"));
  }, 20);
  null;
}"""
"""Notes each value that the bars of a sync show. All of it is gone if the document is another one."""


@pytest.fixture
def scene(shared_scene: Scene) -> Scene:
    shared_scene.set_workers(2)
    return shared_scene


def address(scene: Scene) -> str:
    return f"{scene.service.status().http_url}/"


def hold_w1(scene: Scene) -> list[object]:
    """Begin a sync in which w1 stands still; returns what ranks wait for."""
    ray.get(scene.workers["w1"].hold_at.remote("pulling"))
    publishing = scene.publish()
    assert ray.get(scene.workers["w1"].reached.remote())
    return publishing


def faults(page: Page) -> list[str]:
    found: list[str] = page.value("[...document.querySelectorAll('#faults li')].map((fault) => fault.textContent)")
    return found


def test_progress_a_death_and_new_versions_show_without_a_reload(scene: Scene, tab: Callable[..., Page]) -> None:
    page = tab()
    page.open(address(scene))
    page.wait("document.getElementById('connection').textContent", "live")
    page.wait(NEWEST, str(scene.version))
    page.value(_WATCH)

    ray.get(scene.workers["w1"].slow_down.remote(0.4))
    publishing = scene.publish()
    page.wait(HEADLINE, "syncing")
    assert page.text("#sync-title") == f"Version {scene.version} on its way"
    report, _ = ray.get(publishing)[0]
    assert report.installed == ["w0", "w1"]
    page.wait(NEWEST, str(scene.version))
    page.wait(HEADLINE, "current")
    seen = page.value("window.seen")
    for name, least, most in (("whole", 0.5, 1), ("w1", 0, report.bytes / 2)):
        moving = [value for value in seen[name] if least < value < most]
        assert seen[name] == sorted(seen[name]), "it never goes back"
        assert len(moving) >= 3, f"{name} was seen to move: {seen}"

    publishing = hold_w1(scene)
    page.wait("document.querySelector('#sync li[data-worker=w0] .waits')?.textContent", "done")
    kill(scene.pid("w1"))
    report, _ = ray.get(publishing)[0]
    assert report.evicted == ["w1"]
    page.wait(NEWEST, str(scene.version))
    page.wait("document.querySelector('#workers [data-worker=w1]')", None)
    evicted = [fault for fault in faults(page) if f"worker w1 was taken out of version {scene.version}" in fault]
    assert len(evicted) == 1
    assert "evicted: died" in evicted[0]
    assert page.text("#sync") is None
    assert page.value("window.seen !== undefined"), "the same document as in the beginning"
    assert page.complaints() == []


def test_without_scripts_the_page_shows_the_same(scene: Scene, tab: Callable[..., Page]) -> None:
    publishing = hold_w1(scene)
    page = tab(scripts=False)
    page.open(address(scene))
    html = page.html()
    assert f"Version {scene.version} on its way" in html
    assert "0 B of 4.0 kB" in html
    assert html.count('data-worker="w1"') == 2
    ray.get(scene.workers["w1"].go_on.remote())
    ray.get(publishing)
    deadline = time.monotonic() + RELOADS_WITHIN_S
    while f"<b>{scene.version}</b>" not in (html := page.html()):
        assert time.monotonic() < deadline, html
        time.sleep(0.2)
    assert "on its way" not in html
    assert page.complaints() == []
