"""What runtimes on torch_xla have in common; such a runtime brings torch_xla, which core does without.

Its modules are heavy: imported in replicas and by what torch_xla imports of a runtime, never by
``import polyxla``. Since torch_xla's import comes to them, `first_touch` and `launches` can be imported only
after it, or by it.
"""

from __future__ import annotations

import sys


def refuse_touched(launcher: str) -> None:
    """Refuse to launch from a process whose own torch_xla already uses a device. Light where it has none.

    Raises:
        UsageError: it does; the error names the place that touched it first.
    """
    if "torch_xla" in sys.modules:
        from polyxla.xla import first_device_use

        first_device_use.refuse(launcher)
