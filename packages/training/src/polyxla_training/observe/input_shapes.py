"""What a program's inputs look like, and how two of them differ."""

from __future__ import annotations

from typing import Any

from polyxla.pytree import is_tensor, parts

Form = tuple[Any, Any]
"""A tensor's shape and dtype; for anything else, its type and None."""
LARGEST_CHANGE = 4
"""How many changed inputs are named; more make no line that a person reads."""


def forms(batch: Any) -> tuple[Form, ...]:
    """Return the form of each part of `batch`, in a fixed order. Called every step."""
    # The batches that there are most of, without walking through them as a nest.
    if type(batch) in {list, tuple} and all(map(is_tensor, batch)):
        return tuple([(tensor.shape, tensor.dtype) for tensor in batch])
    return tuple([_form(part) for _, part in parts(batch)])


def _form(part: Any) -> Form:
    return (part.shape, part.dtype) if is_tensor(part) else (type(part), None)


def changed(batch: Any, before: tuple[Form, ...]) -> str | None:
    """Say which inputs differ from those before, such as ``batch['x'] [32, 64] float32 -> [7, 64] float32``.

    Args:
        batch: the inputs now.
        before: what `forms` returned for the earlier ones.

    Returns:
        The changes, or None where everything looks the same.
    """
    now = {path: _form(part) for path, part in parts(batch)}
    if len(now) != len(before):
        return f"batch of {len(before)} parts -> {len(now)}: {', '.join(now)}"
    pairs = zip(now.items(), before, strict=True)
    changes = [f"{path} {_said(old)} -> {_said(new)}" for (path, new), old in pairs if new != old]
    more = f", and {len(changes) - LARGEST_CHANGE} more" if len(changes) > LARGEST_CHANGE else ""
    return ", ".join(changes[:LARGEST_CHANGE]) + more if changes else None


def _said(form: Form) -> str:
    shape, dtype = form
    if dtype is None:
        return str(shape.__name__)
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
