"""Environment variables that describe the job to a process of the bridge; a launcher sets them."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

POLYXLA_BRIDGE_REPLICAS = "POLYXLA_BRIDGE_REPLICAS"
"""Number of replicas in the job.
Default: 1.
"""

POLYXLA_BRIDGE_PROCESSES = "POLYXLA_BRIDGE_PROCESSES"
"""Number of processes; each holds the same number of replicas.
Default: 1.
"""

POLYXLA_BRIDGE_PROCESS = "POLYXLA_BRIDGE_PROCESS"
"""Index of this process.
Default: 0.
"""

POLYXLA_BRIDGE_COORDINATOR = "POLYXLA_BRIDGE_COORDINATOR"
"""``host:port`` where the replicas meet; process 0 listens there.
Default: not set, which is enough for a single replica.
"""

POLYXLA_BRIDGE_HOST = "POLYXLA_BRIDGE_HOST"
"""Name or address of this host, as processes on other hosts reach it.
Default: ``127.0.0.1``, which is enough when all processes run on one host.
"""

POLYXLA_SECRET = "POLYXLA_SECRET"  # noqa: S105  (a variable's name, not a secret)
"""What only the processes of the job know; they believe what is sealed with it.
Default: not set, which is enough for one process.
"""

POLYXLA_LIBTPU_HOST = "POLYXLA_LIBTPU_HOST"
"""The chips of the emulated TPU host: generation and arrangement, such as ``v4:2x2x1``.
Default: not set, and the emulated libtpu finds no TPU.
"""

POLYXLA_LIBTPU_DEV = "POLYXLA_LIBTPU_DEV"
"""The name of the emulated TPU host's devices: of processes with the same name, one at a time uses a chip.
Default: empty, the name of the only emulated host of this machine.
"""

POLYXLA_LIBTPU_SLICE = "POLYXLA_LIBTPU_SLICE"
"""What libtpu would learn from the metadata server of a slice with several hosts: the variables of a process
with all chips of its host, separated by spaces. An SPMD program uses them if no variable describes the slice.
Default: not set; the emulated host is alone.
"""

POLYXLA_LIBTPU_PROGRAMS = "POLYXLA_LIBTPU_PROGRAMS"
"""Directory in which the emulated libtpu records each program that it is asked to compile, its compile
options, and a log of executions. It then computes small programs only: results of the others are zeros.
Default: not set; nothing is recorded and everything is computed.
"""

POLYXLA_EMULATE_NUMERICS = "POLYXLA_EMULATE_NUMERICS"
"""``tpu``: products of float32 are computed as a TPU computes them: at the default precision, of operands
that are rounded to bfloat16.
Default: not set; they are products of float32.
"""

POLYXLA_EMULATE_KERNELS = "POLYXLA_EMULATE_KERNELS"
"""``races``: a kernel for TPU cores is first run once, with zeros, by JAX's detector of races.
Default: not set; a race goes unnoticed.
"""

POLYXLA_PJRT_PLUGIN = "POLYXLA_PJRT_PLUGIN"
"""A PJRT plugin on whose devices the bridge computes: the path of its library, or ``libtpu`` or ``cuda`` for
the one of an installed package.
Default: not set; the bridge computes on the CPU, with jaxlib.
"""

POLYXLA_PJRT_OPTIONS = "POLYXLA_PJRT_OPTIONS"
"""The plugin's own options for its client, as a JSON object of strings, numbers, booleans and lists of
integers, such as ``{"cpu_device_count": 2}``.
Default: not set; no options.
"""

POLYXLA_STALL_TIMEOUT_S = "POLYXLA_STALL_TIMEOUT_S"
"""Longest wait of a program in its collectives for other replicas, in seconds. When it is over, the process
reports where each of its replicas is, and ends. The time in which another replica compiles or computes does
not count: only a replica that never arrives is a stall.
Default: 300.
"""

POLYXLA_SHARED_MEMORY = "POLYXLA_SHARED_MEMORY"
"""Whether replicas of one machine pass arrays to each other through memory that they share, or ``off`` (also
``0`` or empty): through gloo's sockets.
Default: ``on`` (also ``1``).
"""

_MALLOC_SETTINGS = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
"""Variables by which a user decides what freed memory glibc keeps, in place of the bridge.
Default: not set; the bridge lets it keep arrays of up to 1 GiB.
Source: mallopt(3) and ld.so(8).
"""

POLYXLA_CPU_KERNELS = "POLYXLA_CPU_KERNELS"
"""Whose convolutions and products CPU replicas, emulated chips and XLA's CPU client as a plugin compute with:
``torch``, where its library has faster ones than XLA, or ``xla``.
Default: ``torch``.
"""

POLYXLA_COMPILE_CACHE = "POLYXLA_COMPILE_CACHE"
"""Directory that caches compiled programs for later jobs, or ``off`` (also ``0`` or empty).
Default: ``on`` (also ``1``), which is ``polyxla/programs`` in the user's cache directory.
"""

XDG_CACHE_HOME = "XDG_CACHE_HOME"
"""The user's cache directory; a relative path is ignored.
Default: ``.cache`` in `HOME`.
Source: XDG Base Directory Specification 0.8.
"""

HOME = "HOME"
"""The user's home directory.
Default: not set, and no programs are cached.
"""

XLA_PERSISTENT_CACHE_PATH = "XLA_PERSISTENT_CACHE_PATH"
"""Directory that caches compiled programs; torch_xla's ``xr.initialize_cache`` sets it.
Default: the directory of `POLYXLA_COMPILE_CACHE`.
"""

XLA_PERSISTENT_CACHE_READ_ONLY = "XLA_PERSISTENT_CACHE_READ_ONLY"
"""Any value but ``0`` or ``false``: programs are loaded from that directory, and none is added.
Default: ``0``.
"""

POLYXLA_BRIDGE_CALLS = "POLYXLA_BRIDGE_CALLS"
"""Directory in which each process records the functions of PJRT's table that its framework calls.
Default: not set; nothing is recorded.
"""

POLYXLA_DEVICE_MEMORY = "POLYXLA_DEVICE_MEMORY"
"""Limit of each device's memory, in bytes or as in ``512MiB`` and ``16GiB``; or ``on``: what the device
reports, on an emulated TPU the chip's HBM, otherwise an equal share of the machine's memory. Arrays and
programs that need more are refused, except on the devices of a PJRT plugin that counts their memory itself:
their own limit stays.
Default: ``off``; nothing is refused.
"""

TORCHELASTIC_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""``True`` in processes of torchrun whose store of torch.distributed is in torchrun's own process.
Default: not set; the store is in the process of rank 0.
"""

NPROC = "NPROC"
"""Number of threads in XLA's pools; programs are compiled for that number.
Default: the number of cores.
"""

XLA_USE_SPMD = "XLA_USE_SPMD"
"""``true`` or a positive number in an SPMD program; ``torch_xla.runtime.use_spmd`` sets ``1``.
Default: not set.
"""

XLA_FLAGS = "XLA_FLAGS"
"""Options for XLA. The engine does not override an option that is set here.
Default: not set.
"""

XLA_EXPERIMENTAL = "XLA_EXPERIMENTAL"
"""torch_xla's operations with dynamic shapes, such as ``nonzero``. The bridge refuses them.
Default: not set.
"""


class Coordinates(NamedTuple):
    """The place of a TPU's device: its chip in the slice, its core on the chip, and the slice of several."""

    x: int
    y: int
    z: int
    core: int
    slice_index: int | None = None


_UNITS = {"": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30}
"""Powers of two by which a memory's size may be given."""
_OFF, _ON = ("off", "0", ""), ("on", "1")


class CacheOrigin(Enum):
    """Who chose the directory of compiled programs.

    Attributes:
        OFF: nobody; there is no cache.
        PROGRAM: the program, by ``xr.initialize_cache``.
        USER: the user, by `POLYXLA_COMPILE_CACHE`.
        DEFAULT: it is the default, in the user's cache directory.
    """

    OFF = auto()
    PROGRAM = auto()
    USER = auto()
    DEFAULT = auto()


@dataclass(frozen=True)
class BridgeSettings:
    """The job's replicas, the part of them that this process holds, and how the engine runs them.

    `places` has the coordinates of this process's replicas, by which they are numbered. Without them,
    replicas count through the processes. `cores` is the number of TensorCores that a device is made of, and
    `memory_bytes` its memory; 0 is a share of the machine's. If it is limited, more is refused. Programs are
    recorded in the directory `programs_path`, or not recorded if it is empty. With `has_tpu_numerics`,
    products of float32 have a TPU's precision. `plugin` is the library of a
    PJRT plugin, or ``libtpu``; if it is empty, jaxlib computes. `plugin_options` are its client's options.
    The processes of a job have the same `secret`. If it `shares_memory`, replicas of one machine pass arrays
    to each other without sockets. With `has_torch_kernels`, programs call torch's library.
    """

    replicas: int = 1
    processes: int = 1
    process: int = 0
    coordinator: str = ""
    host: str = "127.0.0.1"
    platform: str = "CPU"
    kind: str = "polyxla CPU"
    stall_timeout_s: float = 300.0
    shares_memory: bool = True
    has_torch_kernels: bool = True
    xla_flags: str = ""
    nproc: str = ""
    cache_path: str = ""
    cache_origin: CacheOrigin = CacheOrigin.OFF
    cache_is_readonly: bool = False
    places: tuple[Coordinates, ...] = ()
    cores: int = 1
    memory_bytes: int = 0
    is_memory_limited: bool = False
    programs_path: str = ""
    has_tpu_numerics: bool = False
    plugin: str = ""
    # Without the job's secret, a process makes a random one, which must not make equal settings differ. No
    # secret may appear in messages or logs.
    secret: str = field(default_factory=lambda: secrets.token_hex(32), compare=False, repr=False)
    plugin_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def per_process(self) -> int:
        """Number of replicas in each process."""
        return self.replicas // self.processes

    @property
    def local(self) -> tuple[int, ...]:
        """Indices of this process's replicas, if they count through the processes."""
        return tuple(range(self.process * self.per_process, (self.process + 1) * self.per_process))


def from_environ(environ: Mapping[str, str]) -> BridgeSettings:
    """Read the settings of this process.

    Raises:
        ValueError: a value is invalid, or the values contradict each other.
    """
    if operations := environ.get(XLA_EXPERIMENTAL):
        # torch_xla would wait for such shapes with the GIL held, and hang: executions need the GIL.
        raise ValueError(
            f"{XLA_EXPERIMENTAL}={operations}: jaxlib's CPU client compiles no programs with dynamic shapes; "
            f"unset {XLA_EXPERIMENTAL}, or run on a TPU"
        )
    cache_origin, cache_path = _cache(environ)
    is_memory_limited, memory_bytes = device_memory(environ)
    settings = BridgeSettings(
        replicas=_integer(environ, POLYXLA_BRIDGE_REPLICAS, BridgeSettings.replicas),
        processes=_integer(environ, POLYXLA_BRIDGE_PROCESSES, BridgeSettings.processes),
        process=_integer(environ, POLYXLA_BRIDGE_PROCESS, BridgeSettings.process),
        coordinator=environ.get(POLYXLA_BRIDGE_COORDINATOR, ""),
        host=environ.get(POLYXLA_BRIDGE_HOST, BridgeSettings.host),
        stall_timeout_s=stall_timeout_s(environ),
        shares_memory=shares_memory(environ),
        has_torch_kernels=has_torch_kernels(environ),
        xla_flags=environ.get(XLA_FLAGS, ""),
        nproc=environ.get(NPROC, ""),
        cache_path=cache_path,
        cache_origin=cache_origin,
        # torch_xla's variable is about the directory that the program has chosen, not about the user's.
        cache_is_readonly=cache_origin is CacheOrigin.PROGRAM
        and environ.get(XLA_PERSISTENT_CACHE_READ_ONLY, "").lower() not in ("", "0", "false"),
        memory_bytes=memory_bytes,
        is_memory_limited=is_memory_limited,
        programs_path=environ.get(POLYXLA_LIBTPU_PROGRAMS, ""),
        has_tpu_numerics=has_tpu_numerics(environ),
        plugin=environ.get(POLYXLA_PJRT_PLUGIN, ""),
        plugin_options=plugin_options(environ),
    )
    if secret := environ.get(POLYXLA_SECRET):
        settings = dataclasses.replace(settings, secret=secret)
    _check(settings)
    check_secret(settings.processes, environ)
    return settings


def check_secret(processes: int, environ: Mapping[str, str]) -> None:
    """Check that the processes of a job have a secret.

    Raises:
        ValueError: they have none.
    """
    if processes > 1 and not environ.get(POLYXLA_SECRET):
        raise ValueError(
            f"{processes} processes need {POLYXLA_SECRET}, the same random text in each, by which they know "
            "each other; polyxla run sets it"
        )


def _check(settings: BridgeSettings) -> None:
    replicas, processes = settings.replicas, settings.processes
    if replicas < 1 or processes < 1 or replicas % processes:
        raise ValueError(
            f"{replicas} replicas cannot be shared equally by {processes} processes; "
            f"{POLYXLA_BRIDGE_REPLICAS} must be a multiple of {POLYXLA_BRIDGE_PROCESSES}, and both at least 1"
        )
    if not 0 <= settings.process < processes:
        raise ValueError(f"{POLYXLA_BRIDGE_PROCESS}={settings.process} is not in 0..{processes - 1}")
    if replicas > 1 and not settings.coordinator:
        raise ValueError(f"{replicas} replicas need {POLYXLA_BRIDGE_COORDINATOR}=host:port to meet at")
    host, _, port = settings.coordinator.rpartition(":")
    if settings.coordinator and not (host and port.isdecimal()):
        raise ValueError(f"{POLYXLA_BRIDGE_COORDINATOR}={settings.coordinator!r} is not host:port")


def _cache(environ: Mapping[str, str]) -> tuple[CacheOrigin, str]:
    """Return who chose the directory of compiled programs, and its path; empty if there is none."""
    if path := environ.get(XLA_PERSISTENT_CACHE_PATH):
        return CacheOrigin.PROGRAM, path
    asked = environ.get(POLYXLA_COMPILE_CACHE, "on")
    if asked.lower() in _OFF:
        return CacheOrigin.OFF, ""
    if asked.lower() not in _ON:
        return CacheOrigin.USER, asked
    caches, home = environ.get(XDG_CACHE_HOME, ""), environ.get(HOME, "")
    if not caches.startswith("/"):
        caches = f"{home}/.cache" if home else ""
    return CacheOrigin.DEFAULT, f"{caches}/polyxla/programs" if caches else ""


def has_tpu_numerics(environ: Mapping[str, str]) -> bool:
    """Read `POLYXLA_EMULATE_NUMERICS`.

    Raises:
        ValueError: it has another value.
    """
    return _is_set(environ, POLYXLA_EMULATE_NUMERICS, "tpu")


def detects_races(environ: Mapping[str, str]) -> bool:
    """Read `POLYXLA_EMULATE_KERNELS`.

    Raises:
        ValueError: it has another value.
    """
    return _is_set(environ, POLYXLA_EMULATE_KERNELS, "races")


def _is_set(environ: Mapping[str, str], name: str, value: str) -> bool:
    text = environ.get(name, "")
    if text not in ("", value):
        raise ValueError(f"{name}={text!r} is not {value!r}; write that, or unset it")
    return text == value


def shares_memory(environ: Mapping[str, str]) -> bool:
    """Read `POLYXLA_SHARED_MEMORY`.

    Raises:
        ValueError: it is neither on nor off.
    """
    text = environ.get(POLYXLA_SHARED_MEMORY) or "on"
    if text.lower() not in (*_OFF, *_ON):
        raise ValueError(f"{POLYXLA_SHARED_MEMORY}={text!r} is neither 'on' nor 'off'; write one of them")
    return text.lower() in _ON


def chooses_kept_memory(environ: Mapping[str, str]) -> bool:
    """Return whether the user decides what freed memory glibc keeps."""
    return not environ.keys().isdisjoint(_MALLOC_SETTINGS)


def has_torch_kernels(environ: Mapping[str, str]) -> bool:
    """Read `POLYXLA_CPU_KERNELS`.

    Raises:
        ValueError: it is neither torch nor xla.
    """
    text = environ.get(POLYXLA_CPU_KERNELS) or "torch"
    if text not in ("torch", "xla"):
        raise ValueError(f"{POLYXLA_CPU_KERNELS}={text!r} is neither 'torch' nor 'xla'; write one of them")
    return text == "torch"


def device_memory(environ: Mapping[str, str]) -> tuple[bool, int]:
    """Read `POLYXLA_DEVICE_MEMORY`: whether memory is limited, and to how many bytes.

    With 0 bytes, the limit is what the device reports.

    Raises:
        ValueError: it is not a valid memory size.
    """
    text = environ.get(POLYXLA_DEVICE_MEMORY) or "off"
    if text.lower() in (*_OFF, *_ON):
        return text.lower() in _ON, 0
    match = re.fullmatch(r"(\d+)(|B|KiB|MiB|GiB)", text)
    size = int(match[1]) << _UNITS[match[2]] if match else 0
    # A limit of 0 bytes is refused too: in the settings, 0 stands for what the device has.
    if not size:
        raise ValueError(
            f"{POLYXLA_DEVICE_MEMORY}={text!r} is not a valid memory size; write bytes as an integer, "
            f"{POLYXLA_DEVICE_MEMORY}=16GiB, or 'on' for what the device has"
        )
    return True, size


def plugin_options(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read `POLYXLA_PJRT_OPTIONS`.

    Raises:
        ValueError: it is no JSON object, or one of its values cannot be an option.
    """
    text = environ.get(POLYXLA_PJRT_OPTIONS) or "{}"
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict) or not all(map(_is_option, options.values())):
        raise ValueError(
            f"{POLYXLA_PJRT_OPTIONS}={text!r} is no JSON object of strings, numbers, booleans and lists of "
            f"integers; write {POLYXLA_PJRT_OPTIONS}='{{\"cpu_device_count\": 2}}', for example"
        )
    return options


def _is_option(value: Any) -> bool:
    if isinstance(value, list):
        # `isinstance` would accept booleans.
        return all(type(number) is int for number in value)
    return isinstance(value, str | int | float)


def stall_timeout_s(environ: Mapping[str, str]) -> float:
    """Read `POLYXLA_STALL_TIMEOUT_S`, in seconds; ``inf`` waits without limit.

    Raises:
        ValueError: it is not a number of seconds above 0.
    """
    text = environ.get(POLYXLA_STALL_TIMEOUT_S)
    if not text:
        return BridgeSettings.stall_timeout_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # The condition is "not above 0", because "nan" is neither above 0 nor below it.
    if not seconds > 0:
        raise ValueError(
            f"{POLYXLA_STALL_TIMEOUT_S}={text!r} is not a number of seconds above 0; "
            f"write {POLYXLA_STALL_TIMEOUT_S}=300, for example"
        )
    return seconds


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not an integer") from None


def is_spmd(environ: Mapping[str, str]) -> bool:
    """Return whether torch_xla runs an SPMD program in this environment.

    Source: ``check_env_flag`` of torch_xla 2.9.0, by which ``xr.is_spmd`` reads the variable.
    """
    flag = environ.get(XLA_USE_SPMD, "")
    return flag == "true" or (flag.isdecimal() and int(flag) > 0)


@contextmanager
def as_under_spmd() -> Iterator[None]:
    """Let torch_xla's C++ code, which reads the environment, act as after ``use_spmd()``."""
    # Python also sets the variable in C's environment.
    os.environ[XLA_USE_SPMD] = "1"
    try:
        yield
    finally:
        del os.environ[XLA_USE_SPMD]


def own_environ() -> Mapping[str, str]:
    """Return the environment of this process as C sees it: a framework may set libtpu's variables in C.

    TorchTPU 0.2.0 does, and ``os.environ`` does not show them.
    """
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    # The array ends with a null pointer.
    assigned = itertools.takewhile(bool, (entries[place] for place in itertools.count()))
    pairs = (os.fsdecode(entry).partition("=") for entry in assigned)
    return {name: value for name, _, value in pairs}


def current() -> BridgeSettings:
    """Read the settings of this process from its own environment."""
    return from_environ(own_environ())
