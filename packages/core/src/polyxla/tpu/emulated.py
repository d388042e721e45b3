"""The TPU that `POLYXLA_EMULATE` emulates on this machine: what its hosts answer, from its type.

Behind the answers stands the bridge's emulated libtpu. Everything between `polyxla run` and the first call of
libtpu is the code that runs on a TPU.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Protocol

from polyxla.console import say_once
from polyxla.entry_points import entry_points
from polyxla.env import snapshot
from polyxla.errors import UsageError, pip_install
from polyxla.tpu import env
from polyxla.tpu.accelerators import AcceleratorType
from polyxla.tpu.chips import AttachedChip
from polyxla.tpu.megascale import DEFAULT_PORT
from polyxla.tpu.topology import BASE_PORT

POLYXLA_LIBTPU_HOST, POLYXLA_LIBTPU_DEV = "POLYXLA_LIBTPU_HOST", "POLYXLA_LIBTPU_DEV"
POLYXLA_LIBTPU_SLICE, POLYXLA_PJRT_PLUGIN = "POLYXLA_LIBTPU_SLICE", "POLYXLA_PJRT_PLUGIN"
POLYXLA_EMULATE_NUMERICS = "POLYXLA_EMULATE_NUMERICS"
"""Described in ``polyxla_bridge.env``; the bridge need not be installed to look for them."""
EMULATORS = "polyxla.emulators"
"""Entry-point group of the installed `Emulator`."""
_ATTEMPTS = 100


class Emulator(Protocol):
    """What polyxla-bridge offers under `EMULATORS`; core imports no other package of ours."""

    @property
    def library(self) -> Path:
        """The shared library that stands in for libtpu."""

    def check(self, environ: Mapping[str, str]) -> None:
        """Check the variables of emulated devices.

        Raises:
            ValueError: one is invalid; the text says what to write after a semicolon.
        """


def installed_emulator() -> Emulator | None:
    """Return the installed emulator; None if there is none."""
    return next((point.load() for point in entry_points(EMULATORS)), None)


@dataclass(frozen=True)
class EmulatedTpu:
    """A TPU that this machine emulates.

    Attributes:
        accelerator: the type of its slices.
        host: the number of the only host that is emulated here; None where one launch emulates all hosts.
        slices: number of slices of the job.
    """

    accelerator: AcceleratorType
    host: int | None = None
    slices: int = 1

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> EmulatedTpu | None:
        """Read which TPU to emulate, if any.

        Raises:
            UsageError: there is no such type or host, or the environment has another number of slices.
        """
        text = environ.get(env.POLYXLA_EMULATE)
        if not text:
            return None
        where = f"{env.POLYXLA_EMULATE}={text}"
        slices, accelerator = AcceleratorType.parse_slices(text, where)
        emulated = cls(accelerator, slices=slices)
        emulated._check_megascale(environ, where)
        return replace(emulated, host=_host(environ.get(env.POLYXLA_EMULATE_HOST), emulated))

    def _check_megascale(self, environ: Mapping[str, str], where: str) -> None:
        # A replica process of this TPU has the number too.
        given = environ.get(env.MEGASCALE_NUM_SLICES) or str(self.slices)
        if given != str(self.slices):
            raise UsageError(
                f"{env.MEGASCALE_NUM_SLICES}={given} contradicts a TPU of {self.slices} "
                f"{'slice' if self.slices == 1 else 'slices'}",
                where=where,
                fix=f"Unset {env.MEGASCALE_NUM_SLICES}, or write {env.POLYXLA_EMULATE}=2x"
                f"{self.accelerator.name} for two slices.",
            )

    @property
    def name(self) -> str:
        """Its name: the type of its slices, after their number if there are several."""
        return self.accelerator.name_of(self.slices)

    @property
    def hosts(self) -> int:
        """Number of hosts of all slices."""
        return self.slices * self.accelerator.hosts

    @property
    def device_count(self) -> int:
        """Number of devices of all slices."""
        return self.slices * self.accelerator.devices

    @property
    def hosts_here(self) -> int:
        """The number of hosts that one launch emulates."""
        return self.hosts if self.host is None else 1

    @property
    def chips(self) -> tuple[AttachedChip, ...]:
        """The chips of one host, as the kernel would list them."""
        here = range(self.accelerator.chips_per_host)
        return tuple(AttachedChip(self.accelerator.generation, f"0000:00:{chip + 4:02x}.0") for chip in here)

    def describe(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a host of this TPU: variables describe the slice, as on GKE.

        Args:
            environ: of this process. Variables in it may choose a part of the host, as on a TPU.
        """
        each = self.accelerator.hosts
        slice_id, worker = divmod(self.host or 0, each)
        names = _addresses("127.0.0.1", self.hosts)
        own = names[slice_id * each : (slice_id + 1) * each]
        return {
            env.TPU_WORKER_HOSTNAMES: ",".join(own) if len(names) > 1 else "localhost",
            env.MEGASCALE_COORDINATOR_ADDRESS: f"{names[0]}:{DEFAULT_PORT}",
            # The environment may override what stands above, where the hosts are. What follows always
            # describes the emulated TPU.
            **environ,
            env.TPU_SKIP_MDS_QUERY: "1",
            env.TPU_ACCELERATOR_TYPE: self.accelerator.name,
            env.TPU_WORKER_ID: str(worker),
            env.MEGASCALE_NUM_SLICES: str(self.slices),
            env.MEGASCALE_SLICE_ID: str(slice_id),
        }

    def require_library(self, environ: Mapping[str, str]) -> None:
        """Check that the emulated libtpu is installed, and what the environment says to it.

        Raises:
            UsageError: it is missing, or a variable is invalid.
        """
        if installed_emulator() is None:
            raise UsageError(
                "an emulated TPU needs polyxla-bridge, which is not installed",
                where=f"{env.POLYXLA_EMULATE}={self.name}",
                fix=f"Install it ({pip_install('polyxla-bridge')}), or unset {env.POLYXLA_EMULATE}.",
            )
        check_device_variables(environ)

    def devices(self, environ: Mapping[str, str]) -> str:
        """Return the name that the chips of this process's host have in `environ`, or a new one.

        Processes with the same name share the chips: two of them cannot use the same one at the same time.
        """
        # Random bits of the system's, not of Python's generator: a program seeds that one alike in every job.
        return environ.get(POLYXLA_LIBTPU_DEV) or f"{random.SystemRandom().getrandbits(64):016x}"

    def library_environment(self, devices: str) -> dict[str, str]:
        """Return the variables that point a process at the emulated libtpu, and select its chips there.

        Args:
            devices: the name of the chips of the process's host.
        """
        emulator = installed_emulator()
        assert emulator, "require_library comes first"
        shape = "x".join(map(str, self.accelerator.bounds.chips_per_host))
        return {
            env.TPU_LIBRARY_PATH: str(emulator.library),
            POLYXLA_LIBTPU_HOST: f"{self.accelerator.generation}:{shape}",
            POLYXLA_LIBTPU_DEV: devices,
        }

    def say(self, used_as: str) -> None:
        """Print once that a TPU is emulated, and what of it the program uses."""
        host = "" if self.host is None else f", host {self.host}"
        plugin = snapshot().get(POLYXLA_PJRT_PLUGIN)
        where = f"the devices of {POLYXLA_PJRT_PLUGIN}={plugin}" if plugin else "this machine's CPU"
        whose = "theirs" if plugin else "the CPU's"
        as_on_tpu = snapshot().get(POLYXLA_EMULATE_NUMERICS)
        theirs = "names, layout and products of float32" if as_on_tpu else "names and layout"
        say_once(
            f"emulating a {self.name}{host} on {where}: {used_as}; {theirs} "
            f"are a TPU's, {'other numbers' if as_on_tpu else 'numbers'} and speed {whose}"
        )


def check_device_variables(environ: Mapping[str, str]) -> None:
    """Check the variables of the bridge's devices; otherwise the first process to make a device would fail.

    Raises:
        UsageError: one of them is invalid.
    """
    # Without the bridge there is no such device, and the missing package is reported elsewhere.
    emulator = installed_emulator()
    try:
        if emulator:
            emulator.check(environ)
    except ValueError as error:
        what, _, fix = str(error).partition("; ")
        raise UsageError(what, fix=f"{fix[:1].upper()}{fix[1:]}.") from None


def _host(text: str | None, emulated: EmulatedTpu) -> int | None:
    if not text:
        return None
    # isdecimal alone accepts the digits of other scripts.
    if text.isascii() and text.isdecimal() and int(text) < emulated.hosts:
        return int(text)
    numbers = "0" if emulated.hosts == 1 else f"0 to {emulated.hosts - 1}"
    raise UsageError(
        f"the hosts of a {emulated.name} have the numbers {numbers}",
        where=f"{env.POLYXLA_EMULATE_HOST}={text}",
        fix=f"Write one of them, or unset {env.POLYXLA_EMULATE_HOST} to emulate all hosts in one launch.",
    )


def free_addresses(count: int) -> list[str]:
    """Return addresses for the emulated hosts of one job; on them libtpu's usual ports are free.

    Linux gives a machine all of 127.0.0.0/8, so that several jobs can have those ports at the same time.

    Raises:
        OSError: none is free.
    """
    chosen = random.SystemRandom()
    # Chosen at random, because jobs that start together would all find the first address free.
    for _ in range(_ATTEMPTS):
        first = f"127.{chosen.randint(1, 250)}.{chosen.randint(1, 254)}.1"
        with suppress(OSError), closing(socket.create_server((first, BASE_PORT))):
            return _addresses(first, count)
    raise OSError(f"port {BASE_PORT} is not free on any of {_ATTEMPTS} addresses of this machine")


def _addresses(first: str, count: int) -> list[str]:
    return [str(IPv4Address(first) + number) for number in range(count)]
