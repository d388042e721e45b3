"""``python -m polyxla.script``: be the main program, as python would, but say usage errors plainly.

A `UsageError` ends the program with its text and the script's line, exit code 2, no traceback; every
other exception is python's own business.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import traceback
from types import CodeType, ModuleType

from polyxla.errors import PolyxlaError
from polyxla.notices import say


def main() -> None:
    """Run the script or ``-m`` module that the arguments name, in the real ``__main__``."""
    del sys.argv[0]
    module = ModuleType("__main__")
    # Kept for good: what the program starts (threads, spawned workers) looks itself up here.
    sys.modules["__main__"] = module
    code = _module(module) if sys.argv[0] == "-m" else _script(module, sys.argv[0])
    try:
        exec(code, module.__dict__)
    except PolyxlaError as error:
        say(f"error: {error}{_line_of(error, module.__file__)}")
        sys.exit(error.exit_code)


def _script(module: ModuleType, path: str) -> CodeType:
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    module.__file__ = path
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    return loader.source_to_code(loader.get_data(path), path)


def _module(module: ModuleType) -> CodeType:
    del sys.argv[0]
    name = sys.argv[0]
    sys.path[0] = os.getcwd()
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    code = spec.loader.get_code(name) if spec and hasattr(spec.loader, "get_code") else None
    if spec is None or code is None:
        sys.exit(f"polyxla: error: there is no module {name!r} that can be run")
    module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
    module.__loader__ = spec.loader
    sys.argv[0] = spec.origin or name
    return code


def _line_of(error: BaseException, path: str | None) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"\n  at {path}:{lines[-1]}" if lines else ""


if __name__ == "__main__":
    main()
