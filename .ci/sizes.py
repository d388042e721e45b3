#!/usr/bin/env python3
"""Find directories, a package and classes that have grown too large; print them, and fail."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "packages" / "core" / "src"
MODULES_PER_DIRECTORY = 14
CORE_LINES = 8000
PUBLIC_METHODS = 25


def problems() -> Iterator[str]:
    """Describe everything that is too large."""
    # What protoc has generated is nobody's to read.
    sources = [path for path in ROOT.glob("packages/*/src/**/*.py") if "_pb2" not in path.name]
    modules = Counter(path.parent for path in sources if path.name != "__init__.py")
    for directory, count in sorted(modules.items()):
        if count > MODULES_PER_DIRECTORY:
            yield f"{directory.relative_to(ROOT)}: {count} modules, at most {MODULES_PER_DIRECTORY}"
    core = [path for path in sources if path.is_relative_to(CORE)]
    lines = sum(len(path.read_text().splitlines()) for path in core)
    if lines >= CORE_LINES:
        yield f"packages/core: {lines} lines, fewer than {CORE_LINES} are allowed"
    yield from large_classes(core)


def large_classes(paths: list[Path]) -> Iterator[str]:
    """Describe the classes that have too many public methods, inherited ones included."""
    classes = {
        node.name: (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }

    def methods(name: str) -> set[str]:
        if name not in classes:
            return set()
        _, node = classes[name]
        functions = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
        inherited = (methods(base.id) for base in node.bases if isinstance(base, ast.Name))
        return {one.name for one in functions if not one.name.startswith("_")}.union(*inherited)

    for name, (where, _) in classes.items():
        if (count := len(methods(name))) > PUBLIC_METHODS:
            yield f"{where}: {name} has {count} public methods, at most {PUBLIC_METHODS}"


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))
