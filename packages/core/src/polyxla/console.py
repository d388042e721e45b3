"""What polyxla says to a person while it works: one line each, on standard error."""

from __future__ import annotations

import functools
import sys


def say(text: str) -> None:
    """Print one line on standard error, which leaves standard output to the person's program."""
    print(f"polyxla: {text}", file=sys.stderr, flush=True)


@functools.cache
def say_once(text: str) -> None:
    """Print one line on standard error, the first time in this process only."""
    say(text)
