"""The status page in a browser: complete without a script, live with it, and readable on a phone.

The service behind it is scripted. What is asked of the page needs its address and nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))
import page_scenes as scene
from devtools import Page
from scripted_service import ScriptedService

from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import ConsumerState
from weightsync.protocol.status import EventKind, ServiceStatus
from weightsync.service.page import render_page

HOSTILE = """<img src=x onerror="document.title='hit'">'"& \\ w0"""
LONG_WORD = "w" * 300
LONG_ERROR = "trainer rank 0 waits for free signals\n" + "group 3 by worker w1; " * 40

Serve = Callable[..., ScriptedService]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts scripted services; all end with the test."""
    with ExitStack() as stack:

        def start(status: ServiceStatus | None, **options: Any) -> ScriptedService:
            return stack.enter_context(ScriptedService(status, **options).running())

        yield start


def live(page: Page, service: ScriptedService) -> None:
    """Open the service's page, and wait until it has its news and has asked again for what it may have missed."""
    page.open(service.url)
    page.wait("document.getElementById('connection').textContent", "live")
    deadline = time.monotonic() + 10
    while service.pages_served < 2:
        assert time.monotonic() < deadline, "the page was not asked for again"
        pause(page, 0.05)
    pause(page, 0.2)  # until it is in its place


def pause(page: Page, seconds: float) -> None:
    page.value(f"new Promise((done) => setTimeout(done, {1000 * seconds}))")


def overflow(page: Page) -> int:
    """CSS pixels that the document is wider than the window."""
    found: int = page.value("document.documentElement.scrollWidth - window.innerWidth")
    return found


def crowded() -> ServiceStatus:
    """A sync that stands still, with names and errors that are long."""
    status = scene.syncing(quiet_seconds=70, waiting_for=["worker w0", f"worker {LONG_WORD}", "trainer rank 0"])
    long = scene.consumer(
        8, worker=LONG_WORD, state=ConsumerState.PULLING, bytes_done=0, waits_for="reads from trainer rank 0 " * 8
    )
    failed = scene.consumer(9, state=ConsumerState.FAILED, error=LONG_ERROR, lag_versions=3, lag_seconds=999)
    return status.model_copy(
        update={
            "consumers": [*status.consumers, long, failed],
            "transport_reason": "x" * 200,
            "world_size": 3,
        }
    )


def test_without_scripts_the_page_is_complete_and_reloads_itself(serve: Serve, tab: Callable[..., Page]) -> None:
    service = serve(scene.syncing())
    service.now = scene.NOW
    page = tab(scripts=False)
    page.open(service.url)
    html = page.html()
    assert "Version 13 is being synced" in html
    assert html.count('data-worker="w0"') == 2
    assert 'value="100000000"' in html
    assert "reloads every 5 s" in html
    service.status = scene.status()
    deadline = time.monotonic() + 15
    while "All workers are on version 12" not in page.html():
        assert time.monotonic() < deadline, page.html()
        time.sleep(0.2)
    assert service.streams_opened == 0
    assert page.complaints() == []


def test_progress_is_written_in_place(serve: Serve, tab: Callable[..., Page]) -> None:
    service = serve(scene.syncing())
    page = tab()
    live(page, service)
    page.value("void (window.bar = document.querySelector('#sync li[data-worker=w0] progress'))")
    assert page.value("[bar.value, document.getElementById('sync-progress').value]") == [100_000_000, 0.25]
    served = service.pages_served
    status = scene.syncing(progress=0.75, seconds=2.5)
    moved = status.consumers[0].model_copy(update={"bytes_done": 700_000_000, "waits_for": "a pack of rank 1"})
    service.status = status.model_copy(update={"consumers": [moved, *status.consumers[1:]]})
    service.progress()
    page.wait("document.getElementById('sync-progress').value", 0.75)
    assert page.value("[bar.value, bar.isConnected]") == [700_000_000, True]
    assert page.text("#sync-percent") == "75 %"
    assert page.text("#sync li[data-worker=w0] .waits") == "waiting for a pack of rank 1"
    assert page.value("document.querySelector('#workers [data-worker=w0] progress').value") == 700_000_000
    assert service.pages_served == served, "what progresses is not asked for again"
    assert page.complaints() == []


def test_what_is_written_in_place_is_what_would_have_been_rendered(serve: Serve, tab: Callable[..., Page]) -> None:
    """Script and templates say the same things in the same words."""
    before = scene.syncing()
    after = scene.syncing(progress=0.999, seconds=130, waiting_for=["worker w0", "worker w2"]).model_copy(
        update={
            "consumers": [
                scene.consumer(0, state=ConsumerState.PULLING, version=None, ready=False, bytes_done=999),
                scene.consumer(1, state=ConsumerState.PULLED, staged_version=13, bytes_done=999_949),
                scene.consumer(2, state=ConsumerState.FAILED, torn=True, ready=False, bytes_total=0, bytes_done=0),
                scene.consumer(3, state=ConsumerState.PULLED, bytes_done=2 * scene.GB),
            ]
        }
    )
    service = serve(before)
    page = tab()
    live(page, service)
    service.status = after
    service.progress()
    page.wait("document.getElementById('sync-seconds').textContent", "2 min")
    shown = page.value(f"({_PARTS})(document)")
    assert len(shown) == 4 * 4 + 4 * 6 + 3
    html = render_page(after, [], [], [], service.base)
    expected = page.value(f"({_PARTS})(new DOMParser().parseFromString({json.dumps(html)}, 'text/html'))")
    assert shown == expected


_PARTS = """(page) => [...page.querySelectorAll("[data-show], #sync-progress, #sync-percent, #sync-seconds")].map(
  (part) => [
    part.closest("section").id, part.closest("[data-worker]")?.dataset.worker ?? "",
    part.dataset.show ?? part.id, part.textContent, part.className, part.value ?? null, part.max ?? null,
  ].join("|")).sort()"""


def test_ages_are_counted_on_in_the_words_they_were_rendered_in(serve: Serve, tab: Callable[..., Page]) -> None:
    service = serve(scene.status())
    service.now = scene.NOW
    service.versions = [
        scene.committed(version, ended_at=scene.NOW - seconds)
        for version, seconds in enumerate((130.5, 4000.5, 7300, 200_000), start=9)
    ]
    page = tab()
    live(page, service)
    pause(page, 1.5)
    ages = page.value("[...document.querySelectorAll('#versions time')].map((time) => time.textContent)")
    assert ages == ["2 d ago", "2 h ago", "66 min ago", "2 min ago"]
    page.value("document.querySelector('#versions time').dateTime = document.querySelector('main').dataset.now")
    page.wait("document.querySelector('#versions time').textContent.endsWith(' s ago')")


def test_an_event_exchanges_what_differs_and_leaves_the_rest(serve: Serve, tab: Callable[..., Page]) -> None:
    service = serve(scene.syncing())
    service.versions = [scene.aborted(11, LONG_ERROR)]
    page = tab()
    live(page, service)
    page.value("document.getElementById('error-in-12').open = true")
    page.value("document.getElementById('error-in-12-summary').focus()")
    page.value("void (window.kept = ['headline', 'ranks'].map((id) => document.getElementById(id)))")
    page.value("void (window.table = document.querySelector('#ranks table'))")
    service.status = scene.status(newest_version=13, consumers=[scene.consumer(i, version=13) for i in range(4)])
    service.versions = [scene.committed(13), *service.versions]
    service.tell(scene.event(41, EventKind.COMMITTED, "version 13 is complete"))
    page.wait("document.getElementById('sync')", None)
    assert page.text("#headline") == "✓ All workers are on version 13"
    assert page.value("document.title") == "All workers are on version 13 · example"
    assert page.value("[...kept, table].every((element) => element.isConnected)"), "live regions are not replaced"
    assert page.value("document.getElementById('error-in-12').open")
    assert page.value("document.activeElement.id") == "error-in-12-summary"
    assert page.value("document.querySelectorAll('#versions tbody tr').length") == 2
    order = page.value("[...document.querySelector('main').children].map((part) => part.id)")
    assert order == ["headline", "summary", "contents", "workers", "ranks", "versions", "faults", "links", "elsewhere"]
    assert page.complaints() == []


def test_a_sync_that_begins_and_stands_still_appears_by_itself(serve: Serve, tab: Callable[..., Page]) -> None:
    service = serve(scene.status())
    page = tab()
    live(page, service)
    assert page.text("#sync") is None
    service.status = scene.syncing()
    service.progress()
    page.wait("document.getElementById('headline').dataset.state", "syncing")
    assert page.value("document.getElementById('sync').nextElementSibling.id") == "workers", "in its place"
    service.status = scene.syncing(quiet_seconds=9.5)
    service.why = ["worker w0 waits for trainer rank 0"]
    service.progress()
    page.wait("document.getElementById('headline').dataset.state", "stalled")
    assert page.text("#why li") == "worker w0 waits for trainer rank 0"
    service.status = scene.syncing(quiet_seconds=11)
    service.progress()
    page.wait("document.getElementById('detail').textContent", "nothing has moved for 11 s")
    service.status = scene.status(newest_version=13)
    service.why = []
    service.progress()  # with no epoch: it is over
    page.wait("document.getElementById('why')", None)
    assert page.text("#sync") is None


def test_many_events_ask_for_the_page_once_a_second(serve: Serve, tab: Callable[..., Page]) -> None:
    service = serve(scene.status())
    page = tab()
    live(page, service)
    served = service.pages_served
    for number in range(1, 201):
        service.tell(scene.event(number, EventKind.EVICTED, f"w{number} was taken out", fault=Fault.DIED))
        time.sleep(0.01)
    page.wait("document.querySelector('#faults .reason').textContent.trim()", "w200 was taken out")
    pause(page, 1.5)
    assert 2 <= service.pages_served - served <= 6


_LISTEN = """{
  const connection = document.getElementById("connection");
  window.said = [];
  new MutationObserver(() => said.push(connection.textContent.split(";")[0])).observe(connection, {childList: true});
  null;
}"""


def test_a_stream_that_ends_is_opened_again_and_nothing_is_missed(serve: Serve, tab: Callable[..., Page]) -> None:
    service = serve(scene.status(), retry_ms=2500)
    service.now = scene.NOW
    page = tab()
    live(page, service)
    page.value(_LISTEN)
    served = service.pages_served
    service.drop()
    page.wait("document.getElementById('connection').textContent", "reconnecting; this is as of 12-01 10:04:05 UTC")
    deadline = time.monotonic() + 10
    while service.pages_served == served:
        assert time.monotonic() < deadline, "it did not look whether the registry is there"
        pause(page, 0.05)
    service.status = scene.status(paused="an upgrade")  # and nobody listens
    page.wait("document.getElementById('headline').dataset.state", "paused")
    page.wait("document.getElementById('connection').textContent", "live")
    assert page.value("said") == ["reconnecting", "live"]


@pytest.mark.parametrize("refuses_streams", [True, False])
def test_a_registry_that_goes_and_comes_back(serve: Serve, tab: Callable[..., Page], refuses_streams: bool) -> None:
    service = serve(scene.status(), refuses_streams=refuses_streams)
    page = tab()
    live(page, service)
    status, service.status = service.status, None
    service.drop()
    page.wait("document.getElementById('headline').dataset.state", "down")
    assert "weightsync up --name example" in (page.text("#help") or "")
    assert page.text("#workers") is None
    page.value(_LISTEN)
    pause(page, 1.5)
    assert page.text("#connection") == "reconnecting"
    assert "live" not in page.value("said")
    service.status = status
    page.wait("document.getElementById('headline').dataset.state", "current", timeout_s=20)
    page.wait("document.getElementById('connection').textContent", "live")
    assert page.value("document.querySelectorAll('#workers tbody tr').length") == 4


def test_a_page_that_opens_on_a_silent_registry_becomes_the_services(serve: Serve, tab: Callable[..., Page]) -> None:
    service = serve(None)
    page = tab()
    page.open(service.url)
    assert page.value("document.getElementById('headline').dataset.state") == "down"
    service.status = scene.status()
    page.wait("document.getElementById('headline').dataset.state", "current", timeout_s=20)


def test_a_token_goes_with_everything_that_is_asked_for(serve: Serve, tab: Callable[..., Page]) -> None:
    service = serve(scene.status(), token="s&cret +1")
    page = tab()
    page.open(service.url)
    page.wait("document.getElementById('connection').textContent", "live")
    service.status = scene.status(paused="an upgrade")
    service.tell(scene.event(41, EventKind.PAUSED, "paused"))
    page.wait("document.getElementById('headline').dataset.state", "paused")
    links = page.value(
        "[...document.querySelectorAll('a[data-api]')].map((a) => new URL(a.href).searchParams.get('token'))"
    )
    assert set(links) == {"s&cret +1"}
    assert len(links) == 3


def test_a_hostile_name_is_text_to_the_script_too(serve: Serve, tab: Callable[..., Page]) -> None:
    status = scene.syncing(waiting_for=[f"worker {HOSTILE}"])
    named = status.consumers[0].model_copy(update={"worker": HOSTILE})
    service = serve(status.model_copy(update={"consumers": [named, *status.consumers[1:]]}))
    page = tab()
    live(page, service)
    waits = named.model_copy(update={"bytes_done": 1, "waits_for": HOSTILE})
    service.status = status.model_copy(update={"consumers": [waits, *status.consumers[1:]]})
    service.progress()
    page.wait("document.querySelector('#workers progress').value", 1)
    page.wait(f"document.querySelector('#sync').textContent.includes({json.dumps('waiting for ' + HOSTILE)})")
    assert page.value("document.images.length") == 0
    assert page.value("document.title") == "Version 13 is being synced · example"
    assert page.complaints() == []


@pytest.mark.parametrize("width", [320, 360, 700, 900])
def test_nothing_is_wider_than_the_window(serve: Serve, tab: Callable[..., Page], width: int) -> None:
    service = serve(crowded())
    service.why = [LONG_ERROR, LONG_WORD]
    service.versions = [
        scene.committed(12, evicted={LONG_WORD: LONG_ERROR}),
        scene.aborted(11, LONG_ERROR),
        scene.aborted(10, LONG_WORD),
    ]
    service.events = [scene.event(1, EventKind.REFUSED, LONG_WORD), scene.event(2, EventKind.ABORTED, LONG_ERROR)]
    page = tab(width=width)
    live(page, service)
    page.value("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert page.value("document.querySelectorAll('details[open]').length") >= 4
    assert overflow(page) <= 0
    assert page.value(_CUT_OFF) == []


_CUT_OFF = """[...document.querySelectorAll("main *")]
  .filter((element) => element.getBoundingClientRect().right > window.innerWidth + 1)
  .map((element) => element.outerHTML.slice(0, 80))"""


def test_the_silent_registrys_page_fits_a_phone(serve: Serve, tab: Callable[..., Page]) -> None:
    page = tab(width=320)
    page.open(serve(None).url)
    assert overflow(page) <= 0


def test_screen_readers_find_rows_names_and_live_regions_on_a_phone(serve: Serve, tab: Callable[..., Page]) -> None:
    """Rows look like cards there; what they are must not change with it."""
    service = serve(scene.syncing())
    page = tab(width=360)
    live(page, service)
    nodes = [node for node in page.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
    roles = [role for role, _ in found]
    assert ("progressbar", "bytes of version 13 in place on worker w0") in found
    assert ("progressbar", "bytes in place on worker w3") in found
    assert ("table", "Workers 4") in found
    assert roles.count("row") == (1 + 4) + (1 + 2)
    assert roles.count("rowheader") == 4 + 2
    assert roles.count("cell") == 4 * 6 + 2 * 6
    assert ("columnheader", "bytes in place") in found
    assert ("main", "") in found
    assert ("navigation", "sections") in found
    assert roles.count("status") == 2


def test_five_hundred_workers_stay_usable(serve: Serve, tab: Callable[..., Page]) -> None:
    members = [scene.consumer(i, state=ConsumerState.PULLING, bytes_done=0) for i in range(500)]
    status = scene.status(consumers=members, epoch=scene.epoch(waiting_for=[f"worker w{i}" for i in range(500)]))
    service = serve(status)
    page = tab(width=360)
    live(page, service)
    assert page.value("document.querySelectorAll('#workers [data-worker]').length") == 100
    service.status = status.model_copy(
        update={"consumers": [member.model_copy(update={"bytes_done": 5}) for member in members]}
    )
    service.progress()
    page.wait("document.querySelector('#sync li:last-child progress').value", 5)
    assert overflow(page) <= 0
