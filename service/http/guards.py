"""What routes depend on: the request is let in, and its size is known."""

from __future__ import annotations

from typing import cast

from fastapi import Request

from weightsync.service.http.access import Gate, check_size


def may_read(request: Request) -> None:
    """Raises ProblemError unless the request may read."""
    cast(Gate, request.app.state.gate).admit(request, "read")


def may_operate(request: Request) -> None:
    """Raises ProblemError unless the request may operate, and its body is small."""
    cast(Gate, request.app.state.gate).admit(request, "operate")
    check_size(request)
