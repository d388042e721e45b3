"""Messages to the user: one line each, on standard error."""

from __future__ import annotations

import functools
import signal
import sys
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports a program that SIGINT has ended."""


def say(text: str) -> None:
    """Print one line on standard error; standard output belongs to the user's program."""
    print(f"polyxla: {text}", file=sys.stderr, flush=True)


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
