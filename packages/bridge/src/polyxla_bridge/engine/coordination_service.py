"""jaxlib's coordination service, in a process of its own.

jaxlib ends every process whose connection to the service breaks, and prints C++ errors. A service in process
0 would end with that process, and all others would end before the cause can be reported. The service's own
process ends after the last process of the job. So any process, even process 0, may leave at any time and
waits for no other: a process that has failed would otherwise wait for processes that wait for it.

The service's process imports jaxlib while the processes of the job start. It is a fresh Python, because
process 0 may have threads of gRPC, which do not survive a fork.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError

HEARTBEAT_TIMEOUT_S = 100
"""Time without a heartbeat after which jaxlib takes a client for lost, and ends the others, in seconds."""
START_TIMEOUT_S = 60.0
"""Longest wait until the service listens, in seconds."""
_MAIN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"
_START, _READY = b"s", b"r"
_MOST_PEERS = 253
"""Most descriptors that the kernel passes in one message. Source: ``SCM_MAX_FD`` in Linux's net/scm.h."""
_KEEPALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 20),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
)
"""Options with which the kernel closes the connection to a host that answers nothing for 50 s."""


class CoordinationService:
    """The service as process 0 sees it. The constructor starts its process, which does not listen yet.

    Args:
        address: ``host:port`` on which it will listen.
        replicas: number of clients that will connect.
    """

    def __init__(self, address: str, replicas: int) -> None:
        self._address = address
        self._pipe, theirs = socket.socketpair()
        with theirs:
            main = _MAIN.format(__name__)
            numbers = [str(number) for number in (theirs.fileno(), replicas, HEARTBEAT_TIMEOUT_S)]
            # Python ignores entries that are no strings, such as a Path.
            path = [entry for entry in sys.path if isinstance(entry, str)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", main, json.dumps(path), address, *numbers],
                pass_fds=[theirs.fileno()],
                # The service may end after the job, and readers of the job's output must not wait for it.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C in a terminal, or torchrun, signals all processes of a group. The job's processes
                # still need the service while they end.
                start_new_session=True,
            )

    def start(self, peers: Sequence[socket.socket]) -> None:
        """Let the service listen.

        Args:
            peers: connections to the other processes. The service ends when all of them are closed, and this
                process has left or died.

        Raises:
            PjrtError: it cannot listen, or does not in time.
        """
        self._pipe.settimeout(START_TIMEOUT_S)
        try:
            # The started process only forks the service, which may outlive this process, and exits.
            self._process.wait(START_TIMEOUT_S)
            # If the service has ended already, the reason is in the pipe.
            with suppress(BrokenPipeError):
                self._send(peers)
            answer = self._pipe.recv(4096)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PjrtError(
                Code.UNAVAILABLE, f"jaxlib's coordination service did not start: {error}"
            ) from error
        if answer != _READY:
            text = answer.decode(errors="replace") or "its process ended"
            raise PjrtError(
                Code.UNAVAILABLE, f"jaxlib's coordination service cannot listen on {self._address}: {text}"
            )

    def _send(self, peers: Sequence[socket.socket]) -> None:
        numbers = [peer.fileno() for peer in peers]
        self._pipe.sendall(len(numbers).to_bytes(4, "big"))
        for first in range(0, len(numbers), _MOST_PEERS):
            socket.send_fds(self._pipe, [_START], numbers[first : first + _MOST_PEERS])

    def shutdown(self) -> None:
        """Leave the service, which ends when every other process has left."""
        # A fork of this process may hold the pipe.
        with self._pipe, suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(START_TIMEOUT_S)


def main() -> None:
    """Run the service; arguments: path, address, a socket's descriptor, replicas, heartbeat timeout."""
    # The service must not be a child of process 0, which may run on for long without reaping it.
    if os.fork():
        os._exit(0)
    address = sys.argv[2]
    descriptor, replicas, heartbeat_timeout_s = map(int, sys.argv[3:])
    with socket.socket(fileno=descriptor) as pipe:
        try:
            from jaxlib import _jax

            peers = _receive(pipe)
            if peers is None:
                return
            # Try the port first, because jaxlib may crash if it cannot listen.
            host, _, port = address.rpartition(":")
            socket.create_server((host, int(port))).close()
            # `recoverable`: a client that leaves waits for no other, and one that dies ends no other.
            service = _jax.get_distributed_runtime_service(
                address, replicas, heartbeat_timeout=heartbeat_timeout_s, recoverable=True
            )
        except Exception as error:
            pipe.sendall(str(error).encode()[:4096])
            return
        pipe.sendall(_READY)
        _wait_for([pipe, *peers])
        service.shutdown()
    # The service's destructor would wait for processes that have died.
    os._exit(0)


def _receive(pipe: socket.socket) -> list[socket.socket] | None:
    """Return the connections to the other processes; None if process 0 gave up before the start."""
    count = int.from_bytes(pipe.recv(4, socket.MSG_WAITALL) or b"\0", "big")
    peers: list[socket.socket] = []
    while len(peers) < count:
        data, numbers, _, _ = socket.recv_fds(pipe, 1, _MOST_PEERS)
        if data != _START:
            return None
        peers += [socket.socket(fileno=number) for number in numbers]
    return peers or None


def _wait_for(connections: Sequence[socket.socket]) -> None:
    """Wait until the processes at the other ends have closed all connections, or have died."""
    for connection in connections:
        if connection.family != socket.AF_UNIX:
            # A host that is cut off sends nothing, and never closes its connection.
            for option, value in _KEEPALIVE:
                connection.setsockopt(*option, value)
        with suppress(OSError):
            while _read(connection):
                pass


def _read(connection: socket.socket) -> bytes:
    """Wait until something arrives, or the connection is closed; return what has arrived."""
    # Process 0 has the same sockets, and its timeouts also make them non-blocking in this process.
    # Not `select`, which takes descriptors below 1024 only: this process has the number of process 0's.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll()
    try:
        return connection.recv(4096, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b"again"
