"""What replicas make of the values each of them has: nests of tensors and numbers, or any object."""

from __future__ import annotations

import functools
import numbers
import operator
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from polyxla.contracts.replication import ReduceOp
from polyxla.pytree import is_tensor


def combined(
    value: Any,
    op: ReduceOp,
    reduce_tensor: Callable[[Any, ReduceOp], Any],
    gather: Callable[[Any], list[Any]],
) -> Any:
    """Return what all replicas' `value` come to; each of them calls it.

    Args:
        value: this replica's, as for `polyxla.Replica.all_reduce`.
        op: how to combine.
        reduce_tensor: combines one tensor; a collective.
        gather: returns every replica's object in ordinal order; a collective.
    """
    if is_tensor(value):
        return reduce_tensor(value, op)
    if isinstance(value, Mapping):
        # Sorted: replicas that filled their dicts in another order must still meet key by key.
        found = {key: combined(value[key], op, reduce_tensor, gather) for key in sorted(value, key=repr)}
        return {key: found[key] for key in value}
    if isinstance(value, list | tuple):
        items = [combined(item, op, reduce_tensor, gather) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return _COMBINE[op](gather(value))


def _fold(function: Callable[[Any, Any], Any]) -> Callable[[list[Any]], Any]:
    return lambda values: functools.reduce(function, values)


def _total(values: list[Any]) -> Any:
    # Only numbers can be added to the 0 that Python's sum starts from, which makes numbers of bools.
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
