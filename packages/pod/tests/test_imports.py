"""A command line and a host must not pay for torch, which this package does not use."""

from __future__ import annotations

from polyxla_testing.processes import printed_by

CODE = """
import importlib, pkgutil, sys
import polyxla_pod
names = [found.name for found in pkgutil.walk_packages(polyxla_pod.__path__, "polyxla_pod.")]
assert len(names) > 20
for name in names:
    importlib.import_module(name)
found = {name.partition(".")[0] for name in sys.modules}
print(found & {"torch", "torch_xla", "torch_tpu", "polyxla_bridge"})
"""
PLUGIN = """
import sys
import polyxla_pod.hookspecs
import polyxla_pod.plugin
print({"typer", "rich", "asyncio"} & set(sys.modules))
"""


def test_no_module_imports_torch() -> None:
    assert printed_by(CODE) == "set()\n"


def test_the_plugin_imports_nothing_heavy() -> None:
    assert printed_by(PLUGIN) == "set()\n"
