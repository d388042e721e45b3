"""Which functions of the table a framework calls: for tests that no function it needs is missing."""

from __future__ import annotations

import os
from pathlib import Path


class CallRecord:
    """Names of functions that were called, each once, in a file for each process.

    The functions in C are not among them: they are called in threads that must not wait for Python.

    Args:
        folder: where the files are; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[tuple[int, str]] = set()

    def add(self, name: str, is_missing: bool) -> None:
        """Record a call; `is_missing` says that the function was answered with "not implemented"."""
        # A fork records for itself.
        process = os.getpid()
        if (process, name) not in self._known:
            self._known.add((process, name))
            with (self._folder / str(process)).open("a") as file:
                file.write(f"{name}{' missing' if is_missing else ''}\n")


def recorded(folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of the functions that were called, and of those that are missing."""
    lines = {line for file in folder.iterdir() for line in file.read_text().splitlines()}
    missing = {line.partition(" ")[0] for line in lines if line.endswith(" missing")}
    return {line for line in lines if not line.endswith(" missing")} | missing, missing
