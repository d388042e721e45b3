"""The boxes that chips of a host form. libtpu takes some chips of a host only if they form one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from polyxla.errors import UsageError
from polyxla.tpu import env
from polyxla.tpu.accelerators import GENERATIONS, Bounds, Shape
from polyxla.tpu.topology import join

ONE: Shape = (1, 1, 1)
"""A single host, process or chip."""


def box(generation: str, host: Shape, chips: Sequence[int], where: str = "devices") -> Bounds:
    """Return the bounds of some chips of a host, as a slice of their own.

    Args:
        generation: a key of `GENERATIONS`.
        host: the arrangement of all chips of the host.
        chips: their numbers on the host.
        where: where they were chosen, for the error.

    Raises:
        UsageError: they form no box, or it is not known which, as the order of the host's chips is not.
    """
    shapes = possible_boxes(generation, host, chips)
    if shapes == {None}:
        raise UsageError(
            f"the TPU chips {join(chips)} cannot be used together: they are not neighbours that form a box",
            where=where,
            fix="Leave it out to use all chips of the host, or choose one, or neighbours.",
        )
    if len(shapes) > 1:
        either = " or ".join(sorted(join(shape) if shape else "no box" for shape in shapes))
        raise _unknown_order(generation, f"the chips {join(chips)} form {either}", where)
    (shape,) = shapes
    assert shape is not None
    return Bounds(ONE, shape)


def possible_boxes(generation: str, host: Shape, chips: Sequence[int]) -> set[Shape | None]:
    """Return the shape that some chips of a host form, in each order that the host may have.

    None stands for chips that form no box. The arguments are those of `box`.
    """
    return {_shape_of([order[chip] for chip in chips]) for order in _orders(generation, host)}


def chips_of(generation: str, host: Shape, shape: Shape, where: str) -> tuple[int, ...]:
    """Return the chips of a host that form a box of this shape around its first chip.

    Args:
        generation: a key of `GENERATIONS`.
        host: the arrangement of all chips of the host.
        shape: that of the box.
        where: where the shape was set, for the error.

    Raises:
        UsageError: the box is larger than the host, or it is not known which chips these are.
    """
    if not _fits(shape, host):
        raise UsageError(
            f"a box of {join(shape)} chips does not fit into a host of {join(host)}",
            where=where,
            fix=f"Write at most {join(host)}, or unset it to use all chips of the host.",
        )
    last = (shape[0] - 1, shape[1] - 1, shape[2] - 1)
    found = {
        tuple(chip for chip, at in enumerate(order) if _fits(at, last)) for order in _orders(generation, host)
    }
    if len(found) > 1:
        either = " or ".join(sorted(map(join, found)))
        raise _unknown_order(generation, f"a box of {join(shape)} has the chips {either}", where)
    return found.pop()


def _orders(generation: str, host: Shape) -> list[list[Shape]]:
    """List the positions of a host's chips by their numbers: once, or twice if the order is not known."""
    x, y, z = map(range, host)
    by_x = [(i, j, k) for k, j, i in itertools.product(z, y, x)]
    by_y = [(i, j, k) for k, i, j in itertools.product(z, x, y)]
    return {True: [by_y], False: [by_x], None: [by_x, by_y]}[GENERATIONS[generation].counts_y_first]


def _fits(shape: Shape, into: Shape) -> bool:
    return all(size <= end for size, end in zip(shape, into, strict=True))


def _shape_of(positions: Sequence[Shape]) -> Shape | None:
    x, y, z = (max(line) - min(line) + 1 for line in zip(*positions, strict=True))
    return (x, y, z) if x * y * z == len(positions) else None


def _unknown_order(generation: str, result: str, where: str) -> UsageError:
    return UsageError(
        f"it is not documented how a {generation} host numbers its chips: {result}",
        where=where,
        fix=f"Use one chip or all of them, or set all of {env.TPU_VISIBLE_CHIPS}, "
        f"{env.TPU_PROCESS_BOUNDS}=1,1,1 and {env.TPU_CHIPS_PER_PROCESS_BOUNDS} to what libtpu accepts.",
    )
