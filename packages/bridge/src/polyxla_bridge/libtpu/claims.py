"""What one process has for itself: its chips, and its port."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.libtpu.host import Host
from polyxla_bridge.libtpu.topology import Topology

_held = ExitStack()
"""Open files and sockets. The kernel closes them when the process ends, however it ends."""


def claim(topology: Topology, host: Host) -> None:
    """Take this process's chips and its port.

    Process 0's port is taken by the meeting of the processes, see `polyxla_bridge.engine.startup_barrier`.

    Raises:
        PjrtError: another process has one of the chips, or the port.
    """
    host.dev.mkdir(parents=True, exist_ok=True)
    for chip in topology.visible:
        _lock(host.dev / f"accel{chip}")
    if topology.task:
        _listen(int(topology.port))


def _lock(path: Path) -> None:
    file = _held.enter_context(path.open("a+"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = path.read_text().strip()
        raise PjrtError(
            Code.ABORTED,
            f"The TPU is already in use by process with pid {holder}. Not attempting to load libtpu.so in "
            f"this process. ({path})",
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()


def _listen(port: int) -> None:
    try:
        _held.enter_context(socket.create_server(("", port)))
    except OSError as error:
        raise PjrtError(
            Code.UNAVAILABLE, f"the port {port} of this process cannot be taken: {error.strerror}"
        ) from error
