"""Messages to the user: one line each, on standard error."""

from __future__ import annotations

import functools
import sys


def say(text: str) -> None:
    """Print one line on standard error; standard output belongs to the user's program."""
    print(f"polyxla: {text}", file=sys.stderr, flush=True)


@functools.cache
def say_once(text: str) -> None:
    """Print one line on standard error, once per process and text."""
    say(text)
