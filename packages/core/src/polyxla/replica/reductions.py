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
    gather: Callable[[Any], list[Any]],
) -> Any:
    """Combine every replica's `value`. A collective.

    Args:
        value: this replica's pytree, as for `polyxla.Replica.all_reduce`.
        op: how to combine.
        reduce_tensor: combines one tensor; a collective.
        gather: returns every replica's object in ordinal order; a collective.
    """
    if is_tensor(value):
        return reduce_tensor(value, op)
    if isinstance(value, Mapping):
        # Sorted: every replica must run the same collectives, even if its dict was filled in another order.
        found = {key: combine(value[key], op, reduce_tensor, gather) for key in sorted(value, key=repr)}
        return {key: found[key] for key in value}
    if isinstance(value, list | tuple):
        items = [combine(item, op, reduce_tensor, gather) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return _COMBINE[op](gather(value))


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
