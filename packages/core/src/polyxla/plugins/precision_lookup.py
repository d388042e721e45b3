"""Look up the precision policy that the user asked for."""

from __future__ import annotations

import importlib.metadata

import pluggy

from polyxla.contracts.precision import Precision, UnchangedPrecision
from polyxla.env import Setting
from polyxla.errors import UsageError, pip_install

DISTRIBUTION = "polyxla-precision"
"""The distribution that brings the usual policies."""
FIX = "Write precision='bf16-mixed' or '32-true', or leave it out to keep the module's own dtypes."


def find_precision(plugins: pluggy.PluginManager, asked: Setting) -> Precision:
    """Return the policy that was asked for: the object itself, or the one that a plugin has for the name.

    Raises:
        UsageError: the object is neither a policy nor a name, no installed plugin knows the name, or a
            plugin refuses it with a reason.
    """
    if asked.value is None:
        return UnchangedPrecision()
    if not isinstance(asked.value, str | int):
        return _given_policy(asked)
    try:
        policy: Precision | None = plugins.hook.polyxla_precision(name=str(asked.value))
    except ValueError as error:
        raise UsageError(str(error), where=asked.origin, fix=FIX) from None
    if policy is None:
        raise UsageError(
            f"no installed plugin knows the precision {asked.value!r}", where=asked.origin, fix=_fix()
        )
    return policy


def _given_policy(asked: Setting) -> Precision:
    # The class of a policy has the method as well, but is not a policy.
    if isinstance(asked.value, type) or not hasattr(asked.value, "forward_context"):
        raise UsageError(
            "precision is neither a policy's name nor a policy",
            where=asked.origin,
            fix="Write a name such as precision='bf16-mixed', or pass a policy such as BF16True().",
        )
    given: Precision = asked.value
    return given


def _fix() -> str:
    try:
        importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"Install the usual policies: {pip_install(DISTRIBUTION)}"
    return FIX
