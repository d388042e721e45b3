"""Convert the tensors in a pytree; everything else is kept.

The core has a `map_tensors` too, in `polyxla.pytree`. This package works without polyxla, so it may not
import that one; it also runs in every step, so a batch that needs no change is returned without a copy.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with every floating-point tensor in `dtype`; see `map_tensors`."""
    # Compared first: to() takes ten times as long to find out that there is nothing to do.
    return map_tensors(
        value,
        lambda tensor: tensor.to(dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor,
    )


def upcast_half(value: Any) -> Any:
    """Return `value` with 16-bit floating-point tensors in float32; others stay; see `map_tensors`."""
    return map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with `change` applied to its tensors, in containers of the same types.

    Descends into lists, tuples, named tuples, mappings and dataclasses. A container without a changed
    tensor is returned itself; no container is changed in place.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return _sequence(value, change)
    if isinstance(value, Mapping):
        return _mapping(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, change)
    return value


def _sequence(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    # Compared by identity below, so that a batch without changes is returned as it is, and costs no copies.
    items = [map_tensors(item, change) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    # The constructor of a named tuple takes the fields one by one; _make takes a sequence.
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def _mapping(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = _changed(value.items(), change)
    if not changed:
        return value
    if not isinstance(value, dict | UserDict):
        return type(value)({**value, **changed})
    # A copy keeps what the constructor would need, such as the factory of a defaultdict.
    twin = copy.copy(value)
    for key, item in changed.items():
        twin[key] = item
    attributes = getattr(value, "__dict__", None)
    if attributes is value:
        # A dict whose __init__ has written: self.__dict__ = self.
        twin.__dict__ = twin  # type: ignore[assignment]
    elif attributes:
        # An item may be an attribute too.
        items = {id(value[key]): item for key, item in changed.items()}
        vars(twin).update({name: items[id(old)] for name, old in attributes.items() if id(old) in items})
    return twin


def _dataclass(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    fields = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    changed = _changed(fields, change)
    if not changed:
        return value
    # Not dataclasses.replace(): it cannot set init=False fields, and runs __post_init__ again.
    twin = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(twin, name, item)
    return twin


def _changed(items: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[Any, Any]:
    both = ((key, item, map_tensors(item, change)) for key, item in items)
    return {key: new for key, old, new in both if new is not old}
