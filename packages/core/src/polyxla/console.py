"""Messages to the user: one line each, on standard error."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn
from unicodedata import category

from polyxla.errors import PolyxlaError

_OBEYED = ("Cc", "Cf", "Cs")
"""Categories of characters: control, format (such as what turns the direction of writing), surrogates."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports a program that SIGINT has ended."""


def say(text: str) -> None:
    """Print one line on standard error; standard output belongs to the user's program."""
    # Written at once, because print writes the end of the line separately where Python does not buffer:
    # lines of two replicas would be mixed. Flushed, because processes that fail end with os._exit.
    sys.stderr.write(f"polyxla: {printable(text)}\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """Return a text in which characters that a terminal obeys are spelt out, except ends of lines.

    Parts of it may come from others: the name of a job that holds a worker, the answer of a server.
    """
    return "".join(
        char if char in "\n\t" or category(char) not in _OBEYED else ascii(char)[1:-1] for char in text
    )


def drop_output() -> None:
    """Discard standard output, which cannot be written: at its exit, Python would try once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@functools.cache
def say_once(text: str) -> None:
    """Print one line on standard error, once per process and text."""
    say(text)


@contextlib.contextmanager
def ended_by_errors() -> Iterator[None]:
    """End the program at an error of polyxla, with its line.

    For code that a framework calls, which would print its own traceback above the error, or continue
    without the result.
    """
    try:
        yield
    except PolyxlaError as error:
        say(f"error: {error}")
        raise SystemExit(error.exit_code) from None


def end_interrupted() -> NoReturn:
    """End the program after Ctrl-C, with one line."""
    # A second Ctrl-C ends the process silently, whatever its exit functions do.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    say("interrupted")
    sys.exit(INTERRUPTED)
