"""Whether what the warm process has imported is still what a fresh Python would import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_IMPORTABLE = (".py", ".so", ".pth", ".egg-link")
_METADATA = (".dist-info", ".egg-info")

Stamp = tuple[int, int, int]
"""A file's time of modification in nanoseconds, size and inode; an upgrade by a link changes the last."""


class ImportedFiles:
    """The files of everything that this process has imported or mapped, as they were.

    Args:
        path: the entries of `sys.path` that every program has; a package installed there makes it stale.
    """

    def __init__(self, path: Sequence[str]) -> None:
        found = {*_module_files(), *_mapped_files(), *_interpreter_files()}
        # torch writes a module into a temporary directory, which the first program to end removes.
        written = {entry for entry in sys.path if entry not in path}
        self._files = {name: _stamp(name) for name in found if os.path.dirname(name) not in written}
        self._directories = {name: (_stamp(name), _listing(name)) for name in path}

    def change(self) -> str | None:
        """Describe the first change; None if there is none. Takes some 20 ms for torch and torch_xla."""
        for name, stamp in self._files.items():
            if _stamp(name) != stamp:
                return f"{name} has changed"
        for name, (stamp, listing) in self._directories.items():
            # Its time also changes by files that are not modules.
            if _stamp(name) != stamp and _listing(name) != listing:
                return f"what is installed in {name} has changed"
        return None


def shadowed(directory: str) -> str | None:
    """Return a module that a program in `directory` would import from there, but was imported elsewhere."""
    here = os.path.realpath(directory)
    tops = {name: module for name, module in list(sys.modules.items()) if "." not in name}
    for found in _listing(here):
        name = found[0].partition(".")[0]
        file = getattr(tops.get(name), "__file__", None)
        if file and name != "__main__" and not os.path.realpath(file).startswith(os.path.join(here, name)):
            return os.path.join(here, found[0])
    return None


def _module_files() -> Iterable[str]:
    found = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [os.path.abspath(name) for name in found if isinstance(name, str)]


def _mapped_files() -> Iterable[str]:
    """Return the shared libraries, which only the kernel knows."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    names = (parts[5] for parts in fields if len(parts) == 6)
    return [name for name in names if name.startswith("/") and not name.endswith(" (deleted)")]


def _interpreter_files() -> Iterable[str]:
    return [os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")]


def _stamp(name: str) -> Stamp | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _listing(directory: str) -> list[tuple[str, int]]:
    """Return what can be imported from a directory, and the installed distributions with their times."""
    try:
        with os.scandir(directory) as entries:
            return sorted(found for entry in entries if (found := _importable(entry)))
    except OSError:
        return []


def _importable(entry: os.DirEntry[str]) -> tuple[str, int] | None:
    if entry.name.endswith(_METADATA) or entry.name.endswith(".pth"):
        return entry.name, entry.stat().st_mtime_ns
    is_package = entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))
    return (entry.name, 0) if is_package or entry.name.endswith(_IMPORTABLE) else None
