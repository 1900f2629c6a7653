"""`vllm serve` that follows a service: an endpoint plugin, which vLLM loads only where it is named.

    VLLM_PLUGINS=weightsync vllm serve MODEL --weight-transfer-config '{"backend": "weightsync"}'

Set by environment: `WEIGHTSYNC_SERVICE`, `WEIGHTSYNC_ENGINE` (its name in the service), `WEIGHTSYNC_IN_FLIGHT` and
`WEIGHTSYNC_INSTALL`, as `EngineFollower` takes them. `GET /weightsync` says which version is served; it answers 503
before the first, so that a readiness probe can use it.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.v1.engine.async_llm import AsyncLLM

from weightsync.service.settings_variables import ENGINE_VARIABLE, IN_FLIGHT_VARIABLE, INSTALL_VARIABLE
from weightsync.service.vllm.backend import default_service
from weightsync.service.vllm.follower import EngineFollower, InFlight
from weightsync.service.vllm.plugin import BACKEND


class ServerPlugin:
    """What vLLM's API server makes of the entry point."""

    name = BACKEND
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add `GET /weightsync`."""
        app.add_api_route("/weightsync", _served, methods=["GET"])

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Let the server's engine join and follow.

        Raises:
            ValueError: the server was started without the backend, or a variable has no such value.
        """
        del args
        config = getattr(engine_client, "vllm_config", None)
        transfer = getattr(config, "weight_transfer_config", None)
        if transfer is None or transfer.backend != BACKEND:
            raise ValueError(
                f"the plugin weightsync follows a service with the backend of that name; start the server with "
                f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\', or without VLLM_PLUGINS=weightsync'
            )
        state.weightsync = EngineFollower(
            cast(AsyncLLM, engine_client),
            default_service(),
            name=os.environ.get(ENGINE_VARIABLE) or None,
            in_flight=cast(InFlight, os.environ.get(IN_FLIGHT_VARIABLE) or "drain"),
            install=os.environ.get(INSTALL_VARIABLE) or "shadow",
        )
        await state.weightsync.start()


async def _served(request: Request) -> Any:
    """The engine's name and version."""
    follower: EngineFollower = request.app.state.weightsync
    said = {"engine": follower.name, "service": follower.service, "version": follower.version}
    return JSONResponse(said, status_code=503 if follower.version is None else 200)
