"""What a sync costs the registry in messages, counted with the real registry and stub members."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from simulated_fleet import TENSORS, SimulatedFleet


def test_a_sync_takes_two_calls_of_a_rank_and_four_of_a_worker_and_names_travel_once() -> None:
    ranks, workers = 5, 3

    async def scenario() -> None:
        fleet = SimulatedFleet(ranks, workers)
        await fleet.join()
        await fleet.sync()
        assert fleet.messages["names"] == ranks * TENSORS
        await asyncio.sleep(0)  # the workers' next long polls
        for apart_s in (0.0, 0.05):
            fleet.messages.clear()
            await fleet.sync(apart_s)
            await asyncio.sleep(0)
            assert fleet.messages == {
                "registry.begin_publish": ranks,
                "registry.end_publish": ranks,
                "registry.next_work": workers,
                "registry.start_pull": workers,
                "registry.pulled": workers,
                "registry.installed": workers,
                "producer.begin_sync": ranks,
                "producer.free_group": ranks * workers,
            }
        await fleet.rejoin(0)
        fleet.messages.clear()
        await fleet.sync()
        assert fleet.messages["names"] == ranks * TENSORS, "of a new layout, everybody gets them again"
        await fleet.leave()

    asyncio.run(scenario())
