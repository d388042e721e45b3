"""Nests of lists, tuples and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any


def is_tensor(value: Any) -> bool:
    """Tell a torch tensor without importing torch: by two attributes that nothing else common has."""
    return hasattr(value, "requires_grad") and hasattr(value, "device")


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with every tensor in it replaced by ``function(tensor)``.

    Lists, tuples, named tuples and dicts keep their type; everything else is kept as it is.
    """
    if is_tensor(value):
        return function(value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(changed)  # type: ignore[call-arg]
        # Filled into a copy, which keeps what a subclass holds besides, such as a default factory.
        again = copy.copy(value)
        again.update(changed)
        return again
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
