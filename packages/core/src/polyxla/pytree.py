"""Pytrees: nested lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a torch tensor. Duck-typed, because importing torch takes seconds."""
    return hasattr(value, "requires_grad") and hasattr(value, "device")


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the pytree `value` with every tensor replaced by ``function(tensor)``.

    Lists, tuples, named tuples, dicts and dataclasses keep their type; all other leaves stay as they are.
    So do a dict's attributes, except those that are its items under another name, or tensors.
    """
    if is_tensor(value):
        return function(value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(changed)  # type: ignore[call-arg]
        # A copy keeps the other attributes of a subclass, such as a default factory.
        filled = copy.copy(value)
        for key, item in changed.items():
            # Not update(), which a subclass may refuse: transformers' ModelOutput does.
            filled[key] = item
        _map_attributes(function, value, filled, changed)
        return filled
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        # A named tuple takes its fields as separate arguments, other sequences take one iterable.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_dataclass(value):
        # A copy, not a new instance: the constructor may compute, and may not accept every field.
        changed = copy.copy(value)
        for name in _field_names(value):
            # Frozen dataclasses refuse setattr().
            object.__setattr__(changed, name, map_tensors(function, getattr(value, name)))
        return changed
    return value


def _map_attributes(
    function: Callable[[Any], Any],
    value: Mapping[Any, Any],
    filled: MutableMapping[Any, Any],
    changed: Mapping[Any, Any],
) -> None:
    """Change the attributes of a copy `filled` of `value` in which tensors would stay behind."""
    attributes = getattr(value, "__dict__", None)
    if attributes is None:
        return
    if attributes is value:
        # A dict whose __init__ has written: self.__dict__ = self.
        filled.__dict__ = filled  # type: ignore[assignment]
        return
    # Attributes that are items must stay the same objects as the items, so they are found by identity.
    items = {id(item): changed[key] for key, item in value.items()}
    for name, old in attributes.items():
        if id(old) in items:
            vars(filled)[name] = items[id(old)]
        elif is_tensor(old):
            vars(filled)[name] = function(old)


def tensors_in(value: Any) -> list[Any]:
    """Return every tensor of a pytree, in the order in which `map_tensors` visits them."""
    found: list[Any] = []
    map_tensors(found.append, value)
    return found


def with_tensors(value: Any, tensors: list[Any]) -> Any:
    """Return `value` with its tensors replaced by `tensors`, in the order of `tensors_in`."""
    rest = iter(tensors)
    return map_tensors(lambda _: next(rest), value)


def leaves_with_paths(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves of a pytree, each with its path, such as ``batch['x'][0]``."""
    if isinstance(value, Mapping):
        inner = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)
        inner = [(f"{path}.{names[i]}" if names else f"{path}[{i}]", item) for i, item in enumerate(value)]
    elif _is_dataclass(value):
        inner = [(f"{path}.{name}", getattr(value, name)) for name in _field_names(value)]
    else:
        yield path, value
        return
    for item_path, item in inner:
        yield from leaves_with_paths(item, item_path)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]
