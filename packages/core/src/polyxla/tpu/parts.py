"""The part of a host that variables select, so that several jobs can share the host.

libtpu takes some chips of a host only if they form a box. Google's examples, Ray and others set the numbers
of the chips, and their arrangement as a slice of its own. For the arrangement libtpu prefers the names of
processes to those of hosts, and both to the metadata server; for the numbers it prefers the name of chips to
that of devices.

Source: the precedence in libtpu's log (``TPU_LOG_DIR``, libtpu 0.0.21).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polyxla.errors import UsageError
from polyxla.tpu import env
from polyxla.tpu.accelerators import GENERATIONS, Bounds, Shape, parse_shape
from polyxla.tpu.topology import join

HOSTS = (env.TPU_PROCESS_BOUNDS, env.TPU_HOST_BOUNDS)
"""The arrangement of the hosts; the first that is set."""
CHIPS = (env.TPU_CHIPS_PER_PROCESS_BOUNDS, env.TPU_CHIPS_PER_HOST_BOUNDS)
"""The arrangement of a host's chips; the first that is set."""
VISIBLE = (env.TPU_VISIBLE_CHIPS, env.TPU_VISIBLE_DEVICES)
"""The chips to use; the first that is set."""


ONE: Shape = (1, 1, 1)
"""A single host, process or chip."""


class Value(NamedTuple):
    """A value as text, and its source."""

    text: str
    where: str


@dataclass(frozen=True)
class Part:
    """What the variables select of a slice.

    Attributes:
        bounds: the arrangement of the selected chips; that of the slice if no variable selects a part.
        chips: their numbers on this host; None for all.
        variables: the names of the variables with the arrangement, if it was read from them.
    """

    bounds: Bounds
    chips: tuple[int, ...] | None
    variables: tuple[str, ...] = ()


def read_part(environ: Mapping[str, str], generation: str, whole: Bounds, host: Shape) -> Part:
    """Read which part of a slice to use: all of it, or some chips of this host.

    Args:
        environ: the environment to read.
        generation: of the chips, a key of `GENERATIONS`.
        whole: the slice's arrangement.
        host: the arrangement of all chips of this host.

    Raises:
        UsageError: a value is invalid, or the values contradict each other.
    """
    chips = read_visible_chips(environ, math.prod(host))
    hosts, shape = from_variables(environ, *HOSTS), from_variables(environ, *CHIPS)
    is_one_host = whole.host_count == 1 if hosts is None else parse_shape(hosts.text, hosts.where) == ONE
    # With several hosts, the bounds describe the whole slice, and each host must bring all of its chips.
    if not is_one_host:
        return _all_of(whole, chips, environ)
    read = tuple(name for name in (_first(environ, HOSTS), _first(environ, CHIPS)) if name)
    # Only the chips are chosen: their arrangement follows from the numbers.
    if shape is None:
        bounds = Bounds(ONE, host) if chips is None else box(generation, host, chips, _where(environ))
        return Part(bounds, chips, read)
    sides = parse_shape(shape.text, shape.where)
    if chips is None and sides != host:
        chips = chips_of(generation, host, sides, shape.where)
    elif chips is not None:
        _check(generation, host, chips, shape, environ)
    return Part(Bounds(ONE, sides), chips, read)


def read_visible_chips(environ: Mapping[str, str], chip_count: int) -> tuple[int, ...] | None:
    """Read the chips of this host to use; None if no variable selects them.

    Args:
        environ: the environment to read.
        chip_count: number of chips of this host.

    Raises:
        UsageError: the variable does not list different chips of this host.
    """
    value = from_variables(environ, *VISIBLE)
    if value is None:
        return None
    parts = [part.strip() for part in value.text.split(",")]
    # The length is checked first: Python refuses to convert a number of thousands of digits.
    chips = tuple(int(part) for part in parts if part.isdecimal() and len(part) < 6)
    if len(chips) != len(parts) or len(set(chips)) != len(parts) or max(chips) >= chip_count:
        numbers = "0" if chip_count == 1 else f"0 to {chip_count - 1}"
        raise UsageError(
            f"this host's chips have the numbers {numbers}, but {value.text!r} lists others",
            where=value.where,
            fix="Name each chip to use once, comma separated, or unset it to use all.",
        )
    return chips


def from_variables(environ: Mapping[str, str], *names: str) -> Value | None:
    """Return the first of some variables that is set."""
    name = _first(environ, names)
    return Value(environ[name], f"{name}={environ[name]}") if name else None


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _all_of(whole: Bounds, chips: tuple[int, ...] | None, environ: Mapping[str, str]) -> Part:
    if chips is not None and len(chips) != whole.chips_per_host_count:
        raise _wrong_number(chips, whole.chips_per_host_count, environ)
    return Part(whole, chips)


def _check(
    generation: str, host: Shape, chips: tuple[int, ...], shape: Value, environ: Mapping[str, str]
) -> None:
    """Check that the chips form this box. If their order is not known, the user's word counts."""
    sides = parse_shape(shape.text, shape.where)
    if len(chips) != math.prod(sides):
        raise _wrong_number(chips, math.prod(sides), environ)
    if sides in possible_boxes(generation, host, chips):
        return
    right = join(box(generation, host, chips, _where(environ)).chips_per_host)
    raise UsageError(
        f"the chips {join(chips)} of a {generation} host form a box of {right}, not {join(sides)}",
        where=f"{_where(environ)} and {shape.where}",
        fix=f"Write {right}, or choose other chips.",
    )


def _wrong_number(chips: tuple[int, ...], count: int, environ: Mapping[str, str]) -> UsageError:
    return UsageError(
        f"{len(chips)} of this host's chips are selected, but the bounds contain {count}",
        where=_where(environ),
        fix=f"Unset it and choose with devices=[i], or set {env.TPU_PROCESS_BOUNDS}=1,1,1 and "
        f"{env.TPU_CHIPS_PER_PROCESS_BOUNDS} to the arrangement of those chips, such as 1,1,1 for one.",
    )


def _where(environ: Mapping[str, str]) -> str:
    value = from_variables(environ, *VISIBLE)
    return value.where if value else VISIBLE[0]


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
    # The last factor of a product runs fastest.
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
