#!/usr/bin/env python3
"""Find modules that import each other in a circle; print one circle, and fail.

Imports inside functions and under TYPE_CHECKING count, and so do a package's public names.
import-linter checks the order of the layers: [tool.importlinter] of pyproject.toml.

The packages' sources are read, not imported.
"""

from __future__ import annotations

import graphlib
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent


def circle(packages: list[str]) -> list[str]:
    """Return the modules of a circle, the first one again at the end; empty when there is none."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        # It lists each module behind the one that imports it.
        modules: list[str] = error.args[1]
        return modules[::-1]
    return []


if __name__ == "__main__":
    paths = sorted(path.parent for path in ROOT.glob("packages/*/src/*/__init__.py"))
    # grimp looks for packages where Python would.
    sys.path[:0] = [str(path.parent) for path in paths]
    found = circle([path.name for path in paths])
    if found:
        sys.exit(f"these modules import each other: {' imports '.join(found)}")
