"""The hook of polyxla-pod. Imports nothing heavy.

Plugins find it by the entry-point group ``polyxla.hookspecs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla.plugin import hookspec

if TYPE_CHECKING:
    from polyxla_pod.engines import Engine, Target


@hookspec(firstresult=True)
def polyxla_pod(engine: str, target: Target) -> Engine | None:
    """Return the engine called `engine` for the hosts of `target`, or None if this plugin does not know it.

    Called once per ``polyxla pod run``, where the user is, before anything is started.

    Raises:
        UsageError: `target` does not name hosts that this engine can reach.
    """
