"""From a process's variables to its engine: the process claims its chips and its port, then starts it."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from polyxla_bridge import env
from polyxla_bridge.abi import Code
from polyxla_bridge.engine import import_jax
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.libtpu.topology import EmulatedHost, Topology, in_slice

if TYPE_CHECKING:
    from polyxla_bridge.engine.engine import Engine


_held: list[int] = []
"""File descriptors of sockets. The kernel closes them when the process ends, however it ends."""
_ANSWER_TIMEOUT_S = 5.0
_PEER = struct.Struct("3i")
"""The answer to ``SO_PEERCRED``: the process, user and group of the other end. Source: unix(7)."""


def claim(topology: Topology, host: EmulatedHost) -> None:
    """Take this process's chips and its port.

    Process 0 listens where the processes meet, see `polyxla_bridge.engine.startup_barrier`.

    Raises:
        PjrtError: another process has one of the chips, or the port.
    """
    for device in topology.devices(host):
        _take(f"\0polyxla-libtpu/{host.dev}/accel{device}")
    if topology.process:
        _listen(topology.addresses[topology.task])


def _take(address: str) -> None:
    """Take a device. Its abstract socket is not a file, and belongs to one process at a time."""
    chip = socket.socket(socket.AF_UNIX)
    try:
        chip.bind(address)
    except OSError:
        chip.close()
        raise PjrtError(
            Code.ABORTED,
            f"The TPU is already in use by process with pid {_holder(address)}. Not attempting to load "
            f"libtpu.so in this process. ({address.rpartition('/')[2]})",
        ) from None
    # Another process that wants the chip connects, to ask the kernel for the id of this process.
    chip.listen()
    # Python closes a socket that it collects. Without the object, the descriptor stays open.
    _held.append(chip.detach())


def _holder(address: str) -> int | str:
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.settimeout(_ANSWER_TIMEOUT_S)
            asking.connect(address)
            process, _, _ = _PEER.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        except OSError:
            # The process has ended in the meantime.
            return "unknown"
    return int(process)


def _listen(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        _held.append(socket.create_server((host, int(port))).detach())
    except OSError as error:
        raise PjrtError(
            Code.UNAVAILABLE, f"this process cannot listen on its own address {address}: {error.strerror}"
        ) from error


def make_engine(on_lookup: Callable[[bool], None] | None) -> Engine:
    """Take the chips of this process, meet the slice's other processes, and start the engine.

    With `env.POLYXLA_PJRT_PLUGIN`, that plugin computes: for emulated chips, or as the real libtpu.

    Args:
        on_lookup: called after each look into the cache of compiled programs, with whether it was a hit; None
            where nobody counts.

    Raises:
        PjrtError: the variables contradict each other or the chips, another process has one of the chips, or
            a process does not come.
    """
    base = env.current()
    if base.plugin and env.POLYXLA_LIBTPU_HOST not in env.own_environ():
        from polyxla_bridge import pjrt_plugin

        # The plugin reads the variables of the slice itself.
        return pjrt_plugin.make_engine(base, on_lookup)
    _print_stack_at_sigterm()
    environ = in_slice(env.own_environ())
    host = EmulatedHost.read(environ)
    topology = Topology.read(environ, host)
    # A process has one client at a time: what is held is of the last one, which has ended.
    while _held:
        os.close(_held.pop())
    # Like libtpu, the process takes its chips before it starts anything: a second process is refused at once.
    claim(topology, host)
    env.check_secret(topology.process_count, environ)
    chosen = settings(topology, host, env.from_environ(environ))
    if chosen.plugin:
        return on_plugin(chosen, on_lookup)
    import_jax()
    from polyxla_bridge.engine.jax_engine import JaxEngine
    from polyxla_bridge.engine.recording_engine import RecordingEngine

    return (RecordingEngine if chosen.programs_path else JaxEngine)(chosen, on_lookup)


def on_plugin(chosen: BridgeSettings, on_lookup: Callable[[bool], None] | None) -> Engine:
    """Start the engine on the devices of a plugin, each of which is an emulated chip.

    Raises:
        PjrtError: several processes share the slice, or its programs are to be recorded.
    """
    from polyxla_bridge import pjrt_plugin

    named = f"{env.POLYXLA_PJRT_PLUGIN}={chosen.plugin}"
    if chosen.processes > 1:
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"one process drives the devices of {named}, and the emulated TPU's chips belong to "
            f"{chosen.processes} processes: emulate one chip (POLYXLA_EMULATE=v5e-1), or unset "
            f"{env.POLYXLA_PJRT_PLUGIN} to compute on the CPU",
        )
    if chosen.programs_path:
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"programs are not recorded on the devices of {named}: unset {env.POLYXLA_LIBTPU_PROGRAMS} or "
            f"{env.POLYXLA_PJRT_PLUGIN}",
        )
    return pjrt_plugin.make_engine(chosen, on_lookup)


def _print_stack_at_sigterm() -> None:
    """Print this process's stack when SIGTERM ends it, unless it has a handler of its own.

    Source: libtpu 0.0.21 does so from the initialization of its plugin, with a stack of C++.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    # C has no getter, so the handler is exchanged for the default and restored.
    if before := libc.signal(signal.SIGTERM, None):
        libc.signal(signal.SIGTERM, before)
    else:
        faulthandler.register(signal.SIGTERM, file=2, chain=True)


def settings(topology: Topology, host: EmulatedHost, base: BridgeSettings) -> BridgeSettings:
    """Return the settings of this process's engine.

    Args:
        topology: the slice, as this process's variables describe it.
        host: its chips.
        base: the settings that have nothing to do with TPUs.
    """
    places = topology.places(host)
    return dataclasses.replace(
        base,
        replicas=topology.process_count * len(places),
        processes=topology.process_count,
        process=topology.process,
        places=places,
        coordinator=_meeting(topology),
        host=_reachable(topology.addresses[topology.task]).rpartition(":")[0],
        platform="tpu",
        kind=host.generation.kind,
        cores=host.generation.tensor_cores,
        memory_bytes=base.memory_bytes or host.generation.memory_gib << 30,
    )


def _meeting(topology: Topology) -> str:
    """Return where the clients of all devices meet."""
    if topology.coordinator:
        return _reachable(topology.coordinator)
    if len(topology.addresses) > 1:
        return _reachable(topology.addresses[0])
    # No other process joins, so any free port will do. Another job may use the port in the variables.
    with socket.create_server((BridgeSettings.host, 0)) as probe:
        return f"{BridgeSettings.host}:{probe.getsockname()[1]}"


def _reachable(address: str) -> str:
    host, _, port = address.rpartition(":")
    # gloo needs an address, and "localhost" may resolve to an IPv6 address first.
    return f"{BridgeSettings.host if host == 'localhost' else host}:{port}"
