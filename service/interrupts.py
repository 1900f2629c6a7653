"""Ctrl-C and SIGTERM for commands that start things and must not leave them behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


class Interrupts:
    """What Ctrl-C and SIGTERM do while a command runs, and whether one came.

    Ray's processes get the Ctrl-C of a terminal too, and their end may be noticed first: an error that follows an
    interrupt is that interrupt.

    Example:
        >>> interrupts = Interrupts()
        >>> with interrupts.raised():  # as KeyboardInterrupt
        ...     with interrupts.noted():  # here nothing interrupts: a clean-up
        ...         pass
        >>> interrupts.caused(ValueError())
        False
    """

    def __init__(self) -> None:
        self.seen = False

    def caused(self, error: BaseException) -> bool:
        """Whether an error is due to an interrupt."""
        return self.seen or isinstance(error, KeyboardInterrupt)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """An interrupt raises KeyboardInterrupt inside the block."""
        with _on_interrupt(self._raise):
            yield

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """An interrupt is noted inside the block, and does nothing else."""
        with _on_interrupt(self._note):
            yield

    def _note(self) -> None:
        self.seen = True

    def _raise(self) -> None:
        self.seen = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def _on_interrupt(react: Callable[[], None]) -> Iterator[None]:
    def handle(*_: object) -> None:
        react()

    before = {sig: signal.signal(sig, handle) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
