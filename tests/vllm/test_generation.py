"""Requests while versions change: which version made which tokens, by policy, and nothing from an old cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from tests.vllm.engines import PROMPTS, following, options
from tests.vllm.models import read
from weightsync.service import Publisher, ServiceHandle, StateDictSource, StateDictTarget, Subscriber
from weightsync.service.vllm import EngineFollower

Checkpoints = Callable[[str, int], Path]
SEEDS = {1: 11, 2: 12, 3: 13}
"""version -> seed of its checkpoint."""


@pytest.fixture
def service(
    make_service: Callable[..., ServiceHandle], reachable: None, monkeypatch: pytest.MonkeyPatch
) -> ServiceHandle:
    handle = make_service(stall_timeout_s=120.0)
    monkeypatch.setenv("WEIGHTSYNC_SERVICE", handle.name)
    return handle


class Trainer:
    """Publishes checkpoints from this process."""

    def __init__(self, service: ServiceHandle, checkpoints: Checkpoints) -> None:
        self._values = {version: read(checkpoints("llama", seed)) for version, seed in SEEDS.items()}
        self._tensors = {name: torch.zeros_like(tensor) for name, tensor in self._values[1].items()}
        self._publisher = Publisher(service, 0, 1, StateDictSource(self._tensors))

    async def publish(self, version: int) -> None:
        for name, tensor in self._tensors.items():
            tensor.copy_(self._values[version][name])
        await asyncio.to_thread(self._publisher.publish, version)

    def close(self) -> None:
        self._publisher.close()


@asynccontextmanager
async def served(
    service: ServiceHandle, checkpoints: Checkpoints, in_flight: Any, install: str = "shadow", **more: Any
) -> AsyncIterator[tuple[AsyncLLM, EngineFollower, Trainer]]:
    """An engine that serves version 1 and follows."""
    trainer = await asyncio.to_thread(Trainer, service, checkpoints)
    arguments = AsyncEngineArgs(**options(checkpoints("llama", 1), **more), weight_transfer_config=following())
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        async with EngineFollower(engine, service, name="engine0", in_flight=in_flight, install=install) as follower:
            await trainer.publish(1)
            await follower.wait_for(1, timeout_s=60)
            yield engine, follower, trainer
    finally:
        engine.shutdown()
        trainer.close()


async def generate(engine: AsyncLLM, prompt: Any, tokens: int, name: str) -> Any:
    """The finished output of one request."""
    wanted = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True)
    async for output in engine.generate(prompt, wanted, request_id=name):
        last = output
    return last.outputs[0]


def versions_of(completion: Any) -> list[str]:
    return [span.version for span in completion.weight_versions or []]


def test_an_engine_that_pulls_in_place_follows(service: ServiceHandle, checkpoints: Checkpoints) -> None:
    async def scene() -> list[Any]:
        async with served(service, checkpoints, "drain", "in_place") as (engine, follower, trainer):
            found = [await generate(engine, PROMPTS[0], 12, "1")]
            for version in (2, 3):
                await trainer.publish(version)
                assert await follower.wait_for(version, timeout_s=60) == version
                found.append(await generate(engine, PROMPTS[0], 12, str(version)))
            return found

    found = asyncio.run(scene())
    assert [versions_of(completion) for completion in found] == [["1"], ["2"], ["3"]]
    assert len({tuple(completion.token_ids) for completion in found}) == 3


def test_an_engine_left_out_of_a_sync_goes_on_with_what_it_has(
    service: ServiceHandle, checkpoints: Checkpoints
) -> None:
    """It is not paused for a version that it cannot have, and takes the next one."""
    held = {name: torch.zeros_like(tensor) for name, tensor in read(checkpoints("llama", 1)).items()}

    async def scene() -> tuple[int | None, list[Any]]:
        async with served(service, checkpoints, "drain") as (engine, follower, trainer):
            with Subscriber(service, "late", StateDictTarget(held), install="in_place") as late:
                publishing = asyncio.create_task(trainer.publish(2))
                while (epoch := service.status().epoch) is None or len(epoch.waiting_for) != 1:
                    await asyncio.sleep(0.05)  # the engine has it, and `late` has not begun
                service.evict("engine0-dp0-rank0", "a test")
                await asyncio.to_thread(late.sync, 2)
                await publishing
            found = []
            for number in range(20):  # for some time after the version that it missed
                async with asyncio.timeout(30):
                    found.append(await generate(engine, PROMPTS[0], 4, f"missed-{number}"))
                await asyncio.sleep(0.1)
            missed = follower.version
            await trainer.publish(3)
            await follower.wait_for(3, timeout_s=60)
            return missed, [*found, await generate(engine, PROMPTS[0], 4, "next")]

    missed, found = asyncio.run(scene())
    assert missed == 1
    assert [versions_of(completion) for completion in found] == [["1"]] * 20 + [["3"]]


@pytest.mark.parametrize("in_flight", ["drain", "abort"])
def test_no_response_mixes_two_versions(service: ServiceHandle, checkpoints: Checkpoints, in_flight: str) -> None:
    async def scene() -> tuple[list[Any], dict[int, Any], list[int]]:
        async with served(service, checkpoints, in_flight) as (engine, follower, trainer):
            alone = {1: await generate(engine, PROMPTS[0], 48, "alone-1")}
            stop, done, pauses = asyncio.Event(), [], []

            async def client(number: int) -> None:
                count = 0
                while not stop.is_set():
                    done.append(await generate(engine, PROMPTS[0], 48, f"{number}-{count}"))
                    count += 1

            clients = [asyncio.create_task(client(number)) for number in range(3)]
            for version in (2, 3):
                await asyncio.sleep(0.5)
                await trainer.publish(version)
                pauses.append(await follower.wait_for(version, timeout_s=60))
                alone[version] = await generate(engine, PROMPTS[0], 48, f"alone-{version}")
            stop.set()
            await asyncio.gather(*clients)
            return done, alone, pauses

    done, alone, installed = asyncio.run(scene())
    done = [completion for completion in done if completion.token_ids]  # some are aborted before they begin
    assert installed == [2, 3]
    assert {versions_of(completion)[0] for completion in done} == {"1", "2", "3"}
    for completion in done:
        assert len(versions_of(completion)) == 1
        whole = tuple(alone[int(versions_of(completion)[0])].token_ids)
        assert tuple(completion.token_ids) == whole[: len(completion.token_ids)]
    reasons = {completion.finish_reason for completion in done}
    assert reasons == ({"length"} if in_flight == "drain" else {"length", "abort"})


def test_kept_requests_say_which_version_made_which_tokens(service: ServiceHandle, checkpoints: Checkpoints) -> None:
    async def scene() -> Any:
        async with served(service, checkpoints, "keep") as (engine, follower, trainer):
            request = asyncio.create_task(generate(engine, PROMPTS[0], 200, "long"))
            await asyncio.sleep(0.5)
            await trainer.publish(2)
            await follower.wait_for(2, timeout_s=60)
            assert not request.done()
            return await request

    completion = asyncio.run(scene())
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 200
    assert versions_of(completion) == ["1", "2"]


def test_prefix_caches_do_not_answer_from_the_version_before(
    service: ServiceHandle, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt before and after; and, without clearing, the wrong answer that this guards against."""
    prompt = {"prompt_token_ids": [(7 * i) % 241 + 3 for i in range(160)]}
    clears = AsyncLLM.pause_generation

    async def scene() -> dict[str, tuple[float, ...]]:
        found = {}
        async with served(service, checkpoints, "drain", enable_prefix_caching=True) as (engine, follower, trainer):
            found["1"] = _logprobs(await generate(engine, prompt, 4, "1"))
            await trainer.publish(2)
            await follower.wait_for(2, timeout_s=60)
            found["2"] = _logprobs(await generate(engine, prompt, 4, "2"))
            await engine.reset_prefix_cache()
            found["2 with an empty cache"] = _logprobs(await generate(engine, prompt, 4, "2e"))

            monkeypatch.setattr(
                AsyncLLM,
                "pause_generation",
                lambda self, *, mode, clear_cache: clears(self, mode=mode, clear_cache=False),
            )
            await trainer.publish(3)
            await follower.wait_for(3, timeout_s=60)
            found["3 uncleared"] = _logprobs(await generate(engine, prompt, 4, "3"))
            await engine.reset_prefix_cache()
            found["3 with an empty cache"] = _logprobs(await generate(engine, prompt, 4, "3e"))
        return found

    found = asyncio.run(scene())
    assert found["1"] != found["2"]
    assert found["2"] == found["2 with an empty cache"]
    assert found["3 uncleared"] != found["3 with an empty cache"]


def _logprobs(completion: Any) -> tuple[float, ...]:
    return tuple(step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True))
