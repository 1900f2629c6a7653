"""Errors as `application/problem+json` (RFC 9457): what happened, and what to do about it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from weightsync.protocol.errors import NothingRunningError, UnknownMemberError

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """Body of every answer that is not a success."""

    type: str = Field("about:blank", description="the title says it all", examples=["about:blank"])
    title: str = Field(description="the status in words", examples=["Conflict"])
    status: int = Field(description="the HTTP status code", examples=[409])
    detail: str = Field(description="what happened", examples=["no sync of version 7 is running; none is"])
    errors: list[str] = Field(default_factory=list, description="fields that were refused, one line each")


class ProblemError(Exception):
    """Raised in a route: becomes a problem."""

    def __init__(self, status: HTTPStatus, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


def documented(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: these statuses, and those every route has."""
    everywhere = (
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.SERVICE_UNAVAILABLE,
    )
    schema = {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}
    return {int(status): {"description": status.phrase, "content": schema} for status in (*everywhere, *statuses)}


def answer(
    status: int, detail: str, errors: list[str] | None = None, headers: dict[str, str] | None = None
) -> Response:
    """The response of a problem."""
    title = HTTPStatus(status).phrase
    problem = Problem(type="about:blank", title=title, status=status, detail=detail, errors=errors or [])
    return Response(problem.model_dump_json(), status, headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Turn every error of an application into a problem."""

    @app.exception_handler(ProblemError)
    async def _problem(_: Request, error: ProblemError) -> Response:
        return answer(error.status, error.detail, headers=error.headers)

    @app.exception_handler(UnknownMemberError)
    async def _unknown(_: Request, error: UnknownMemberError) -> Response:
        return answer(HTTPStatus.NOT_FOUND, str(error))

    @app.exception_handler(NothingRunningError)
    async def _nothing(_: Request, error: NothingRunningError) -> Response:
        return answer(HTTPStatus.CONFLICT, str(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        errors = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        return answer(HTTPStatus.UNPROCESSABLE_ENTITY, "the request is not valid; nothing was done", errors)

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> Response:
        return answer(error.status_code, str(error.detail), headers=dict(error.headers or {}))
