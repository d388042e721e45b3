"""The plugin: the engine ``ray`` of ``polyxla pod``, and ``polyxla.launch(..., pod="ray")``.

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from polyxla import hookimpl
from polyxla_pod.ray import env

if TYPE_CHECKING:
    from polyxla_pod.engines import Engine, Target


@hookimpl
def polyxla_variables() -> Collection[str]:
    """Return the variables that the hosts of a launch have."""
    return (env.POLYXLA_RAY_CALL, env.POLYXLA_RAY_OUTCOME)


@hookimpl
def polyxla_pod(engine: str, target: Target) -> Engine | None:
    """Return the engine ray."""
    if engine != "ray":
        return None
    from polyxla_pod.ray.engine import RayEngine

    return RayEngine(target)


@hookimpl
def polyxla_launch_pod(pod: str, function: Any, options: Mapping[str, Any]) -> list[Any] | None:
    """Launch on all hosts of the only slice of the Ray cluster."""
    if pod != "ray":
        return None
    from polyxla_pod.ray.launching import launch

    return launch(function, options)
