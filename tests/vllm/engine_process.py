"""An engine in a process of its own, which follows a service and answers on demand.

    python -m tests.vllm.engine_process FOLDER SERVICE NAME

Writes a line of JSON whenever its version changes: {"version": 3, "tokens": [...]}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from tests.vllm.engines import PROMPTS, following, options
from tests.vllm.test_generation import generate
from weightsync.service.vllm import EngineFollower


async def main(folder: str, service: str, name: str) -> None:
    arguments = AsyncEngineArgs(**options(Path(folder)), weight_transfer_config=following())
    engine = AsyncLLM.from_engine_args(arguments)
    async with EngineFollower(engine, service, name=name) as follower:
        print(json.dumps({"ready": True}), flush=True)
        version = 0
        while True:
            version = await follower.wait_for(version + 1)
            completion = await generate(engine, PROMPTS[0], 12, f"{name}-{version}")
            made_by = [span.version for span in completion.weight_versions]
            print(
                json.dumps({"version": version, "made_by": made_by, "tokens": list(completion.token_ids)}), flush=True
            )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
