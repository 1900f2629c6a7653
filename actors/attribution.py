"""Who waits for whom, in words: for `status --why`, and for the text of a stall.

Functions over what the registry and its producers know. The thing to watch: every line names a member, what
is outstanding (a group, a signal, bytes) and since when, so that a reader need not ask further.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from weightsync.actors.epochs import ConsumerMember, Epoch
from weightsync.protocol.amounts import format_bytes
from weightsync.protocol.ledger import LedgerSnapshot
from weightsync.protocol.messages import ConsumerState

_GROUPS_SHOWN = 3
_SNAPSHOT_TIMEOUT_S = 2.0


async def ask_ledgers(actors: Mapping[int, Any]) -> dict[int, LedgerSnapshot | str]:
    """Rank -> its producer's ledger, or why it does not answer."""

    async def ask(actor: Any) -> LedgerSnapshot | str:
        try:
            return await asyncio.wait_for(actor.snapshot.remote(), _SNAPSHOT_TIMEOUT_S)
        except Exception as error:
            return f"its producer does not answer ({type(error).__name__})"

    return dict(zip(actors, await asyncio.gather(*map(ask, actors.values())), strict=True))


def explain_epoch(
    epoch: Epoch,
    consumers: Mapping[int, ConsumerMember],
    producers: Mapping[int, LedgerSnapshot | str],
    now: float,
) -> list[str]:
    """One line for each member that has not finished.

    Args:
        producers: rank -> its ledger, or why it does not answer.
        now: on the clock that `ConsumerMember.moved_at` is on.
    """
    outstanding = [consumers[cid] for cid in epoch.live if cid not in epoch.pulled and cid in consumers]
    lines = [explain_consumer(member, now) for member in sorted(outstanding, key=lambda member: member.worker)]
    if epoch.one_sided:
        lines += _rank_lines(epoch, [member.worker for member in outstanding])
    else:
        lines += [
            _producer_line(rank, producers.get(rank, "it is not registered"), epoch, consumers)
            for rank in sorted(epoch.ranks - epoch.ended)
        ]
    done = [worker for cid, worker in epoch.live.items() if cid in epoch.pulled]
    if done and lines:
        lines.append(f"workers {', '.join(sorted(done))} hold version {epoch.version} and wait for the others")
    return lines


def explain_consumer(member: ConsumerMember, now: float) -> str:
    """What a worker that has not finished waits for."""
    quiet = f"last moved {now - member.moved_at:.1f} s ago"
    if member.state is not ConsumerState.PULLING:
        waits = "its `sync` call, to write in place" if member.writes_live else "its follower to begin"
        return f"worker {member.worker} has not begun to pull: waiting for {waits} ({quiet})"
    done, total = format_bytes(member.bytes_done), format_bytes(member.facts.bytes_total)
    return (
        f"worker {member.worker} is pulling: {done} of {total} are in place, waiting for "
        f"{member.waits_for or 'its first reads'} ({quiet})"
    )


def _rank_lines(epoch: Epoch, workers: list[str]) -> list[str]:
    """Where workers read by themselves, what ranks in `publish` wait for is that these hold everything."""
    lines = [
        f"trainer rank {rank} has begun to publish version {epoch.version} and not come to wait for its end"
        for rank in sorted(epoch.ranks - epoch.ended)
    ]
    waiting = ", ".join(str(rank) for rank in sorted(epoch.ranks & epoch.ended))
    if waiting and workers:
        readers = ", ".join(f"worker {worker}" for worker in sorted(workers))
        verb = "has" if len(workers) == 1 else "have"
        lines.append(
            f"trainer ranks {waiting} wait until {readers} {verb} read version {epoch.version} out of their memory"
        )
    return lines


def _producer_line(
    rank: int, ledger: LedgerSnapshot | str, epoch: Epoch, consumers: Mapping[int, ConsumerMember]
) -> str:
    if isinstance(ledger, str):
        return f"trainer rank {rank}: {ledger}"
    if ledger.epoch != epoch.epoch or not ledger.unfreed:
        return (
            f"trainer rank {rank} has published nothing that is not freed; waiting for the rank itself to publish or "
            f"end ({ledger.seconds_since_progress:.1f} s without progress)"
        )
    shown = [
        f"group {group} by {', '.join(sorted(_name(cid, consumers) for cid in who))}"
        for group, who in list(ledger.unfreed.items())[:_GROUPS_SHOWN]
    ]
    more = len(ledger.unfreed) - len(shown)
    return (
        f"trainer rank {rank} waits for free signals: {'; '.join(shown)}{f'; and {more} more groups' if more else ''} "
        f"({ledger.seconds_since_progress:.1f} s without progress)"
    )


def _name(consumer_id: int, consumers: Mapping[int, ConsumerMember]) -> str:
    member = consumers.get(consumer_id)
    return f"worker {member.worker}" if member else f"consumer {consumer_id} (gone)"


def who_holds_others_up(moved_at: Mapping[int, float], some_are_done: bool, now: float, patience_s: float) -> list[int]:
    """Consumers that stand still while others move; nobody, if nobody moves.

    Args:
        moved_at: when each consumer that is not done moved last, in seconds of the clock of `now`.
        some_are_done: others wait for these with all their work behind them.
        patience_s: standing still for longer is a stall; who moved within half of it moves. In between nobody can
            tell yet: two that stopped together are never the reason to evict the one that stopped first.
    """
    stalled = [consumer for consumer, at in moved_at.items() if now - at > patience_s]
    others_move = some_are_done or any(now - at < patience_s / 2 for at in moved_at.values())
    return stalled if others_move else []
