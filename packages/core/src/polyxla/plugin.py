"""The names that plugins are written with: runtimes, commands, listeners, and the packages of this project.

``plugin.pyi``, beside this file, lists them by topic: the one list for readers, type checkers and Python.
Apart from them and from the names in ``polyxla`` itself, anything may change in any release.

A name is imported from its module when it is first used: some need torch or torch_xla, which a command must
not import before it needs them.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any


@functools.cache
def _homes() -> dict[str, tuple[str, str]]:
    """Return each name's module, and its name there."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module)
    return {
        alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names
    }


def __getattr__(name: str) -> Any:
    if name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, original = _homes()[name]
    # With `fromlist`, a submodule that is not imported yet is found too.
    found = getattr(__import__(module, fromlist=[original]), original)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(_homes())
