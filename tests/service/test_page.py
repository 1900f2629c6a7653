"""What the status page says, for every state a service can be in. How it behaves is in the browser's test."""

from __future__ import annotations

import re
import statistics
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import page_scenes as scene

from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import ConsumerState
from weightsync.protocol.status import EventKind, ServiceStatus
from weightsync.service.page import SCRIPT, STYLE, render_down, render_page
from weightsync.service.page.headline import QUIET_S, headline
from weightsync.service.page.words import age, duration, natural, some

HOSTILE = """</p><script>alert(1)</script><img src=x onerror="alert(2)"> "quoted" 'single' & &amp; \u202e"""
VOID = {"meta", "link", "br", "img", "input", "hr"}
TEXT_ONLY = {"p", "span", "b", "code", "time", "dt", "a", "h1", "h2"}
BLOCKS = {"p", "div", "section", "table", "ul", "ol", "dl", "details", "nav", "main"}


class Document(HTMLParser):
    """A page that was parsed, and refused if its tags do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], "tags that are never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute of <{tag}> twice"
        outside = next((outer for outer in reversed(self._open) if outer in TEXT_ONLY), None)
        assert outside is None or tag not in BLOCKS, f"<{tag}> in <{outside}> ends it, or is no HTML"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self._open, f"<{tag}/> is no HTML"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == tag]

    def workers(self) -> list[str | None]:
        return [row["data-worker"] for row in self.all("tr") if "data-worker" in row]


def page(status: ServiceStatus, **changes: object) -> str:
    known: dict[str, object] = {"versions": [], "events": [], "why": [], "base": "/example", "now": scene.NOW}
    return render_page(status, **{**known, **changes})  # type: ignore[arg-type]


def full_page(text: str = "an error", worker: str = "w0") -> str:
    """Every part of the page, with a text and a name in every place that takes one."""
    status = scene.syncing(quiet_seconds=60, waiting_for=[f"worker {worker}", "worker w1", text])
    others = [scene.consumer(9, state=ConsumerState.FAILED, error=text), scene.consumer(8, torn=True, ready=False)]
    first = status.consumers[0].model_copy(update={"worker": worker, "waits_for": text})
    status = status.model_copy(
        update={
            "consumers": [first, *status.consumers[1:], *others],
            "paused": text,
            "transport_reason": text,
            "world_size": 3,
            "service": worker,
        }
    )
    versions = [
        scene.committed(12, evicted={worker: text, "w7": text * 20}, report=scene.report(12, lost_ranks=[1])),
        scene.aborted(11, text),
    ]
    events = [
        scene.event(1, EventKind.EVICTED, text, fault=Fault.DIED, member=worker),
        scene.event(2, EventKind.REFUSED, text * 20),
    ]
    return page(status, versions=versions, events=events, why=[text])


def test_a_page_is_well_formed_and_has_every_part() -> None:
    document = Document(full_page())
    ids = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    parts = {"headline", "summary", "contents", "sync", "why", "workers", "ranks", "versions", "faults", "links"}
    assert parts <= set(ids)
    targets = {link["href"][1:] for link in document.all("a") if link["href"] and link["href"].startswith("#")}
    assert targets
    assert targets <= set(ids)


def test_names_and_errors_of_others_stay_text() -> None:
    html = full_page(HOSTILE, HOSTILE)
    document = Document(html)
    assert [tag for tag, _ in document.tags if tag in ("img", "script")] == ["script"]  # our own
    assert document.workers()[-1] == HOSTILE or HOSTILE in document.workers()
    assert document.text.count(HOSTILE) >= 10
    assert "<script>alert" not in html


def test_nothing_on_the_page_needs_an_exception_from_a_strict_policy() -> None:
    for html in (full_page(HOSTILE), render_down("example", "/example")):
        document = Document(html)
        names = {name for _, attributes in document.tags for name in attributes}
        assert not {name for name in names if name.startswith("on")}
        assert "style" not in names
        assert document.all("style") == []
        assert [script.get("src", "").split("?")[0] for script in document.all("script")] == ["/example/page.js"]
    assert "innerHTML" not in SCRIPT
    assert "eval(" not in SCRIPT
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_every_address_has_the_services_prefix() -> None:
    for base in ("", "/other"):
        document = Document(page(scene.status(), base=base))
        addresses = [str(a["href"]) for a in (*document.all("a"), *document.all("link")) if "href" in a]
        outside = [a for a in addresses if not a.startswith(("#", "data:", f"{base}/"))]
        assert outside == []
        assert f"{base}/v1/status" in addresses
        assert document.all("html")[0]["data-base"] == base


def test_progress_is_labelled_and_times_are_times() -> None:
    document = Document(full_page())
    bars = document.all("progress")
    assert len(bars) >= 6
    assert all(bar["aria-label"] for bar in bars)
    assert len({bar["aria-label"] for bar in bars}) == len(bars)
    times = [time_["datetime"] for time_ in document.all("time")]
    assert len(times) >= 4
    assert all(re.fullmatch(r"2026-1[12]-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(time_)) for time_ in times)
    assert [p["id"] for p in document.all("p") if p.get("role") == "status"] == ["connection", "headline"]


def test_parts_of_tables_say_what_they_are() -> None:
    """On a phone they are laid out as cards, and some browsers then forget that they are tables."""
    document = Document(full_page())
    roles = {tag: {found.get("role") for found in document.all(tag)} for tag in ("table", "tbody", "tr", "th", "td")}
    headers = {"columnheader", "rowheader"}
    assert roles == {"table": {"table"}, "tbody": {"rowgroup"}, "tr": {"row"}, "th": headers, "td": {"cell"}}


def test_ages_are_counted_from_the_moment_of_the_page() -> None:
    assert "<b>12</b> <time" in page(scene.status())
    assert ">3 min ago</time>" in page(scene.status())
    assert ">2 h ago</time>" in page(scene.status(), now=scene.NOW + 7200)


BROKEN = [scene.consumer(0), scene.consumer(1, torn=True, ready=False), scene.consumer(2, state=ConsumerState.FAILED)]
BEHIND = [scene.consumer(0), scene.consumer(1, version=9, lag_versions=3, lag_seconds=42.0)]
STAGED = [scene.consumer(0), scene.consumer(1, version=11, staged_version=12, lag_versions=1, lag_seconds=9.0)]
LATE = [scene.consumer(0), scene.consumer(1, version=None, ready=False)]


@pytest.mark.parametrize(
    ("status", "why", "state", "text", "detail"),
    [
        (scene.status(), [], "current", "All workers are on version 12", "4 workers"),
        (
            scene.status(consumers=STAGED),
            [],
            "current",
            "All workers hold version 12",
            "1 of 2 show it from their next `sync` call on",
        ),
        (
            scene.status(consumers=LATE),
            [],
            "current",
            "No worker is behind version 12",
            "1 worker joined since, and take part in the next sync",
        ),
        (scene.status(consumers=BEHIND), [], "behind", "1 of 2 workers is behind", "by up to 3 versions, 42 s"),
        (scene.syncing(), ["w0 waits"], "syncing", "Version 13 is being synced", ""),
        (
            scene.syncing(quiet_seconds=QUIET_S + 9),
            ["w0 waits"],
            "stalled",
            "The sync of version 13 stands still",
            "nothing has moved for 14 s",
        ),
        (
            scene.status(),
            ["ranks [0] wait for ranks [1]"],
            "waiting",
            "A version waits to begin",
            "see below for whom it waits",
        ),
        (scene.status(paused="an upgrade"), ["ranks wait"], "paused", "Publishing is paused", "an upgrade"),
        (scene.status(consumers=BROKEN), [], "broken", "2 of 3 workers need attention", "1 torn, 1 failed"),
        (
            scene.status(consumers=[]),
            [],
            "empty",
            "No worker has joined",
            "a Subscriber of this service's name joins it",
        ),
        (scene.status(newest_version=None), [], "empty", "No version has been published", "4 workers joined"),
    ],
)
def test_the_headline_says_the_state(status: ServiceStatus, why: list[str], state: str, text: str, detail: str) -> None:
    document = Document(page(status, why=why))
    assert next(p["data-state"] for p in document.all("p") if p.get("id") == "headline") == state
    assert text in document.text
    assert f"{text} · example" in document.text  # the title
    assert headline(status, why).detail == detail


def test_the_most_urgent_comes_first_and_the_rest_are_notes() -> None:
    status = scene.syncing().model_copy(
        update={"paused": "an upgrade", "world_size": 4, "consumers": [*BROKEN, *BEHIND[1:]]}
    )
    head = headline(status, [])
    assert head.text == "Version 13 is being synced"
    assert head.notes == (
        "2 of 4 workers need attention: 1 torn, 1 failed",
        "Publishing is paused: an upgrade",
        "1 of 4 workers is behind: by up to 3 versions, 42 s",
        "2 of 4 trainer ranks not registered",
    )


def test_the_headline_of_a_state_does_not_change_while_the_state_lasts() -> None:
    """It is read out loud each time it does."""
    for first, second in (({}, {"seconds": 3.0, "progress": 0.7}), ({"quiet_seconds": 6}, {"quiet_seconds": 60})):
        assert headline(scene.syncing(**first), []).text == headline(scene.syncing(**second), []).text


def test_who_waits_for_whom_is_said_only_when_something_is_quiet() -> None:
    line = "worker w0 is pulling and waits"
    assert line not in page(scene.syncing(quiet_seconds=QUIET_S - 1), why=[line])
    assert line in page(scene.syncing(quiet_seconds=QUIET_S + 1), why=[line])
    assert line in page(scene.status(), why=[line])


def test_a_running_sync_has_a_bar_for_each_of_its_workers() -> None:
    status = scene.syncing()
    extra = scene.consumer(7, worker="late")  # joined meanwhile, takes no part
    document = Document(page(status.model_copy(update={"consumers": [*status.consumers, extra]})))
    assert [row["data-worker"] for row in document.all("li") if "data-worker" in row] == ["w0", "w1", "w2", "w3"]
    assert "waiting for reads from trainer rank 0" in document.text
    assert "Also waiting for trainer rank 0." in document.text
    labelled = {bar["aria-label"]: bar for bar in document.all("progress")}
    assert labelled["bytes of version 13 in place on worker w0"]["value"] == "100000000"
    assert labelled["bytes of version 13 in place on all workers"]["value"] == "0.25"


def test_workers_that_need_attention_come_first_then_those_furthest_behind() -> None:
    members = [
        scene.consumer(10),
        scene.consumer(2),
        scene.consumer(3, lag_versions=1, lag_seconds=5.0),
        scene.consumer(4, lag_versions=2, lag_seconds=5.0),
        scene.consumer(5, lag_versions=2, lag_seconds=50.0),
        scene.consumer(6, state=ConsumerState.FAILED),
        scene.consumer(7, torn=True, ready=False),
    ]
    document = Document(page(scene.status(consumers=members)))
    assert document.workers() == ["w7", "w6", "w5", "w4", "w3", "w2", "w10"]


def test_a_worker_with_nothing_to_pull_is_complete() -> None:
    document = Document(page(scene.status(consumers=[scene.consumer(0, bytes_done=0, bytes_total=0)])))
    assert "nothing to pull" in document.text
    assert [(bar["max"], bar["value"]) for bar in document.all("progress")] == [("1", "1")]


def test_ranks_that_are_missing_are_named() -> None:
    document = Document(page(scene.status(world_size=3, producers=[scene.producer(0), scene.producer(2)])))
    assert document.text.count("not registered") == 2  # the note and rank 1
    assert "1 of 3 trainer ranks not registered" in document.text


def test_versions_tell_phases_speed_evictions_and_why_they_were_given_up() -> None:
    versions = [
        scene.aborted(11, "trainer rank 1: its process ended"),
        scene.committed(12, evicted={"w3": "it gave no sign of life"}),
    ]
    html = page(scene.status(), versions=versions)
    document = Document(html)
    assert html.index("epoch 13") < html.index("epoch 12"), "newest first"
    assert "aborted: rank_lost" in document.text
    assert "trainer rank 1: its process ended" in document.text
    assert "w3 evicted" in document.text
    assert "7.12 GB/s" in document.text
    bars = [svg["aria-label"] for svg in document.all("svg") if svg.get("role") == "img"]
    assert bars == ["begin 4 ms, pull 410 ms, scatter 50 ms, verify 80 ms, free 6 ms, commit 12 ms"]


def test_the_phases_of_a_bar_fill_it_without_overlap() -> None:
    document = Document(page(scene.status(), versions=[scene.committed(12)]))
    parts = [(float(r["x"]), float(r["width"])) for r in document.all("rect") if r.get("x")]  # type: ignore[arg-type]
    assert len(parts) == len(scene.PHASES)
    ends = [start + width for start, width in parts]
    assert ends[-1] == pytest.approx(100, abs=0.05)
    assert [start for start, _ in parts] == pytest.approx([0.0, *ends[:-1]], abs=0.05)


def test_faults_are_told_and_other_news_are_not() -> None:
    events = [
        scene.event(1, EventKind.EVICTED, "w1 was taken out", fault=Fault.STALLED),
        scene.event(2, EventKind.COMMITTED, "all went well"),
        scene.event(3, EventKind.LEFT, "w2 closed its subscriber", fault=Fault.LEFT),
        scene.event(4, EventKind.LEFT, "w3 is no member any more", fault=Fault.DIED),
        scene.event(5, EventKind.REFUSED, "rank 9 was refused"),
    ]
    document = Document(page(scene.status(), events=events))
    told = [text for text in ("rank 9", "w3 is", "w2 closed", "all went", "w1 was") if text in document.text]
    assert told == ["rank 9", "w3 is", "w1 was"]
    assert document.text.index("rank 9") < document.text.index("w1 was"), "newest first"
    assert "evicted: stalled" in document.text


def test_a_long_error_is_folded_and_a_short_one_is_not() -> None:
    long = "first line\n" + "and more " * 100
    html = page(scene.status(), versions=[scene.aborted(11, long), scene.aborted(10, "short")])
    document = Document(html)
    assert [details["id"] for details in document.all("details")] == ["error-in-12", "links-table"]
    assert document.text.count(long) == 1


def test_a_page_without_a_script_reloads_itself() -> None:
    for html in (page(scene.status()), render_down("example", "")):
        assert re.search(r'<noscript><meta http-equiv="refresh" content="\d+"></noscript>', html)


def test_five_hundred_workers_are_cut_to_the_worst_hundred(record_property: pytest.RecordProperty) -> None:
    status = big_status()
    versions = [scene.committed(version) for version in range(100)]
    took = []
    for _ in range(5):
        started = time.perf_counter()
        html = page(status, versions=versions)
        took.append(time.perf_counter() - started)
    record_property("render_seconds", statistics.median(took))
    document = Document(html)
    assert len(document.workers()) == 100
    assert document.workers()[:2] == ["w77", "w99"], "torn, then furthest behind"
    assert document.text.count("and 400 workers more") == 2  # of the sync, of the members
    assert "and 80 attempts before" in document.text
    assert len(html) < 400_000
    assert statistics.median(took) < 2, "the aim is 0.1 s; this is twenty times that, for a slow machine"


def big_status() -> ServiceStatus:
    members = [scene.consumer(i, state=ConsumerState.PULLING, lag_versions=i % 100) for i in range(500)]
    members[77] = scene.consumer(77, torn=True, ready=False, state=ConsumerState.PULLING)
    return scene.status(consumers=members, epoch=scene.epoch(waiting_for=[f"worker w{i}" for i in range(500)]))


def test_the_page_of_a_silent_registry_says_what_to_do() -> None:
    document = Document(render_down("example", "/example", now=scene.NOW))
    assert [p["data-state"] for p in document.all("p") if p.get("id") == "headline"] == ["down"]
    assert "weightsync status --name example" in document.text
    assert "weightsync up --name example" in document.text
    assert HOSTILE in Document(render_down(HOSTILE, "")).text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0004, "0.4 ms"),
        (0.012, "12 ms"),
        (2.34, "2.3 s"),
        (42.9, "42 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7200, "2 h"),
        (172800, "2 d"),
        (-1, "0.0 ms"),
    ],
)
def test_durations_have_one_number_and_one_unit(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_words() -> None:
    assert [age(seconds) for seconds in (-3, 0.4, 9.9, 61)] == ["just now", "just now", "9 s ago", "61 s ago"]
    assert sorted(["w10", "w2", "a", "w2b", "7"], key=natural) == ["7", "a", "w2", "w2b", "w10"]
    assert sorted(["w" + "9" * 5000, "w1"], key=natural)[0] == "w1"
    assert some(["a", "b"]) == "a, b"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


TEXTS = [
    ("text", "ground"),
    ("text", "surface"),
    ("muted", "ground"),
    ("muted", "surface"),
    ("link", "ground"),
    ("link", "surface"),
    ("good", "ground"),
    ("warn", "ground"),
    *((name, f"{name}-ground") for name in ("plain", "good", "busy", "warn", "bad")),
]
SHAPES = [("bar", "track"), *((name, "surface") for name in re.findall(r"--(phase-\w+):", STYLE.split("@media")[0]))]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_the_contrast_of_aa_and_shapes_that_of_graphics(scheme: str) -> None:
    light, dark = (_variables(block) for block in STYLE.split("@media (prefers-color-scheme: dark)")[:2])
    assert dark.keys() == light.keys()
    colours = light if scheme == "light" else dark
    assert len(SHAPES) == 8
    weak = {
        pair: round(ratio, 2)
        for pairs, least in ((TEXTS, 4.5), (SHAPES, 3.0))
        for pair in pairs
        if (ratio := _contrast(colours[pair[0]], colours[pair[1]])) < least
    }
    assert weak == {}


def test_colours_are_named_once() -> None:
    """A colour that is written out elsewhere would escape the test above."""
    rules = re.sub(r":root \{.*?\}", "", STYLE, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-f]{3,8}\b(?=[;\s])|rgba?\(|hsla?\(", rules) == []
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE))
    assert used == set(_variables(STYLE.split("@media")[0]))


def test_contrast_is_computed_as_the_standard_says() -> None:
    assert _contrast("#ffffff", "#000000") == pytest.approx(21)
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def _variables(css: str) -> dict[str, str]:
    block = re.search(r":root \{(.*?)\}", css, re.DOTALL)
    assert block
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block.group(1)))


def _contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2, of relative luminances."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
