"""Finding the precision policy that was asked for."""

from __future__ import annotations

import importlib.metadata

import pluggy

from polyxla.contracts.precision import AsMade, Precision
from polyxla.env import Setting
from polyxla.errors import UsageError

DISTRIBUTION = "polyxla-precision"
"""Where the usual policies come from."""
FIX = "Write precision='bf16-mixed' or '32-true', or leave it out to keep the module's own dtypes."


def find_precision(plugins: pluggy.PluginManager, asked: Setting) -> Precision:
    """Return the policy that was asked for: an object that is one, or what the plugins have under its name.

    Raises:
        UsageError: no installed plugin knows the name, or one refuses it with a reason.
    """
    if asked.value is None:
        return AsMade()
    if hasattr(asked.value, "forward"):
        given: Precision = asked.value
        return given
    try:
        policy: Precision | None = plugins.hook.polyxla_precision(name=str(asked.value))
    except ValueError as error:
        raise UsageError(str(error), where=asked.origin, fix=FIX) from None
    if policy is None:
        raise UsageError(
            f"no installed plugin knows the precision {asked.value!r}", where=asked.origin, fix=_fix()
        )
    return policy


def _fix() -> str:
    try:
        importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"Install the usual policies: pip install {DISTRIBUTION}"
    return FIX
