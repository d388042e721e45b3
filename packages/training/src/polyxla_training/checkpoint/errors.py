"""The errors of checkpoints, and the check that a loaded state has the expected tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyxla import UsageError


class CheckpointError(UsageError):
    """A checkpoint cannot be written or read: a full disk, a missing file, an unsupported value."""


class DamagedCheckpointError(CheckpointError):
    """A file is damaged: cut short, changed since it was written, or not a checkpoint."""


def size_text(size_bytes: int) -> str:
    """Return a readable size, such as ``512 bytes`` or ``3.2 MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"


MAX_NAMES = 5
"""Number of names of each kind in an error."""


def check_state(expected: Mapping[str, Any], found: Mapping[str, Any], *, where: str = "load") -> None:
    """Raise one error with all differences, if a state does not fit.

    Args:
        expected: tensors by name, such as ``module.state_dict()``; only names and shapes are compared.
        found: the tensors that replace them.
        where: their source, such as the file's path, for the error.

    Raises:
        CheckpointError: names are missing or unexpected, or shapes differ.
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
    # The extra state of a module may be any object.
    return tuple(tensor.shape) if hasattr(tensor, "shape") else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _fix(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if prefix := _prefix(expected, found):
        return (
            f"All names found begin with {prefix!r}: "
            f"write {{name.removeprefix({prefix!r}): value for name, value in state.items()}}."
        )
    if prefix := _prefix(found, expected):
        return (
            f"All names expected begin with {prefix!r}, which a wrapper adds: load into the wrapped module."
        )
    return "Build the module as it was when the checkpoint was written."


def _prefix(short: Mapping[str, Any], long: Mapping[str, Any]) -> str | None:
    """Return the prefix, such as ``module.``, that turns all names of `short` into those of `long`."""
    first = next(iter(short), None)
    # Compared only if both have as many names: a prefix explains nothing else.
    if first is None or len(short) != len(long):
        return None
    # Any name that ends like the first one gives a candidate; a candidate that fits all names is the prefix.
    guesses = {name.removesuffix(first) for name in long if name.endswith(first)} - {""}
    return next((prefix for prefix in sorted(guesses) if all(prefix + name in long for name in short)), None)
