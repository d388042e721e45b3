#!/usr/bin/env python3
"""Find public names that the built API pages lack; print them, and fail.

The argument is the directory of the site. The names in the ``__all__`` of a package or subpackage are public.
"""

from __future__ import annotations

import ast
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def public_names() -> Iterator[str]:
    """Yield each public name with its package."""
    for path in sorted(ROOT.glob("packages/*/src/**/__init__.py")):
        package = ".".join(path.parts[path.parts.index("src") + 1 : -1])
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
                yield from (f"{package}.{name}" for name in ast.literal_eval(statement.value))


def shown_names(site: Path) -> set[str]:
    """Return the names in the inventory that mkdocstrings writes beside the pages.

    Source: Sphinx's inventory, version 2: four lines of text, then compressed lines that begin with a name.
    """
    content = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ", 1)[0] for line in zlib.decompress(content).decode().splitlines()}


if __name__ == "__main__":
    names = list(public_names())
    missing = sorted(set(names) - shown_names(Path(sys.argv[1])))
    print("\n".join(f"{name} is on no page of docs/api" for name in missing), end="\n" if missing else "")
    sys.exit(bool(missing) or not names)
