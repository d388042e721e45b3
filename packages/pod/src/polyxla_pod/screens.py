"""Where lines are shown: as plain lines, or above a live table on a terminal."""

from __future__ import annotations

import errno
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyxla.plugin import drop_output, say
from polyxla_pod.folding import FoldedLine
from polyxla_pod.pipeline import HostState

if TYPE_CHECKING:
    from rich.table import Table

ROWS_LEFT_FREE = 8
"""Rows of a terminal that the table leaves to lines."""
GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of a pipe without a reader, and of a terminal that was closed."""
REFRESHES_PER_S = 4.0
"""How often the table is drawn, per second."""


class PlainScreen:
    """Prints lines on the streams that they came from.

    Args:
        errors_only: whether all lines go to standard error, because standard output belongs to a document.
    """

    def __init__(self, *, errors_only: bool = False) -> None:
        self._errors_only = errors_only
        self._is_full = False

    def show(self, line: FoldedLine) -> None:
        """Print one line.

        Raises:
            OSError: nothing reads the stream any more.
        """
        try:
            # Flush, so that a pipe's reader, such as tee, sees each line when it is printed.
            print(
                line, file=sys.stderr if self._errors_only or line.stream == "err" else sys.stdout, flush=True
            )
        except OSError as error:
            if error.errno in GONE:
                raise
            # A job is worth more than a file of its output, on a disk that is full.
            if not self._is_full:
                self._is_full = True
                say(f"warning: the output cannot be written ({error.strerror}): it lacks lines from here on")

    def close(self) -> None:
        """Let the process end without a further attempt to write what the disk did not take."""
        if self._is_full:
            drop_output()


class LiveScreen:
    """Prints lines above a table with a row for each host.

    Args:
        states: the hosts, which change while the table is shown.
    """

    def __init__(self, states: Sequence[HostState]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._states = states
        # Lines are shown as they are: by default, rich makes an emoji of ":100:".
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._live = Live(
            get_renderable=self._table,
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
        )
        self._live.start()

    def show(self, line: FoldedLine) -> None:
        """Print one line above the table."""
        self._console.print(str(line))

    def close(self) -> None:
        """Remove the table."""
        self._live.stop()

    def _table(self) -> Table:
        return host_table(self._states, max(self._console.height - ROWS_LEFT_FREE, 1))


def host_table(states: Sequence[HostState], rows: int) -> Table:
    """Return a table of hosts. Hosts that do not run or are behind take precedence.

    Args:
        states: all hosts.
        rows: how many of them fit; a last row counts the others.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for name in ("", "host", "state", "step", "loss", "steps/s"):
        table.add_column(name, no_wrap=True)
    table.add_column("last line", no_wrap=True, overflow="ellipsis", ratio=1)
    shown, rest = chosen_rows(states, rows)
    for number in shown:
        state, progress = states[number], states[number].progress
        step = "" if progress.step is None else str(progress.step)
        rate = "" if progress.steps_per_s is None else f"{progress.steps_per_s:.3g}"
        cells = [f"w{number}", state.name, state.state, step, progress.loss or "", rate, progress.last_line]
        table.add_row(*(Text(cell) for cell in cells))
    if rest:
        counts = Counter(states[number].state for number in rest)
        summary = ", ".join(f"{count} {state}" for state, count in counts.most_common())
        table.add_row("", Text(f"{len(rest)} more"), Text(summary))
    return table


def chosen_rows(states: Sequence[HostState], rows: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the hosts to show, in order, and of the others."""
    if len(states) <= rows:
        return list(range(len(states))), []

    def rank(number: int) -> tuple[bool, int]:
        state = states[number]
        return state.state == "running", state.progress.step or 0

    # Hosts that have failed or are slow are the ones to look at.
    ranked = sorted(range(len(states)), key=rank)
    return sorted(ranked[: rows - 1]), sorted(ranked[rows - 1 :])
