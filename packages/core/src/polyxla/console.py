"""Messages to the user: one line each, on standard error."""

from __future__ import annotations

import functools
import signal
import sys
from typing import NoReturn
from unicodedata import category

_OBEYED = ("Cc", "Cf", "Cs")
"""Categories of characters: control, format (such as what turns the direction of writing), surrogates."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports a program that SIGINT has ended."""


def say(text: str) -> None:
    """Print one line on standard error; standard output belongs to the user's program."""
    print(f"polyxla: {printable(text)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return a text in which characters that a terminal obeys are spelt out, except ends of lines.

    Parts of it may come from others: the name of a job that holds a worker, the answer of a server.
    """
    return "".join(one if one in "\n\t" or category(one) not in _OBEYED else ascii(one)[1:-1] for one in text)


@functools.cache
def say_once(text: str) -> None:
    """Print one line on standard error, once per process and text."""
    say(text)


def end_interrupted() -> NoReturn:
    """End the program after Ctrl-C, with one line."""
    # A second Ctrl-C ends the process without a word, whatever its exit functions do.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    say("interrupted")
    sys.exit(INTERRUPTED)
