"""The hooks of polyxla-precision."""

from __future__ import annotations

import pluggy

from polyxla_precision.full import Full32

# The marker by its project name, so that this package needs pluggy and not polyxla.
hookimpl = pluggy.HookimplMarker("polyxla")

_POLICIES = {"32-true": Full32, "32": Full32}


@hookimpl
def polyxla_precision(name: str) -> Full32 | None:
    """Return the policy called `name`; None for one this package does not have."""
    policy = _POLICIES.get(name)
    return policy() if policy else None
