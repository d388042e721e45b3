"""Shared by runtimes on torch_xla. Such a runtime requires torch_xla; core does not.

The modules are heavy. They are imported in replicas, and by the plugins that torch_xla imports, never by
``import polyxla``. Import torch_xla before `first_device_use` and `torch_xla_launch`, because torch_xla's own
import reaches these two through the plugins.
"""

from __future__ import annotations

import sys


def refuse_if_device_in_use(launcher: str) -> None:
    """Refuse to launch from a process whose torch_xla already uses a device. Does not import torch_xla.

    Raises:
        UsageError: the process uses a device; the error names the line that used it first.
    """
    if "torch_xla" in sys.modules:
        from polyxla.xla import first_device_use

        first_device_use.refuse(launcher)


launches: list[object] = []
"""What this process has launched."""


def has_run() -> bool:
    """Return whether this process has launched replicas or used a device."""
    # A process without torch_xla cannot use a device of it, and must not import it to find out.
    if launches or "torch_xla" not in sys.modules:
        return bool(launches)
    from polyxla.xla import first_device_use

    return first_device_use.is_in_use()
