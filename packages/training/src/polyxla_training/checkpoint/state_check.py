"""Whether the tensors that were found are those that were expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyxla_training.checkpoint.errors import CheckpointError

SHOWN = 5
"""How many names an error lists of a kind."""


def check_state(expected: Mapping[str, Any], found: Mapping[str, Any], *, where: str = "load") -> None:
    """Refuse a state that does not fit, with all that is wrong in one error.

    Args:
        expected: tensors by name, such as ``module.state_dict()``; only their shapes are looked at.
        found: the tensors that are to take their place.
        where: where those are from, such as the file's path.

    Raises:
        CheckpointError: names are missing, or not expected, or shapes differ.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    shapes = [
        f"{name} ({_shape(found[name])}, not {_shape(expected[name])})"
        for name in expected
        if name in found and _shape(found[name]) != _shape(expected[name])
    ]
    kinds = {"missing": missing, "not expected": extra, "of another shape": shapes}
    wrong = "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)
    if wrong:
        raise CheckpointError(f"the state does not fit: {wrong}", where=where, fix=_fix(expected, found))


def _shape(tensor: Any) -> tuple[int, ...] | None:
    # A module's extra state may be anything.
    return tuple(tensor.shape) if hasattr(tensor, "shape") else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _fix(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if prefix := _prefix(expected, found):
        return (
            f"All names found begin with {prefix!r}: "
            f"write {{name.removeprefix({prefix!r}): value for name, value in state.items()}}."
        )
    if prefix := _prefix(found, expected):
        return (
            f"All names expected begin with {prefix!r}, which a wrapper adds: "
            "load into the module that it wraps."
        )
    return "Build the module as it was when the checkpoint was written."


def _prefix(short: Mapping[str, Any], long: Mapping[str, Any]) -> str | None:
    """Return the text that makes all names of `short` those of `long`, such as ``module.``."""
    first = next(iter(short), None)
    if first is None or len(short) != len(long):
        return None
    guesses = {name.removesuffix(first) for name in long if name.endswith(first)} - {""}
    return next((one for one in sorted(guesses) if all(one + name in long for name in short)), None)
