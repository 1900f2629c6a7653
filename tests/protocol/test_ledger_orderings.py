"""Every ordering of a small sync, one after the other: 2 consumers, 2 groups, and each kind of fault.

The ledger's calls are atomic, so the orderings of its callers' calls are all there is. The model beside it is sets
and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from weightsync.protocol.errors import SyncAborted, SyncError
from weightsync.protocol.ledger import SyncLedger

Call = tuple[str, int, int]
"""(operation, group, consumer)."""

GROUPS, CONSUMERS = (0, 1), (0, 1)
PUBLISHES = [("publish", 0, 0), ("publish", 1, 0)]

FAULTS: dict[str, list[Call]] = {
    "none": [],
    "evict one": [("evict", 0, 1)],
    "evict both": [("evict", 0, 1), ("evict", 0, 0)],
    "fail": [("fail", 0, 0)],
    "repeat a signal": [("free", 0, 1)],
    "stale signal": [("stale", 0, 1)],
    "stranger": [("free", 0, 7)],
}


def orderings(*threads: Sequence[Call]) -> Iterator[tuple[Call, ...]]:
    """Every way to interleave the threads, each in its own order."""
    if not any(threads):
        yield ()
    for i, thread in enumerate(threads):
        if thread:
            rest = [t[1:] if j == i else t for j, t in enumerate(threads)]
            for tail in orderings(*rest):
                yield (thread[0], *tail)


class Model:
    """What must be true, from the definitions."""

    def __init__(self) -> None:
        self.live, self.published = set(CONSUMERS), set[int]()
        self.freed: dict[int, set[int]] = {group: set() for group in GROUPS}
        self.released: list[int] = []
        self.rejected, self.failed = 0, False

    def apply(self, call: Call) -> bool | None:
        """The call's expected answer."""
        operation, group, consumer = call
        answer: bool | None = None
        if operation == "fail":
            self.failed = True
        elif operation == "publish" and not self.failed:
            self.published.add(group)
        elif operation == "evict":
            answer = not self.failed and consumer in self.live
            self.live -= {consumer} if answer else set()
        elif operation in ("free", "stale"):
            answer = (
                operation == "free" and not self.failed and consumer in self.live and consumer not in self.freed[group]
            )
            self.rejected += not answer
            if answer:
                self.freed[group].add(consumer)
        if not self.failed:
            self.released += [
                g for g in GROUPS if g in self.published and g not in self.released and self.live <= self.freed[g]
            ]
        return answer


def run(calls: Sequence[Call]) -> None:
    released: list[int] = []
    ledger, model = SyncLedger(stall_timeout_s=5.0, on_release=released.append), Model()
    ledger.begin(5, CONSUMERS)
    for call in calls:
        operation, group, consumer = call
        expected = model.apply(call)
        if operation == "publish":
            if model.failed:
                with pytest.raises(SyncAborted):
                    ledger.publish(group)
            else:
                ledger.publish(group)
        elif operation == "fail":
            ledger.fail(SyncAborted("given up"))
        elif operation == "evict":
            assert ledger.evict(consumer, 5) is expected, calls
        else:
            assert ledger.free(group, consumer, 5 if operation == "free" else 4) is expected, calls
        assert released == model.released, (calls, call)
        assert ledger.freed_pending == model.released, (calls, call)
        assert ledger.inflight_groups == sorted(model.published - set(model.released)), (calls, call)
        assert ledger.live == model.live
        assert ledger.rejected_signals == model.rejected, (calls, call)
    if model.failed:
        with pytest.raises(SyncAborted):
            ledger.end()
    else:
        assert model.published == set(GROUPS) == set(model.released), "everybody has freed everything"
        assert ledger.end() == model.released
        with pytest.raises(SyncError):
            ledger.check_open()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("second_order", [(0, 1), (1, 0)])
def test_every_ordering_releases_each_group_once_and_in_time(fault: str, second_order: tuple[int, int]) -> None:
    first = [("free", group, 0) for group in GROUPS]
    second = [("free", group, 1) for group in second_order]
    count = 0
    for calls in orderings(PUBLISHES, first, second, FAULTS[fault]):
        run(calls)
        count += 1
    assert count >= 90
