"""The names and sizes of a mesh's dimensions, as ``strategy=`` and ``mesh=`` take them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polyxla import UsageError

DDP, FSDP, ZERO1, TENSOR = "ddp", "fsdp", "zero1", "tp-plan"
DIMENSIONS = (DDP, FSDP, ZERO1, TENSOR)
"""Every dimension. Replicas of the last one exchange most, and are next to each other."""
REST = -1
"""A size: all replicas that the other dimensions leave."""


def read_strategy(value: Any, where: str) -> dict[str, int] | None:
    """Return the mesh that a strategy's name, or a mapping of sizes, asks for; None if it is neither.

    Args:
        value: what the user wrote, such as ``"fsdp"`` or ``{"fsdp": 2, "tp-plan": 2}``.
        where: the option, named in the error.

    Raises:
        UsageError: a dimension is unknown, or its size is.
    """
    if isinstance(value, str):
        # Every replica has the whole module under ddp, as without a strategy, also where there is no mesh.
        return {value: REST} if value in DIMENSIONS and value != DDP else None
    if not isinstance(value, Mapping):
        return None
    for name, size in value.items():
        if name not in DIMENSIONS:
            raise UsageError(
                f"{name!r} is not a dimension of a mesh: {', '.join(DIMENSIONS)} are",
                where=where,
                fix='Write a mesh such as {"fsdp": 2, "tp-plan": 2}.',
            )
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != REST):
            raise UsageError(
                f"the size {size!r} of {name} is neither a positive integer nor {REST}",
                where=where,
                fix=f"Write the number of replicas, or {REST} for all that the other dimensions leave.",
            )
    if FSDP in value and ZERO1 in value:
        raise UsageError(
            f"{FSDP} and {ZERO1} both divide the optimizer's state",
            where=where,
            fix=f"Write one of them; {FSDP} divides the parameters too.",
        )
    return dict(value)


def complete(shape: Mapping[str, int], world_size: int, where: str) -> dict[str, int]:
    """Return the sizes of all dimensions in the order of `DIMENSIONS`, for this number of replicas.

    Raises:
        UsageError: they do not make a mesh of all replicas.
    """
    # A size of -1 takes all replicas that the other sizes leave.
    known = math.prod(size for size in shape.values() if size != REST)
    open_ones = [name for name, size in shape.items() if size == REST]
    whole = {name: world_size // known if size == REST else size for name, size in shape.items()}
    if len(open_ones) > 1 or not shape or math.prod(whole.values()) != world_size:
        raise UsageError(
            f"a mesh {dict(shape)} is not one of {world_size} replicas",
            where=where,
            fix=f"Write sizes whose product is {world_size}, or {REST} for one of them.",
        )
    # In the order of DIMENSIONS, whatever order the user wrote: neighbours exchange most.
    return {name: whole[name] for name in DIMENSIONS if name in whole}
