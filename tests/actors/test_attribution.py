"""A stall names who holds whom up: member, group or bytes, and seconds."""

from __future__ import annotations

import pytest

from weightsync.actors.attribution import explain_epoch, who_holds_others_up
from weightsync.actors.epochs import ConsumerMember, Epoch
from weightsync.protocol.ledger import LedgerSnapshot, SyncState, Wait
from weightsync.protocol.messages import ConsumerState, LayoutSnapshot, PlanFacts, PublishMode, PullStats


def member(worker: str, cid: int, install: str = "shadow", **more: object) -> ConsumerMember:
    made = ConsumerMember(worker, cid, "t", install, "n", 1, moved_at=90.0)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def layout(world: int) -> LayoutSnapshot:
    """Of `world` ranks; what they hold is nobody's business here."""
    return LayoutSnapshot(1, PublishMode.LIVE, "nixl", (), (), (), (None,) * world, (), 1)  # type: ignore[arg-type]


def ledger(unfreed: dict[int, tuple[int, ...]], epoch: int = 4) -> LedgerSnapshot:
    return LedgerSnapshot(SyncState.OPEN, epoch, (0, 1), unfreed, (Wait("x", 1.0),), 7.25)


def explain(
    consumers: list[ConsumerMember], ranks: dict[int, LedgerSnapshot | str], pulled: tuple[int, ...] = ()
) -> str:
    epoch = Epoch(4, 9, layout(len(ranks)), {c.consumer_id: c.worker for c in consumers})
    epoch.ranks = set(ranks)
    epoch.pulled = {cid: PullStats(1, 1, 0.1, {}) for cid in pulled}
    return "\n".join(explain_epoch(epoch, {c.consumer_id: c for c in consumers}, ranks, now=100.0))


def test_a_pull_says_how_far_it_is_and_since_when() -> None:
    pulling = {"state": ConsumerState.PULLING, "waits_for": "reads of group 3"}
    slow = member("w0", 0, bytes_done=10_000_000, facts=PlanFacts(4_000_000_000, needs_producers=False), **pulling)
    text = explain([slow], {})
    assert (
        "worker w0 is pulling: 10.0 MB of 4.00 GB are in place, waiting for reads of group 3 (last moved 10.0 s ago)"
        in text
    )


def test_a_worker_that_writes_in_place_waits_for_its_engine() -> None:
    assert "waiting for its `sync` call" in explain([member("w0", 0, "in_place", state=ConsumerState.IDLE)], {})
    assert "waiting for its follower to begin" in explain([member("w0", 0, state=ConsumerState.IDLE)], {})


def test_a_rank_names_the_groups_and_the_workers_that_did_not_free_them() -> None:
    workers = [member("w0", 0), member("w1", 1)]
    text = explain(workers, {0: ledger({3: (1,), 4: (0, 1), 5: (1,), 6: (1,)})}, pulled=(0, 1))
    assert (
        "trainer rank 0 waits for free signals: group 3 by worker w1; group 4 by worker w0, worker w1; group 5" in text
    )
    assert "and 1 more groups (7.2 s without progress)" in text
    assert "workers w0, w1 hold version 9 and wait for the others" in text


def test_a_rank_that_has_nothing_outstanding_is_itself_what_is_waited_for() -> None:
    assert "waiting for the rank itself to publish or end" in explain([], {0: ledger({})})
    assert "waiting for the rank itself" in explain([], {0: ledger({1: (0,)}, epoch=3)}), "an older epoch's groups"


def test_a_producer_that_does_not_answer_says_so() -> None:
    assert explain([], {2: "its producer does not answer (TimeoutError)"}) == (
        "trainer rank 2: its producer does not answer (TimeoutError)"
    )


@pytest.mark.parametrize(
    ("still_for_s", "some_are_done", "evicted"),
    [
        ((8.1, 0.1), False, [0]),
        ((8.1, 8.2), False, []),
        ((8.1, 7.4), False, []),  # they stopped together, as far as anybody can tell
        ((8.1, 4.1), False, []),
        ((8.1, 3.9), False, [0]),
        ((8.1, 9.0, 0.0), False, [0, 1]),
        ((8.1,), True, [0]),
        ((8.1, 7.4), True, [0]),
        ((8.0, 7.9), True, []),
        ((), True, []),
    ],
)
def test_only_who_stands_still_while_others_move_is_evicted(
    still_for_s: tuple[float, ...], some_are_done: bool, evicted: list[int]
) -> None:
    moved_at = {consumer: 1000.0 - seconds for consumer, seconds in enumerate(still_for_s)}
    assert who_holds_others_up(moved_at, some_are_done, 1000.0, 8.0) == evicted


def test_ranks_whose_workers_read_by_themselves_wait_for_these_workers_and_name_them() -> None:
    workers = [member("w0", 0), member("w1", 1, state=ConsumerState.PULLING)]
    epoch = Epoch(4, 9, layout(3), {0: "w0", 1: "w1"}, one_sided=True)
    epoch.ranks, epoch.ended, epoch.pulled = {0, 1, 2}, {0, 2}, {0: PullStats(1, 1, 0.1, {})}
    text = "\n".join(explain_epoch(epoch, {w.consumer_id: w for w in workers}, {}, now=100.0))
    assert "trainer ranks 0, 2 wait until worker w1 has read version 9 out of their memory" in text
    assert "trainer rank 1 has begun to publish version 9 and not come to wait for its end" in text
    assert "free signals" not in text
    assert "not registered" not in text
