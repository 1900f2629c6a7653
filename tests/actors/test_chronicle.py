"""What is remembered of a service: lags, a ring of events, attempts; and that memory stays bounded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.actors import chronicle as module
from weightsync.actors.chronicle import DETAILED, EVENTS_KEPT, RECORDS_KEPT, Chronicle
from weightsync.actors.epochs import Epoch
from weightsync.actors.logs import event_logger
from weightsync.protocol.faults import Fault
from weightsync.protocol.messages import EpochState, LayoutSnapshot, PublishMode, PullStats
from weightsync.protocol.status import EventKind


class Clock:
    """Stands in for `time.time`."""

    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "time", lambda: made.now)
    return made


def make() -> tuple[Chronicle, list[int]]:
    woken: list[int] = []
    return Chronicle("s", lambda: woken.append(1), event_logger("s", "error", "text")), woken


def ended(version: int, state: EpochState, error: str | None = None) -> Epoch:
    layout = LayoutSnapshot(1, PublishMode.LIVE, "nixl", (), (), (), (None,), (), 1)  # type: ignore[arg-type]
    epoch = Epoch(version, version, layout, {0: "w0"})
    epoch.pulled = {0: PullStats(10, 10, 0.5, {"pull": 0.5}, strategies={"direct": 10}, predicted_s=0.25)}
    epoch.close(state, error)
    return epoch


def commit(chronicle: Chronicle, version: int) -> None:
    epoch = ended(version, EpochState.COMMITTED)
    chronicle.committed(epoch, epoch.report("s"))


@given(
    gaps=st.lists(st.integers(1, 3), max_size=8),
    held=st.integers(-1, 30),
    joined_after=st.integers(0, 10),
    late=st.integers(0, 5),
)
def test_lag_counts_what_was_committed_and_is_not_held(
    gaps: list[int], held: int, joined_after: int, late: int
) -> None:
    """Against counting one by one; a worker that holds nothing is behind what was committed since it joined."""
    chronicle, _ = make()
    committed: list[tuple[int, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        for index, gap in enumerate(gaps):
            at = 100.0 + index
            patch.setattr(module.time, "time", lambda at=at: at)
            committed.append(((committed[-1][0] if committed else 0) + gap, at))
            commit(chronicle, committed[-1][0])
    now, joined = 200.0 + late, 99.5 + joined_after
    version = None if held < 0 else held
    missed = [at for v, at in committed if (at > joined if version is None else v > version)]
    assert chronicle.lag(version, joined, now) == (len(missed), now - min(missed) if missed else 0.0)


def test_after_a_restart_what_members_hold_counts_as_committed_then(clock: Clock) -> None:
    chronicle, _ = make()
    chronicle.recovered(7)
    clock.now += 5
    assert chronicle.lag(7, 0.0, clock.now) == (0, 0.0)
    assert chronicle.lag(6, 0.0, clock.now) == (1, 5.0)
    assert chronicle.committed_at == 1000.0


def test_events_are_numbered_wake_who_waits_and_are_a_ring() -> None:
    chronicle, woken = make()
    for index in range(EVENTS_KEPT + 10):
        chronicle.note(EventKind.JOINED, f"member {index}")
    assert chronicle.count == len(woken) == EVENTS_KEPT + 10
    assert [event.text for event in chronicle.events(after=EVENTS_KEPT + 8)] == [
        f"member {EVENTS_KEPT + 8}",
        f"member {EVENTS_KEPT + 9}",
    ]
    assert chronicle.events(after=chronicle.count) == []
    assert len(chronicle.events(after=0)) == EVENTS_KEPT


def test_attempts_keep_their_details_for_a_while_and_are_forgotten_in_the_end() -> None:
    chronicle, _ = make()
    for version in range(1, RECORDS_KEPT + 6):
        commit(chronicle, version)
    assert [record.version for record in chronicle.records] == list(range(6, RECORDS_KEPT + 6))
    detailed = [record.version for record in chronicle.records if record.report and record.report.workers]
    assert detailed == list(range(RECORDS_KEPT + 6 - DETAILED, RECORDS_KEPT + 6))
    assert all(record.report and record.report.phases["pull"] == 0.5 for record in chronicle.records)
    assert chronicle.lag(0, 0.0, 0.0)[0] == RECORDS_KEPT, "as many as are remembered"


def test_an_aborted_attempt_says_why_in_code_and_words() -> None:
    chronicle, _ = make()
    chronicle.aborted(ended(3, EpochState.ABORTED, "nothing moved"), Fault.STALLED)
    (record,) = chronicle.records
    assert (record.state, record.fault, record.error) == (EpochState.ABORTED, Fault.STALLED, "nothing moved")
    (event,) = chronicle.events(0)
    assert (event.kind, event.fault, event.version) == (EventKind.ABORTED, Fault.STALLED, 3)
    text = chronicle.meters.text().decode()
    for sample in ('stalls_total{service="s",who="sync"} 1.0', 'aborts_total{reason="stalled",service="s"} 1.0'):
        assert f"weightsync_{sample}" in text
    assert 'weightsync_syncs_total{outcome="committed",service="s"} 0.0' in text


def test_log_lines_have_the_same_fields_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    for fmt in ("text", "json"):
        chronicle = Chronicle("svc", lambda: None, event_logger("svc", "info", fmt))  # type: ignore[arg-type]
        chronicle.evicted(ended(4, EpochState.ABORTED), "w0", Fault.LEASE, "it is silent")
        chronicle.note(EventKind.RESUMED, "publishing goes on")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    evicted = json.loads(lines[2])
    assert evicted.pop("timestamp").endswith("Z")
    assert evicted == {
        "level": "warning",
        "service": "svc",
        "kind": "evicted",
        "version": 4,
        "epoch": 4,
        "member": "worker w0",
        "fault": "lease",
        "event": "worker w0 was taken out of version 4: it is silent",
    }
    assert 'level=warning service=svc kind=evicted version=4 epoch=4 member="worker w0" fault=lease event=' in lines[0]
    assert set(json.loads(lines[3])) == {"timestamp", "level", "service", "kind", "event"}
