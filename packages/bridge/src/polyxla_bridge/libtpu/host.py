"""The chips of the emulated host."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from polyxla_bridge.abi import Code
from polyxla_bridge.env import POLYXLA_LIBTPU_DEV, POLYXLA_LIBTPU_HOST
from polyxla_bridge.errors import PjrtError

Shape = tuple[int, int, int]
"""A count, or a position, in each direction: ``(x, y, z)``."""


@dataclass(frozen=True)
class Generation:
    """What libtpu says of the chips of one generation.

    Attributes:
        kind: the device kind.
        cores: devices of a chip.
        tensor_cores: TensorCores of a device.
        memory_gib: memory of a device, in GiB.
        counts_y_first: whether the chips of a host count along y first; otherwise along x.
    """

    kind: str
    cores: int
    tensor_cores: int
    memory_gib: int
    counts_y_first: bool


GENERATIONS = {
    "v2": Generation("TPU v2", 2, 1, 8, counts_y_first=True),
    "v3": Generation("TPU v3", 2, 1, 16, counts_y_first=True),
    "v4": Generation("TPU v4", 1, 2, 32, counts_y_first=True),
    "v5e": Generation("TPU v5 lite", 1, 1, 16, counts_y_first=False),
    "v5p": Generation("TPU v5", 1, 2, 95, counts_y_first=True),
    "v6e": Generation("TPU v6 lite", 1, 1, 32, counts_y_first=False),
    "v7x": Generation("TPU7x", 2, 1, 96, counts_y_first=True),
}
"""By short name.

Source: for the kinds, ``jax.Device.device_kind``. For the order, the bounds that go with chips 0 and 1: 1,2,1
in ``ray._private.accelerators.tpu``, and for v7x in GKE's device plugin, but 2,1,1 on v5e. That of v6e is not
documented; its boards are arranged like v5e's. For the memory, the pages "TPU v2" to "TPU7x" of the Cloud TPU
documentation, of which libtpu keeps a small part for itself.
"""


@dataclass(frozen=True)
class Host:
    """The chips of a host.

    Attributes:
        generation: of the chips.
        shape: how they are arranged.
        dev: the name of this host's devices; processes with the same name share the chips.
    """

    generation: Generation
    shape: Shape
    dev: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Host:
        """Read the description of this host.

        Raises:
            PjrtError: it is missing or wrong.
        """
        text = environ.get(POLYXLA_LIBTPU_HOST, "")
        if not text:
            raise PjrtError(
                Code.FAILED_PRECONDITION,
                "no TPU chip is attached to this machine, and none is emulated; set POLYXLA_EMULATE=v5e-1, "
                "for example, before the program starts",
            )
        match = re.fullmatch(r"(\w+):(\d)x(\d)x(\d)", text, re.ASCII)
        generation = GENERATIONS.get(match[1]) if match else None
        if match is None or generation is None:
            raise PjrtError(
                Code.FAILED_PRECONDITION,
                f"{POLYXLA_LIBTPU_HOST}={text!r} does not describe the chips of a host, such as v4:2x2x1; "
                "POLYXLA_EMULATE=v4-8 sets it",
            )
        shape = (int(match[2]), int(match[3]), int(match[4]))
        return cls(generation, shape, environ.get(POLYXLA_LIBTPU_DEV, ""))

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    def position(self, chip: int) -> Shape:
        """Return the position of a chip on this host."""
        x, y, z = (range(size) for size in self.shape)
        if self.generation.counts_y_first:
            every = ((i, j, k) for k, i, j in itertools.product(z, x, y))
        else:
            every = ((i, j, k) for k, j, i in itertools.product(z, y, x))
        return tuple(every)[chip]
