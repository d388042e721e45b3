"""The hook of polyxla-pod. Imports nothing heavy.

Plugins find it by the entry-point group ``polyxla.hookspecs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyxla.plugin import hookspec

if TYPE_CHECKING:
    from polyxla_pod.transports import Target, Transport


@hookspec(firstresult=True)
def polyxla_pod(transport: str, target: Target) -> Transport | None:
    """Return the transport of this name for the hosts of `target`; None if this plugin does not know it.

    Called once per ``polyxla pod run``, where the user is, before anything is started.

    Raises:
        UsageError: `target` does not name hosts that this transport can reach.
    """
