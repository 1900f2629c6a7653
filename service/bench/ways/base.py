"""What a way is: it opens, moves a version as often as it is asked to, and closes.

The thing to watch: only `move` is timed. Whatever is done once per layout (connections, registrations, plans,
buffers) belongs into `open`, for every way alike, and is warmed up by a first move that is not counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from weightsync.service.bench.layout import Layout
from weightsync.service.bench.stage import Cast


@dataclass(frozen=True)
class Needs:
    """Bytes a way takes beyond the members' own tensors, at most, so that what does not fit is not begun."""

    memory: int = 0
    shared_memory: int = 0


class Way(ABC):
    """One way to bring a version from the trainers to all workers.

    Args:
        key: how `--ways` names it.
        about: what it does, in one line.
    """

    own_members: ClassVar[bool] = False
    """It needs processes of its own, with Ray Direct Transport enabled, which end with its turn."""

    def __init__(self, key: str, about: str) -> None:
        self.key = key
        self.about = about

    def refusal(self, layout: Layout) -> str | None:
        """Why it cannot move this layout here, in one line; None if it can."""
        return None

    def needs(self, layout: Layout) -> Needs:
        return Needs()

    def open(self, cast: Cast) -> None:  # noqa: B027  (not every way has something to prepare)
        """Prepare everything that can be prepared once. Members' tensors stay where they are until `close`."""

    @abstractmethod
    def move(self, cast: Cast, version: int) -> dict[str, float]:
        """Bring the version to every worker; seconds by label, first the label of the whole."""

    def close(self, cast: Cast) -> None:  # noqa: B027
        """Give back what `open` took."""

    def set_version(self, cast: Cast, version: int) -> None:
        """Make a version in the trainers; not timed."""
        cast.set_version(version)

    def wrong(self, cast: Cast, version: int) -> list[str]:
        """What the workers hold that is not this version, in words; not timed."""
        return cast.wrong(version)


def missing_package(module: str, package: str) -> str | None:
    """Why an optional package cannot be used, in one line; None if it can."""
    import importlib

    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation raises whatever it likes
        return f"{package} cannot be used here: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None
