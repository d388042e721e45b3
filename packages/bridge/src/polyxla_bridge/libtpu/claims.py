"""What one process has for itself: its chips, and its port."""

from __future__ import annotations

import socket
import struct

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.libtpu.host import Host
from polyxla_bridge.libtpu.topology import Topology

_held: list[int] = []
"""File descriptors of sockets. The kernel closes them when the process ends, however it ends."""
_ANSWER_TIMEOUT_S = 5.0
_PEER = struct.Struct("3i")
"""The answer to ``SO_PEERCRED``: the process, user and group of the other end. Source: unix(7)."""


def claim(topology: Topology, host: Host) -> None:
    """Take this process's chips and its port.

    Process 0's port is taken by the meeting of the processes, see `polyxla_bridge.engine.startup_barrier`.

    Raises:
        PjrtError: another process has one of the chips, or the port.
    """
    for device in topology.devices(host):
        _take(f"\0polyxla-libtpu/{host.dev}/accel{device}")
    if topology.task:
        _listen(topology.addresses[topology.task])


def _take(address: str) -> None:
    """Take a device. Its abstract socket is no file, and belongs to one process at a time."""
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
    chip.listen()
    _held.append(chip.detach())


def _holder(address: str) -> int | str:
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.settimeout(_ANSWER_TIMEOUT_S)
            asking.connect(address)
            process, _, _ = _PEER.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        except OSError:
            # It has ended in the meantime.
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
