"""Misspelt variables: names with polyxla's prefix that no installed package reads or sets."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import ModuleType

from polyxla import env
from polyxla.plugins.manager import load_everything

PREFIX = "POLYXLA_"
"""Prefix of polyxla's variables. Plugins that use it declare their names by the hook `polyxla_variables`."""


def constants(*modules: ModuleType) -> frozenset[str]:
    """Return the names with the prefix that modules define: each constant is spelt as its variable."""
    return frozenset(name for module in modules for name in vars(module) if name.startswith(PREFIX))


def unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each variable with the prefix that neither the core nor a plugin declares."""
    known = set(constants(env))
    found = {name for name in environ if name.upper().startswith(PREFIX)}
    if not found <= known:
        known.update(*load_everything().hook.polyxla_variables())
    return tuple(_warning(name, known) for name in sorted(found - known))


def _warning(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0.75)
    advice = f" Did you mean {near[0]}?" if near else ""
    return f"{name} is not a variable of polyxla and has no effect.{advice}"
