"""Questions to a registry, from a process that may outlive it."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast

import ray
from fastapi import Request

from weightsync.actors.spawn import find_registry
from weightsync.protocol.errors import WeightsyncError
from weightsync.service.http.problems import ProblemError

ANSWERS_WITHIN_S = 5.0
"""A registry that is restarting answers nothing; a probe should hear so before its own time-out."""


class RegistryGateway:
    """The registry of one service, found by name at each question: it may restart, and so may this process."""

    def __init__(self, service: str) -> None:
        self.service = service

    async def ask(self, method: str, *arguments: Any, within_s: float = ANSWERS_WITHIN_S) -> Any:
        """What a method of the registry returns.

        Raises:
            ProblemError: 503, the registry is gone or does not answer.
            WeightsyncError: what the method raises.
        """
        registry = await asyncio.to_thread(find_registry, self.service)
        if registry is None:
            raise self._unreachable("it does not run")
        try:
            return await asyncio.wait_for(getattr(registry, method).remote(*arguments), within_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, WeightsyncError):
                raise error.cause from None
            raise
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self._unreachable(type(error).__name__) from error

    def _unreachable(self, why: str) -> ProblemError:
        return ProblemError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"the registry of service {self.service!r} does not answer ({why}); Ray restarts it if it died, "
            f"`weightsync up --name {self.service}` if it was stopped",
            {"Retry-After": "2"},
        )


def gateway(request: Request) -> RegistryGateway:
    """The one of the application that serves a request."""
    return cast(RegistryGateway, request.app.state.gateway)
