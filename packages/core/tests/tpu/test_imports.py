"""Runtimes on different releases of torch share this package; only those on torch_xla import its `xla`."""

from __future__ import annotations

from polyxla_testing.processes import printed_by

CODE = """
import importlib, pkgutil, sys
import polyxla.tpu
names = [module.name for module in pkgutil.walk_packages(polyxla.tpu.__path__, "polyxla.tpu.")]
names = [name for name in names if not name.startswith("polyxla.tpu.xla")]
assert len(names) > 15
for name in names:
    importlib.import_module(name)
print({name.partition(".")[0] for name in sys.modules} & {"torch", "torch_xla", "polyxla_bridge"})
"""


def test_no_module_of_all_runtimes_imports_torch() -> None:
    assert printed_by(CODE) == "set()\n"
