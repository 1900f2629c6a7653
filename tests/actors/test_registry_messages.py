"""What a sync costs the registry in messages, counted with the real registry and stub members."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from simulated_fleet import TENSORS, SimulatedFleet

RANKS, WORKERS = 5, 3


@pytest.mark.parametrize("one_sided", [True, False])
def test_a_sync_takes_two_calls_of_a_rank_and_three_of_a_worker_and_names_travel_once(one_sided: bool) -> None:
    """Producers hear of it only if some worker asks them for more than memory."""
    producers = {} if one_sided else {"producer.begin_sync": RANKS, "producer.free_group": RANKS * WORKERS}

    async def scenario() -> None:
        fleet = SimulatedFleet(RANKS, WORKERS, one_sided)
        await fleet.join()
        await fleet.sync()
        assert fleet.messages["names"] == RANKS * TENSORS
        await asyncio.sleep(0)  # the workers' next long polls
        for apart_s in (0.0, 0.05):
            fleet.messages.clear()
            await fleet.sync(apart_s)
            await asyncio.sleep(0)
            assert fleet.messages == {
                "registry.begin_publish": RANKS,
                "registry.end_publish": RANKS,
                "registry.next_work": WORKERS,
                "registry.pulled": WORKERS,
                "registry.installed": WORKERS,
                **producers,
            }
        await fleet.rejoin(0)
        fleet.messages.clear()
        await fleet.sync()
        assert fleet.messages["names"] == RANKS * TENSORS, "of a new layout, everybody gets them again"
        await fleet.leave()

    asyncio.run(scenario())
