"""The variables that say which replicas a bridge's process holds; a launcher gives them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

PJRT_CPU = "CPU_POLYXLA"
"""The value of ``PJRT_DEVICE`` that chooses the bridge; torch_xla calls the device ``CPU``."""

POLYXLA_BRIDGE_REPLICAS = "POLYXLA_BRIDGE_REPLICAS"
"""Number of replicas of the job.
Default: 1.
"""

POLYXLA_BRIDGE_PROCESSES = "POLYXLA_BRIDGE_PROCESSES"
"""Number of processes, which hold equal shares of the replicas.
Default: 1.
"""

POLYXLA_BRIDGE_PROCESS = "POLYXLA_BRIDGE_PROCESS"
"""This process's number.
Default: 0.
"""

POLYXLA_BRIDGE_COORDINATOR = "POLYXLA_BRIDGE_COORDINATOR"
"""``host:port`` where replicas meet; process 0 listens there.
Default: none, which is right for one replica only.
"""

POLYXLA_BRIDGE_HOST = "POLYXLA_BRIDGE_HOST"
"""Name or address of this host, as the processes on the others reach it.
Default: ``127.0.0.1``, which is right where all processes are on one.
"""

POLYXLA_BRIDGE_PLATFORM = "POLYXLA_BRIDGE_PLATFORM"
"""What torch_xla is told that the devices are; an emulated TPU says ``TPU``.
Default: ``CPU``.
"""

POLYXLA_BRIDGE_KIND = "POLYXLA_BRIDGE_KIND"
"""The kind of device in its attributes, ``TPU v3`` for one.
Default: ``polyxla CPU``.
"""

POLYXLA_STALL_TIMEOUT_S = "POLYXLA_STALL_TIMEOUT_S"
"""How long a program may wait in its collectives for other replicas before the process says where each
of its replicas is and ends, in seconds. A replica that compiles or computes keeps the others waiting
rightly; one that never comes does not.
Default: 300.
"""

POLYXLA_COMPILE_CACHE = "POLYXLA_COMPILE_CACHE"
"""Folder where compiled programs are kept for the jobs that follow, or ``off`` (``0``, nothing).
Default: ``on`` (``1``), which is ``polyxla/programs`` in the person's folder of caches.
"""

XDG_CACHE_HOME = "XDG_CACHE_HOME"
"""The person's folder of caches; a relative one does not count.
Default: ``.cache`` in `HOME`.
Source: XDG Base Directory Specification 0.8.
"""

HOME = "HOME"
"""The person's own folder.
Default: none, and no programs are kept.
"""

XLA_PERSISTENT_CACHE_PATH = "XLA_PERSISTENT_CACHE_PATH"
"""Folder where compiled programs are kept and looked for; torch_xla's ``xr.initialize_cache`` sets it.
Default: what `POLYXLA_COMPILE_CACHE` says.
"""

XLA_PERSISTENT_CACHE_READ_ONLY = "XLA_PERSISTENT_CACHE_READ_ONLY"
"""Anything but ``0`` or ``false``: programs are taken from that folder, and none is added.
Default: ``0``.
"""

NPROC = "NPROC"
"""How many threads XLA's own pools have; a program is compiled for so many.
Default: the number of cores.
"""

XLA_FLAGS = "XLA_FLAGS"
"""XLA's own options; one that is set here is not set otherwise by the engine.
Default: none.
"""


_OFF, _ON = ("off", "0", ""), ("on", "1")


class Origin(Enum):
    """Who chose the folder of compiled programs.

    Attributes:
        NOBODY: there is none.
        PROGRAM: the program, by ``xr.initialize_cache``.
        PERSON: the person, by `POLYXLA_COMPILE_CACHE`.
        HOME: it is the default, which is the person's alone.
    """

    NOBODY = auto()
    PROGRAM = auto()
    PERSON = auto()
    HOME = auto()


@dataclass(frozen=True)
class Share:
    """Which replicas there are, which of them this process holds, and what they call themselves."""

    replicas: int = 1
    processes: int = 1
    process: int = 0
    coordinator: str = ""
    host: str = "127.0.0.1"
    platform: str = "CPU"
    kind: str = "polyxla CPU"
    stall_timeout_s: float = 300.0
    xla_flags: str = ""
    nproc: str = ""
    cache_path: str = ""
    cache_origin: Origin = Origin.NOBODY
    cache_is_readonly: bool = False

    @property
    def per_process(self) -> int:
        """Replicas in each process."""
        return self.replicas // self.processes

    @property
    def local(self) -> tuple[int, ...]:
        """This process's replicas."""
        return tuple(range(self.process * self.per_process, (self.process + 1) * self.per_process))


def from_environ(environ: Mapping[str, str]) -> Share:
    """Read this process's share.

    Raises:
        ValueError: the numbers do not fit together.
    """
    cache_origin, cache_path = _cache(environ)
    share = Share(
        replicas=int(environ.get(POLYXLA_BRIDGE_REPLICAS, "1")),
        processes=int(environ.get(POLYXLA_BRIDGE_PROCESSES, "1")),
        process=int(environ.get(POLYXLA_BRIDGE_PROCESS, "0")),
        coordinator=environ.get(POLYXLA_BRIDGE_COORDINATOR, ""),
        host=environ.get(POLYXLA_BRIDGE_HOST, Share.host),
        platform=environ.get(POLYXLA_BRIDGE_PLATFORM, Share.platform),
        kind=environ.get(POLYXLA_BRIDGE_KIND, Share.kind),
        stall_timeout_s=_seconds(environ, POLYXLA_STALL_TIMEOUT_S, Share.stall_timeout_s),
        xla_flags=environ.get(XLA_FLAGS, ""),
        nproc=environ.get(NPROC, ""),
        cache_path=cache_path,
        cache_origin=cache_origin,
        cache_is_readonly=cache_origin is Origin.PROGRAM
        and environ.get(XLA_PERSISTENT_CACHE_READ_ONLY, "").lower() not in ("", "0", "false"),
    )
    if share.replicas < 1 or share.processes < 1 or share.replicas % share.processes:
        raise ValueError(f"{share.replicas} replicas cannot be shared equally by {share.processes} processes")
    if not 0 <= share.process < share.processes:
        raise ValueError(f"{POLYXLA_BRIDGE_PROCESS}={share.process} is not in 0..{share.processes - 1}")
    if share.replicas > 1 and not share.coordinator:
        raise ValueError(f"{share.replicas} replicas need {POLYXLA_BRIDGE_COORDINATOR} to meet")
    host, _, port = share.coordinator.rpartition(":")
    if share.coordinator and not (host and port.isdecimal()):
        raise ValueError(f"{POLYXLA_BRIDGE_COORDINATOR}={share.coordinator!r} is not host:port")
    return share


def _cache(environ: Mapping[str, str]) -> tuple[Origin, str]:
    """Return who chose the folder of compiled programs, and which it is; none has no name."""
    if path := environ.get(XLA_PERSISTENT_CACHE_PATH):
        return Origin.PROGRAM, path
    asked = environ.get(POLYXLA_COMPILE_CACHE, "on")
    if asked.lower() in _OFF:
        return Origin.NOBODY, ""
    if asked.lower() not in _ON:
        return Origin.PERSON, asked
    caches, home = environ.get(XDG_CACHE_HOME, ""), environ.get(HOME, "")
    if not caches.startswith("/"):
        caches = f"{home}/.cache" if home else ""
    return Origin.HOME, f"{caches}/polyxla/programs" if caches else ""


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # Written so that "nan" is refused too; "inf" is a wish that can be met.
    if not seconds > 0:
        raise ValueError(f"{name}={text!r} is not a number of seconds above 0")
    return seconds


def current() -> Share:
    """Read this process's share from its own environment."""
    return from_environ(os.environ)
