"""Reductions of pytrees over the replicas: tensors by the device, everything else by Python."""

from __future__ import annotations

import functools
import numbers
import operator
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from polyxla.contracts.replication import ReduceOp
from polyxla.pytree import is_tensor


def combine(
    value: Any,
    op: ReduceOp,
    reduce_tensor: Callable[[Any, ReduceOp], Any],
    gather: Callable[[str, Any], list[Any]],
    path: str = "",
) -> Any:
    """Combine every replica's `value`. A collective.

    Args:
        value: this replica's pytree, as for `polyxla.Replica.all_reduce`.
        op: how to combine.
        reduce_tensor: combines one tensor; a collective.
        gather: returns every replica's object in ordinal order, if all describe it alike; a collective.
        path: where the value is in the whole pytree.
    """
    if is_tensor(value):
        return reduce_tensor(value, op)
    if isinstance(value, Mapping):
        # Sorted: every replica must run the same collectives, even if its dict was filled in another order.
        found = {
            key: combine(value[key], op, reduce_tensor, gather, f"{path}[{key!r}]")
            for key in sorted(value, key=repr)
        }
        return {key: found[key] for key in value}
    if isinstance(value, list | tuple):
        items = [combine(one, op, reduce_tensor, gather, f"{path}[{n}]") for n, one in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return _COMBINE[op](gather(_described(value, path), value))


def _described(value: Any, path: str) -> str:
    # NumPy would stretch an array to the shape of another replica's.
    array = f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") and hasattr(value, "dtype") else ""
    return " at ".join(filter(None, (array or "an object", path)))


def _fold(function: Callable[[Any, Any], Any]) -> Callable[[list[Any]], Any]:
    return lambda values: functools.reduce(function, values)


def _total(values: list[Any]) -> Any:
    # Python's sum starts from 0: it turns bools into integers, and fails for anything but numbers.
    is_number = isinstance(values[0], numbers.Number)
    return sum(values) if is_number else functools.reduce(operator.add, values)


_COMBINE: Mapping[ReduceOp, Callable[[list[Any]], Any]] = {
    "sum": _total,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "mul": _fold(operator.mul),
    "and": _fold(operator.and_),
    "or": _fold(operator.or_),
}
