"""The types of TPU slices as data: numbers of chips and hosts, and their arrangement."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from polyxla.errors import UsageError

Shape = tuple[int, int, int]
"""A count in each direction, ``(x, y, z)``."""


@dataclass(frozen=True)
class Bounds:
    """The arrangement of a slice: its hosts, and the chips within each host.

    Attributes:
        hosts: hosts in each direction.
        chips_per_host: chips of one host in each direction.
    """

    hosts: Shape
    chips_per_host: Shape

    @property
    def host_count(self) -> int:
        """Number of hosts."""
        return math.prod(self.hosts)

    @property
    def chips_per_host_count(self) -> int:
        """Number of chips of one host."""
        return math.prod(self.chips_per_host)

    @property
    def chip_count(self) -> int:
        """Number of chips of the slice."""
        return self.host_count * self.chips_per_host_count

    @property
    def chips(self) -> Shape:
        """The slice's chips in each direction."""
        (hx, hy, hz), (cx, cy, cz) = self.hosts, self.chips_per_host
        return (hx * cx, hy * cy, hz * cz)

    def on_one_host(self) -> Bounds:
        """Return the same chips on a single host, as in an emulated slice."""
        return Bounds((1, 1, 1), self.chips)


@dataclass(frozen=True)
class Generation:
    """What all slices of one TPU generation have in common.

    Attributes:
        name: the short name, such as ``v5e``.
        prefix: the text before the dash in a type, such as ``v5litepod``.
        cores_per_chip: TensorCores on a chip.
        devices_per_chip: devices that a program sees on a chip, hence threads per process.
        counts_cores: whether the number after the dash counts cores; else it counts chips.
        largest: the largest number after the dash.
        peak_flops: bfloat16 operations per second of a whole chip.
        hbm_bandwidth: bytes per second between a chip and its HBM.
        counts_y_first: whether the chips of a host are numbered along y first; otherwise along x. None if
            that is not known.
        bounds_count_devices: whether the bounds of processes have a fourth number, the devices of a chip.

    Source: the pages "TPU v2" to "TPU7x" of the Cloud TPU documentation; for devices per chip up to v6e,
        ``num_logical_cores_per_chip`` of torch_xla 2.9.0, for the fourth number its ``configure_topology``.
        For the order, the bounds that go with chips 0 and 1: 1,2,1 in the example by JAX's developers that
        pytorch/xla#7714 links, in ``ray._private.accelerators.tpu``, measured by others on a v4 and a v5p-8,
        and for tpu7x in the tests of GKE's device plugin; 2,1,1 measured on a v5litepod-4, where libtpu
        refuses 1,2,1 ("duplicate coordinate assignment").
    """

    name: str
    prefix: str
    cores_per_chip: int
    devices_per_chip: int
    counts_cores: bool
    largest: int
    peak_flops: float
    hbm_bandwidth: float
    counts_y_first: bool | None
    bounds_count_devices: bool = False

    @property
    def device_flops(self) -> float:
        """Operations per second of one device, hence of one replica: the devices of a chip share its peak."""
        return self.peak_flops / self.devices_per_chip


GENERATIONS = {
    "v2": Generation("v2", "v2", 2, 2, True, 512, 45e12, 600e9, counts_y_first=True),
    "v3": Generation("v3", "v3", 2, 2, True, 2048, 123e12, 900e9, counts_y_first=True),
    "v4": Generation("v4", "v4", 2, 1, True, 8192, 275e12, 1200e9, counts_y_first=True),
    "v5e": Generation("v5e", "v5litepod", 1, 1, False, 256, 197e12, 800e9, counts_y_first=False),
    "v5p": Generation("v5p", "v5p", 2, 1, True, 12288, 459e12, 2765e9, counts_y_first=True),
    "v6e": Generation("v6e", "v6e", 1, 1, False, 256, 918e12, 1600e9, counts_y_first=None),
    "v7x": Generation(
        "v7x", "tpu7x", 2, 2, True, 18432, 2307e12, 7380e9, counts_y_first=True, bounds_count_devices=True
    ),
}
"""Every generation, by its short name.

Source: Cloud TPU documentation. A v4 pod has 4096 chips; the largest v5p slice has 6144, the largest of tpu7x
9216. The number of tpu7x counts cores, two a chip, in xpk (``get_tpu_system_characteristics_map``) and in
GKE's device plugin, where 4x4x4 chips are a tpu7x-128; metadata servers spell the type v7x-128. For the
peaks, "peak compute per chip" and "HBM bandwidth" in the pages "TPU v2" to "TPU7x"; of two numbers for a
generation the lower one: the page "TPU v2" says 46e12 in one place, and 45e12 in another.
"""
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5litepod": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "v7x",
    "TPU v7": "v7x",
}
"""Kinds of devices whose name is not "TPU" and the short name of their generation.

Source: ``device_kind`` of libtpu's devices, as JAX's ``jax/experimental/mosaic`` tests them; the last is
``torch_tpu._internal.utils.hardware``'s name.
"""


def generation_of(kind: str | None) -> Generation | None:
    """Return the generation of a kind of device, such as ``TPU v4`` or ``TPU v5 lite``; None if unknown."""
    text = kind or ""
    return GENERATIONS.get(_KINDS.get(text) or text.removeprefix("TPU ")) if text.startswith("TPU") else None


_BY_PREFIX = {g.prefix: g for g in GENERATIONS.values()} | GENERATIONS

_BOARD: Shape = (2, 2, 1)

_V2_V3_HOSTS: dict[str, dict[int, Shape]] = {
    "v2": {8: (1, 1, 1), 32: (2, 2, 1), 128: (4, 4, 1), 256: (4, 8, 1), 512: (8, 8, 1)},
    "v3": {
        8: (1, 1, 1),
        32: (2, 2, 1),
        64: (2, 4, 1),
        128: (4, 4, 1),
        256: (4, 8, 1),
        512: (8, 8, 1),
        1024: (8, 16, 1),
        2048: (16, 16, 1),
    },
}
"""Hosts of four chips, by number of cores. Source: ``torch_xla._internal.tpu`` of torch_xla 2.9.0."""

_FLAT: dict[int, Bounds] = {
    1: Bounds((1, 1, 1), (1, 1, 1)),
    4: Bounds((1, 1, 1), _BOARD),
    8: Bounds((1, 1, 1), (2, 4, 1)),
    16: Bounds((2, 2, 1), _BOARD),
    32: Bounds((2, 4, 1), _BOARD),
    64: Bounds((4, 4, 1), _BOARD),
    128: Bounds((4, 8, 1), _BOARD),
    256: Bounds((8, 8, 1), _BOARD),
}
"""v5e and v6e, by number of chips. Eight chips are one host; on GKE they can also be two hosts of four, whose
bounds then show it.

Source: the tables of supported configurations in "TPU v5e" and "TPU v6e", Cloud TPU documentation.
"""

_BELOW_A_CUBE: dict[int, Shape] = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
"""v4, v5p and tpu7x slices of less than a cube of 4x4x4 chips, by number of chips; only tpu7x comes with one.

Source: "TPU v4", "TPU v5p" and "TPU7x", Cloud TPU documentation; 2x2x4 also in "TPU types and topologies".
"""


@dataclass(frozen=True)
class AcceleratorType:
    """A type of TPU slice, such as ``v3-8``.

    Attributes:
        name: the type as Google Cloud spells it (``v5litepod-8``, also where ``v5e-8`` was asked for).
        generation: the short name, a key of `GENERATIONS`.
        count: the number after the dash.
        bounds: the default arrangement of its hosts and chips. v4, v5p and tpu7x slices with the same number
            of chips come in several shapes: the bounds that a slice reports take precedence.
    """

    name: str
    generation: str
    count: int
    bounds: Bounds

    @classmethod
    def parse(cls, text: str, where: str) -> AcceleratorType:
        """Read a type such as ``v4-16`` or ``v5e-8``.

        Args:
            text: the type; case and surrounding blanks do not matter.
            where: where the type was set, for the error.

        Raises:
            UsageError: the generation is unknown, or does not come in this size.
        """
        match = re.fullmatch(r"(\w+)-(\d{1,9})", text.strip().lower(), re.ASCII)
        generation = _BY_PREFIX.get(match[1]) if match else None
        if match is None or generation is None:
            raise _no_such_type(text, where)
        count = int(match[2])
        if count not in sizes(generation.name):
            raise _no_such_size(generation, count, where)
        return cls(f"{generation.prefix}-{count}", generation.name, count, _bounds(generation, count))

    @classmethod
    def parse_slices(cls, text: str, where: str) -> tuple[int, AcceleratorType]:
        """Read a type, or several slices of one, such as ``2xv5e-16``; return their number and the type.

        Raises:
            UsageError: there is no such type.
        """
        match = re.fullmatch(r"\s*([1-9]\d{0,2})x(.*)", text, re.ASCII | re.IGNORECASE | re.DOTALL)
        slices, type_ = (int(match[1]), match[2]) if match else (1, text)
        return slices, cls.parse(type_, where)

    def name_of(self, slices: int) -> str:
        """Return the name of several slices of this type, which `parse_slices` reads; or its own, of one."""
        return f"{slices}x{self.name}" if slices > 1 else self.name

    @property
    def cores_per_chip(self) -> int:
        """TensorCores on a chip; the two of a v4 or v5p chip are one device, those of tpu7x are two."""
        return GENERATIONS[self.generation].cores_per_chip

    @property
    def threads_per_process(self) -> int:
        """Replicas in a process: a process drives one chip, with a thread for each device of the chip."""
        return GENERATIONS[self.generation].devices_per_chip

    @property
    def chips(self) -> int:
        """Number of chips, hence of processes."""
        return self.bounds.chip_count

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.bounds.host_count

    @property
    def chips_per_host(self) -> int:
        """Number of chips of one host."""
        return self.bounds.chips_per_host_count

    @property
    def devices(self) -> int:
        """Number of devices, hence of replicas: the world size when all are used."""
        return self.chips * self.threads_per_process


def sizes(generation: str) -> tuple[int, ...]:
    """List the numbers that can follow the dash in a type of this generation, smallest first.

    Source: Cloud TPU documentation; from a cube of 64 chips on, v4, v5p and tpu7x come in whole cubes.
    """
    # The sizes of v2 and v3 are few, and follow no rule.
    if generation in _V2_V3_HOSTS:
        return tuple(_V2_V3_HOSTS[generation])
    if not GENERATIONS[generation].counts_cores:
        return tuple(_FLAT)
    # Only tpu7x comes with a single chip, which counts as two cores.
    single = (2,) if generation == "v7x" else ()
    return (*single, 8, 16, 32, 64, *range(128, GENERATIONS[generation].largest + 1, 128))


def _bounds(generation: Generation, count: int) -> Bounds:
    if generation.name in _V2_V3_HOSTS:
        return Bounds(_V2_V3_HOSTS[generation.name][count], _BOARD)
    if not generation.counts_cores:
        return _FLAT[count]
    x, y, z = most_cubic(count // generation.cores_per_chip)
    if (x, y, z) == (1, 1, 1):
        return _FLAT[1]
    # A host has a board of 2x2 chips.
    return Bounds((x // 2, y // 2, z), _BOARD)


def most_cubic(chips: int) -> Shape:
    """Return the default arrangement of the chips of a v4, v5p or tpu7x slice.

    Args:
        chips: 1, 4, 8, 16, 32 or a multiple of 64.

    Source: "TPU types and topologies", Cloud TPU documentation: the default is the shape nearest to a
        cube, each side a multiple of 4 from 64 chips on. It agrees with all shapes in the tables of
        "TPU v4" and "TPU v5p", and with all v4, v5p and tpu7x types in xpk.
    """
    if chips in _BELOW_A_CUBE:
        return _BELOW_A_CUBE[chips]
    cubes = chips // 64
    # The sides are sorted, x <= y <= z, so that each shape is tried once.
    thin = (x for x in range(1, cubes + 1) if x**3 <= cubes and cubes % x == 0)
    shapes = ((x, y, cubes // x // y) for x in thin for y in _divisors_between(x, cubes // x))
    x, y, z = min(shapes, key=_surface)
    return (4 * x, 4 * y, 4 * z)


def _divisors_between(least: int, number: int) -> tuple[int, ...]:
    return tuple(y for y in range(least, math.isqrt(number) + 1) if number % y == 0)


def _surface(shape: Shape) -> int:
    x, y, z = shape
    return x * y + y * z + z * x


def parse_shape(text: str, where: str) -> Shape:
    """Read ``x,y,z``.

    Raises:
        UsageError: the text is not three positive integers.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 3 and all(re.fullmatch(r"0*[1-9][0-9]{0,5}", part) for part in parts):
        x, y, z = map(int, parts)
        return (x, y, z)
    raise UsageError(
        f"bounds must be three positive integers, not {text!r}",
        where=where,
        fix="Write x,y,z such as 2,2,1.",
    )


def _no_such_type(text: str, where: str) -> UsageError:
    known = [f"{prefix}-{size}" for prefix, g in _BY_PREFIX.items() for size in sizes(g.name)]
    # Every spelling of every size is a candidate, so that v5e-7 finds v5e-8.
    near = difflib.get_close_matches(text.strip().lower(), known, n=3) or ["v3-8", "v4-8", "v5litepod-8"]
    return UsageError(
        f"there is no TPU type {text!r}",
        where=where,
        fix=f"A type is one of {', '.join(_BY_PREFIX)}, a dash and a size, such as {', '.join(near)}.",
    )


def _no_such_size(generation: Generation, count: int, where: str) -> UsageError:
    known = sizes(generation.name)
    below = [size for size in known if size < count][-1:]
    above = [size for size in known if size > count][:1]
    near = " and ".join(f"{generation.prefix}-{size}" for size in below + above)
    unit = "cores" if generation.counts_cores else "chips"
    return UsageError(
        f"TPU {generation.name} does not come with {count} {unit}",
        where=where,
        fix=f"The nearest known: {near}.",
    )
