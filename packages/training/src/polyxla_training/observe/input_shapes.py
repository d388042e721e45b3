"""The shapes and dtypes of a program's inputs, and how those of two batches differ."""

from __future__ import annotations

from typing import Any

from polyxla.plugin import is_tensor, leaves_with_paths

Signature = tuple[Any, Any]
"""A tensor's shape and dtype; of anything else, its type and None."""
MAX_CHANGES = 4
"""Number of changed inputs that a message names; with more, it would be too long to read."""


def signatures(batch: Any) -> tuple[Signature, ...]:
    """Return the signature of each leaf of `batch`, in a fixed order. Called every step."""
    # The most common batches, without the cost of walking them as a pytree.
    if type(batch) in {list, tuple} and all(map(is_tensor, batch)):
        return tuple([(tensor.shape, tensor.dtype) for tensor in batch])
    return tuple([_signature(leaf) for _, leaf in leaves_with_paths(batch)])


def _signature(leaf: Any) -> Signature:
    return (leaf.shape, leaf.dtype) if is_tensor(leaf) else (type(leaf), None)


def describe_changes(
    batch: Any, before: tuple[Signature, ...], after: tuple[Signature, ...] | None = None
) -> str | None:
    """Describe the inputs that changed, such as ``batch['x'] [32, 64] float32 -> [7, 64] float32``.

    Args:
        batch: the current inputs.
        before: the earlier inputs, as `signatures` returned them.
        after: the later ones; default: those of `batch`, which otherwise gives their names only.

    Returns:
        The changes, or None if the signatures are the same.
    """
    now = {path: _signature(leaf) for path, leaf in leaves_with_paths(batch)}
    if after is not None and len(after) == len(now):
        now = dict(zip(now, after, strict=True))
    if len(now) != len(before):
        return f"batch of {len(before)} parts -> {len(now)}: {', '.join(now)}"
    pairs = zip(now.items(), before, strict=True)
    changes = [f"{path} {_text(old)} -> {_text(new)}" for (path, new), old in pairs if new != old]
    more = f", and {len(changes) - MAX_CHANGES} more" if len(changes) > MAX_CHANGES else ""
    return ", ".join(changes[:MAX_CHANGES]) + more if changes else None


def _text(signature: Signature) -> str:
    shape, dtype = signature
    if dtype is None:
        return str(shape.__name__)
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
