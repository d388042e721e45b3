"""What ``polyxla fits`` shows while it works: on a terminal one line that changes, else a line per phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyxla.plugin import say


class Progress:
    """Shows phases and their details on standard error.

    Args:
        status: Rich's, on a terminal; None elsewhere.
    """

    def __init__(self, status: Any = None) -> None:
        self._status = status
        self._phase = ""

    def phase(self, text: str) -> None:
        """Begin a phase."""
        self._phase = text
        if self._status is None:
            say(text)
        else:
            self._status.update(text)

    def detail(self, text: str) -> None:
        """Show how far the phase is; on a terminal only."""
        if self._status is not None:
            self._status.update(f"{self._phase}: {text}")


@contextmanager
def shown() -> Iterator[Progress]:
    """Show progress until the end of the block."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield Progress()
        return
    with console.status("") as status:
        yield Progress(status)
