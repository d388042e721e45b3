"""The plugin: the transport ``ray`` of ``polyxla pod``, and ``polyxla.launch(..., pod="ray")``.

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from polyxla import UsageError, hookimpl
from polyxla_pod.ray import env

if TYPE_CHECKING:
    from polyxla_pod.transports import Target, Transport


@hookimpl
def polyxla_variables() -> Collection[str]:
    """Return the variables that the hosts of a launch have."""
    return (env.POLYXLA_RAY_CALL, env.POLYXLA_RAY_OUTCOME)


@hookimpl
def polyxla_pod(transport: str, target: Target) -> Transport | None:
    """Return the transport ray."""
    if transport != "ray":
        return None
    _check_installed("--engine ray")
    from polyxla_pod.ray.transport import RayTransport

    return RayTransport(target)


@hookimpl
def polyxla_launch_pod(pod: str, function: Any, options: Mapping[str, Any]) -> list[Any] | None:
    """Launch on all hosts of the only slice of the Ray cluster."""
    if pod != "ray":
        return None
    _check_installed('pod="ray"')
    from polyxla_pod.ray.launching import launch

    return launch(function, options)


def _check_installed(where: str) -> None:
    """Check that the extra ``ray`` of polyxla-pod is installed.

    Raises:
        UsageError: it is not.
    """
    if missing := [name for name in ("ray", "cloudpickle") if find_spec(name) is None]:
        from polyxla.plugin import pip_install

        raise UsageError(
            f"the hosts are found with Ray, and {' and '.join(missing)} is not installed",
            where=where,
            fix=f"Install it: {pip_install('polyxla-pod[ray]')}",
        )
