"""What the variables tell libtpu of the slice and of this process, and where its devices are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polyxla_bridge import env
from polyxla_bridge.abi import Code
from polyxla_bridge.env import Coordinates
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.libtpu.host import Host, Shape

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

    Source: the precedence of the names is that in libtpu's log (``TPU_LOG_DIR``, libtpu 0.0.21). torch_tpu
        0.2.0 starts a process for each device of a TPU7x, with the bounds 2,2,1,2 and 1,1,1,1, and with its
        rank on the host in ``TPU_VISIBLE_CHIPS`` (seen by replacing ``setenv``). No document says which
        devices belong to one chip; here they follow each other, as in ``jax.devices()``.
    """

    processes: Shape
    chips: Shape
    task: int
    sharing: int
    visible: tuple[int, ...]
    addresses: tuple[str, ...]

    @classmethod
    def read(cls, environ: Mapping[str, str], host: Host) -> Topology:
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
        if count == 1 and len(visible) == host.chips:
            # Source: test_xla_devices_single_process_all_chips in torch_xla 2.9.0, test/pjrt.
            chips = host.shape
        (task,) = _numbers(environ, TASK, [0]) if count > 1 else (0,)
        addresses = tuple(_first(environ, ADDRESSES, DEFAULT_ADDRESS)[1].split(","))
        read = cls(processes, chips, task, sharing, visible, addresses if count > 1 else addresses[:1])
        read._check(environ, host)
        return read

    def _check(self, environ: Mapping[str, str], host: Host) -> None:
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
    def port(self) -> str:
        """The port of this process."""
        return self.addresses[self.task].rpartition(":")[2]

    def devices(self, host: Host) -> tuple[int, ...]:
        """Return this process's devices, by their numbers on the host: all of one chip, then the next."""
        each = host.generation.cores // self.sharing
        return tuple(first * each + core for first in self.visible for core in range(each))

    def places(self, host: Host) -> tuple[Coordinates, ...]:
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
            places.append((x, y, z, core))
        return tuple(places)

    def _origin(self, host: Host, size: list[int]) -> list[int]:
        """Return the coordinates of this host's first chip. Hosts count along x first."""
        hosts = [max(1, all_ // here) for all_, here in zip(size, host.shape, strict=True)]
        number = self.task * math.prod(self.chips) // (host.chips * self.sharing)
        x, rest = number % hosts[0], number // hosts[0]
        position = (x, rest % hosts[1], rest // hosts[1])
        return [step * here for step, here in zip(position, host.shape, strict=True)]


def in_slice(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of this process, with those of its host in the slice in a program that needs them.

    libtpu learns them from the metadata server. It would then wait for the other hosts in any program; here
    one that is not partitioned (SPMD) computes on its own host.
    """
    is_described = any(environ.get(name) for name in BOUNDS)
    if is_described or not env.is_spmd(environ):
        return environ
    given = environ.get(env.POLYXLA_LIBTPU_SLICE, "").split()
    return {**environ, **dict(one.split("=", 1) for one in given)}


def _first(environ: Mapping[str, str], names: tuple[str, ...], default: str) -> tuple[str, str]:
    """Return the first of the variables that is set, and its value."""
    return next(((name, environ[name]) for name in names if environ.get(name)), (names[0], default))


def _numbers(environ: Mapping[str, str], names: tuple[str, ...], default: Iterable[int]) -> tuple[int, ...]:
    text = _first(environ, names, ",".join(map(str, default)))[1]
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise _refused(environ, names, "numbers")
    return tuple(int(one) for one in text.split(","))


def _shape(environ: Mapping[str, str], names: tuple[str, ...], default: Shape, fourth: int) -> Shape:
    """Read a shape. It may have a fourth number: that of the devices of a chip, which says nothing new."""
    numbers = _numbers(environ, names, default)
    if len(numbers) not in (3, 4) or 0 in numbers or numbers[3:] not in ((), (fourth,)):
        raise _refused(environ, names, "three positive numbers")
    return numbers[0], numbers[1], numbers[2]


def _refused(environ: Mapping[str, str], names: tuple[str, ...], expected: str) -> PjrtError:
    name, value = _first(environ, names, "")
    return PjrtError(Code.INVALID_ARGUMENT, f"{name}={value} is not {expected}")
