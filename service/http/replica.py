"""The application of this replica process.

Serve copies a deployment class into its replicas by value, and a module by name: what both the class and Serve's
builder must find lives here.
"""

from __future__ import annotations

from fastapi import FastAPI

_served: list[FastAPI] = []


def serve(app: FastAPI) -> None:
    """Called by the replica's `__init__`."""
    _served[:] = [app]


def application() -> FastAPI:
    """Called by Serve after the replica's `__init__`."""
    return _served[0]
