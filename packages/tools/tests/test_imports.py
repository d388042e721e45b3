"""The command line of every user has this plugin: it must cost little."""

from __future__ import annotations

from polyxla_testing.processes import printed_by

CODE = """
import importlib, pkgutil, sys
import polyxla_tools.doctor
names = [found.name for found in pkgutil.iter_modules(polyxla_tools.doctor.__path__, "polyxla_tools.doctor.")]
assert len(names) > 10
for name in names:
    importlib.import_module(name)
found = {name.partition(".")[0] for name in sys.modules}
print(found & {"torch", "torch_xla", "torch_tpu", "jax", "polyxla_bridge", "polyxla_pjrt"})
"""
PLUGIN = """
import sys
import polyxla_tools.plugin
print({"typer", "rich", "packaging", "yaml"} & set(sys.modules))
"""


def test_no_module_of_doctor_imports_a_framework_or_a_runtime() -> None:
    assert printed_by(CODE) == "set()\n"


def test_the_plugin_imports_nothing_heavy() -> None:
    assert printed_by(PLUGIN) == "set()\n"
