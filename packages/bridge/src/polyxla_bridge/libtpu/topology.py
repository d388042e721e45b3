"""Where the devices are: the chips of the emulated host, and the slice that libtpu's variables describe."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polyxla_bridge import env
from polyxla_bridge.abi import Code
from polyxla_bridge.env import POLYXLA_LIBTPU_DEV, POLYXLA_LIBTPU_HOST, Coordinates
from polyxla_bridge.errors import PjrtError

Shape = tuple[int, int, int]
"""A count, or a position, in each direction: ``(x, y, z)``."""


@dataclass(frozen=True)
class EmulatedGeneration:
    """What the emulated libtpu says of the chips of one generation.

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


EMULATED_GENERATIONS = {
    "v2": EmulatedGeneration("TPU v2", 2, 1, 8, counts_y_first=True),
    "v3": EmulatedGeneration("TPU v3", 2, 1, 16, counts_y_first=True),
    "v4": EmulatedGeneration("TPU v4", 1, 2, 32, counts_y_first=True),
    "v5e": EmulatedGeneration("TPU v5 lite", 1, 1, 16, counts_y_first=False),
    "v5p": EmulatedGeneration("TPU v5", 1, 2, 95, counts_y_first=True),
    "v6e": EmulatedGeneration("TPU v6 lite", 1, 1, 32, counts_y_first=False),
    "v7x": EmulatedGeneration("TPU7x", 2, 1, 96, counts_y_first=True),
}
"""By short name.

Source: for the kinds, ``jax.Device.device_kind``. For the order, the bounds that go with chips 0 and 1: 1,2,1
in ``ray._private.accelerators.tpu``, and for v7x in GKE's device plugin, but 2,1,1 on v5e. That of v6e is not
documented; its boards are arranged like v5e's. For the memory, the pages "TPU v2" to "TPU7x" of the Cloud TPU
documentation, of which libtpu keeps a small part for itself.
"""


@dataclass(frozen=True)
class EmulatedHost:
    """The chips of the emulated host.

    Attributes:
        generation: of the chips.
        shape: how they are arranged.
        dev: the name of this host's devices; processes with the same name share the chips.
    """

    generation: EmulatedGeneration
    shape: Shape
    dev: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> EmulatedHost:
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
        generation = EMULATED_GENERATIONS.get(match[1]) if match else None
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


BOUNDS = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
"""The processes of the slice in each direction; the first that is set. Default: ``1,1,1``."""
CHIPS = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")
"""The chips of a process in each direction. Default: those of the host."""
VISIBLE = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
"""The chips of this process, by their numbers on the host. Default: all.

Where the chips of a process have a fourth number, its devices of a chip, these are the numbers of devices.
"""
TASK = ("CLOUD_TPU_TASK_ID", "TPU_WORKER_ID")
"""The number of this process. Default: 0."""
ADDRESSES = ("TPU_PROCESS_ADDRESSES",)
"""``host:port`` of every process, by number."""
PORT = ("TPU_PROCESS_PORT",)
"""The port of this process. Default: that of its address."""
SLICES = ("MEGASCALE_NUM_SLICES",)
"""The slices of the job. Default: 1."""
SLICE = ("MEGASCALE_SLICE_ID",)
"""The number of this process's slice. Without it or the next one, the slice is a job of its own."""
COORDINATOR = ("MEGASCALE_COORDINATOR_ADDRESS",)
"""``host:port`` where the processes of all slices meet."""
NO_SLICES = ("SKIP_MEGASCALE_PJRT_CLIENT",)
"""If it is ``true`` or ``1``, the slice is a job of its own."""

DEFAULT_ADDRESS = "localhost:8471"
"""Source: libtpu's log (``TPU_LOG_DIR``, libtpu 0.0.21)."""


@dataclass(frozen=True)
class Topology:
    """The slice as the variables of one of its processes describe it.

    Attributes:
        processes: in each direction.
        chips: of one process, in each direction.
        task: number of this process.
        sharing: processes that share a chip: 1, or as many as a chip has devices.
        visible: this process's chips, or its devices if processes share a chip, by their numbers on the host.
        addresses: ``host:port`` of each process.
        slices: number of slices of the job, all like this one.
        slice_id: number of this one.
        coordinator: ``host:port`` where the processes of several slices meet; empty for a single slice.

    Source: the precedence of the names is that in libtpu's log (``TPU_LOG_DIR``, libtpu 0.0.21). torch_tpu
        0.2.0 starts a process for each device of a TPU7x, with the bounds 2,2,1,2 and 1,1,1,1, and with its
        rank on the host in ``TPU_VISIBLE_CHIPS`` (seen by replacing ``setenv``). No document says which
        devices belong to one chip; here they follow each other, as in ``jax.devices()``. For the variables
        of several slices, the messages of torch_tpu 0.2.0's ``device_mesh``.
    """

    processes: Shape
    chips: Shape
    task: int
    sharing: int
    visible: tuple[int, ...]
    addresses: tuple[str, ...]
    slices: int = 1
    slice_id: int = 0
    coordinator: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str], host: EmulatedHost) -> Topology:
        """Read the variables of this process.

        Raises:
            PjrtError: they are invalid, or contradict each other.
        """
        processes = _shape(environ, BOUNDS, (1, 1, 1), host.generation.cores)
        chips = _shape(environ, CHIPS, host.shape, 1)
        has_fourth = _first(environ, CHIPS, "")[1].count(",") == 3
        sharing = host.generation.cores if has_fourth else 1
        visible = _numbers(environ, VISIBLE, range(host.chips * sharing))
        count = math.prod(processes) * sharing
        # A process with all chips of the host has their shape, whatever the variables say.
        if count == 1 and len(visible) == host.chips:
            # Source: test_xla_devices_single_process_all_chips in torch_xla 2.9.0, test/pjrt.
            chips = host.shape
        (task,) = _numbers(environ, TASK, [0]) if count > 1 else (0,)
        addresses = tuple(_first(environ, ADDRESSES, DEFAULT_ADDRESS)[1].split(","))
        slices, slice_id, coordinator = _slices(environ)
        # A process of several slices has an address of its own even where it is its slice's only one.
        own = addresses if count > 1 else addresses[:1]
        read = cls(processes, chips, task, sharing, visible, own, slices, slice_id, coordinator)
        read._check(environ, host)
        return read

    def _check(self, environ: Mapping[str, str], host: EmulatedHost) -> None:
        each, here = math.prod(self.chips), host.chips * self.sharing
        if len(self.visible) != each or max(self.visible) >= here:
            raise _refused(environ, VISIBLE, f"the {each} of {here} chips that {CHIPS[0]} describes")
        count = math.prod(self.processes) * self.sharing
        if len(self.addresses) != count:
            raise _refused(environ, ADDRESSES, f"the addresses of {count} processes")
        if self.task >= len(self.addresses):
            raise _refused(environ, TASK, f"one of {len(self.addresses)} processes")
        if _first(environ, PORT, self.port)[1] != self.port:
            raise _refused(environ, PORT, f"the port in {self.addresses[self.task]}, its own address")

    @property
    def process_count(self) -> int:
        """Number of processes of all slices."""
        return self.slices * len(self.addresses)

    @property
    def process(self) -> int:
        """The number of this process among them: they count through the slices."""
        return self.slice_id * len(self.addresses) + self.task

    @property
    def port(self) -> str:
        """The port of this process."""
        return self.addresses[self.task].rpartition(":")[2]

    def devices(self, host: EmulatedHost) -> tuple[int, ...]:
        """Return this process's devices, by their numbers on the host: all of one chip, then the next."""
        each = host.generation.cores // self.sharing
        return tuple(first * each + core for first in self.visible for core in range(each))

    def places(self, host: EmulatedHost) -> tuple[Coordinates, ...]:
        """Return where the devices of this process are, in the order of `devices`.

        A chip that is not part of the box that the bounds describe is counted as if the box were repeated
        there. Then it has the coordinates of another chip, and the job is refused.
        """
        size = [many * each for many, each in zip(self.processes, self.chips, strict=True)]
        origin = self._origin(host, size)
        places = []
        for device in self.devices(host):
            chip, core = divmod(device, host.generation.cores)
            at = zip(origin, host.position(chip), size, strict=True)
            x, y, z = ((first + step) % end for first, step, end in at)
            places.append(Coordinates(x, y, z, core, self.slice_id if self.slices > 1 else None))
        return tuple(places)

    def _origin(self, host: EmulatedHost, size: list[int]) -> list[int]:
        """Return the coordinates of this host's first chip. Hosts count along x first."""
        # The processes' box may be smaller than a host, if they use some of its chips.
        hosts = [max(1, all_ // here) for all_, here in zip(size, host.shape, strict=True)]
        # Several processes may share a host. The devices of those before this fill the hosts before its own.
        number = self.task * math.prod(self.chips) // (host.chips * self.sharing)
        x, rest = number % hosts[0], number // hosts[0]
        position = (x, rest % hosts[1], rest // hosts[1])
        return [step * here for step, here in zip(position, host.shape, strict=True)]


def in_slice(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of this process, with those of its host in the slice in a program that needs them.

    libtpu learns them from the metadata server. It would then wait for the other hosts in any program; here
    one that is not partitioned (SPMD) computes on its own host.
    """
    # If this process's own variables describe the slice, those of its host do not matter.
    is_described = any(environ.get(name) for name in BOUNDS)
    if is_described or not env.is_spmd(environ):
        return environ
    given = environ.get(env.POLYXLA_LIBTPU_SLICE, "").split()
    return {**environ, **dict(pair.split("=", 1) for pair in given)}


def _slices(environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Read the number of slices, that of this one, and where all meet."""
    is_alone = environ.get(NO_SLICES[0], "").lower() in ("true", "1")
    if is_alone or not all(environ.get(name) for (name,) in (SLICES, SLICE, COORDINATOR)):
        return 1, 0, ""
    (slices,), (slice_id,) = _numbers(environ, SLICES, [1]), _numbers(environ, SLICE, [0])
    if slices == 1:
        return 1, 0, ""
    if slice_id >= slices:
        raise _refused(environ, SLICE, f"one of {slices} slices")
    coordinator = environ[COORDINATOR[0]]
    if not re.fullmatch(r".+:\d{1,5}", coordinator, re.ASCII):
        raise _refused(environ, COORDINATOR, "host:port")
    return slices, slice_id, coordinator


def _first(environ: Mapping[str, str], names: tuple[str, ...], default: str) -> tuple[str, str]:
    """Return the first of the variables that is set, and its value."""
    return next(((name, environ[name]) for name in names if environ.get(name)), (names[0], default))


def _numbers(environ: Mapping[str, str], names: tuple[str, ...], default: Iterable[int]) -> tuple[int, ...]:
    text = _first(environ, names, ",".join(map(str, default)))[1]
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise _refused(environ, names, "numbers")
    return tuple(int(part) for part in text.split(","))


def _shape(environ: Mapping[str, str], names: tuple[str, ...], default: Shape, fourth: int) -> Shape:
    """Read a shape. It may have a fourth number, of a chip's devices, which the generation determines."""
    numbers = _numbers(environ, names, default)
    if len(numbers) not in (3, 4) or 0 in numbers or numbers[3:] not in ((), (fourth,)):
        raise _refused(environ, names, "three positive numbers")
    return numbers[0], numbers[1], numbers[2]


def _refused(environ: Mapping[str, str], names: tuple[str, ...], expected: str) -> PjrtError:
    name, value = _first(environ, names, "")
    return PjrtError(Code.INVALID_ARGUMENT, f"{name}={value} is not {expected}")
