"""Runtimes on different releases of torch share this package."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys
import polyxla_tpu
names = [one.name for one in pkgutil.walk_packages(polyxla_tpu.__path__, "polyxla_tpu.")]
assert len(names) > 15
for name in names:
    importlib.import_module(name)
print({name.partition(".")[0] for name in sys.modules} & {"torch", "torch_xla", "polyxla_bridge"})
"""


def test_no_module_imports_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"
