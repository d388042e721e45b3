"""jaxlib's coordination service, in a process of its own.

jaxlib ends every process whose connection to the service breaks, and prints C++ errors. In process 0, the
service would end with that process, and all others with the service, before the cause can be reported. Its
own process ends after the last process of the job.

The service's process imports jaxlib while the processes of the job start. It is a fresh Python, because
process 0 may have threads of gRPC, which do not survive a fork.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError

HEARTBEAT_TIMEOUT_S = 100
"""Time without a heartbeat after which jaxlib takes a client for lost, and ends the others, in seconds."""
START_TIMEOUT_S = 60.0
"""Longest wait until the service listens, in seconds."""
ORPHANED_TIMEOUT_S = 300.0
"""Longest wait of the service, after process 0 has died, for the other processes to end, in seconds."""
_END_TIMEOUT_S = 10.0
"""Longest wait for the service's process to end, in seconds, before it is killed."""
_MAIN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"
_START, _READY, _END = b"s", b"r", b"e"
_MOST_PEERS = 253
"""The kernel passes so many descriptors in one message. Source: ``SCM_MAX_FD`` in Linux's net/scm.h."""


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
            numbers = [str(one) for one in (theirs.fileno(), replicas, HEARTBEAT_TIMEOUT_S)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", main, json.dumps(sys.path), address, *numbers],
                pass_fds=[theirs.fileno()],
                # Readers of this process's output need not wait for the end of the service.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C in a terminal, or torchrun, signals all processes of a group. Those of the job still
                # need the service while they end.
                start_new_session=True,
            )

    def start(self, peers: Sequence[socket.socket]) -> None:
        """Let the service listen.

        Args:
            peers: connections to the other processes. If this process dies, the service ends them for it, and
                itself when the other processes have ended.

        Raises:
            PjrtError: it cannot listen, or does not in time.
        """
        self._pipe.settimeout(START_TIMEOUT_S)
        try:
            self._send(peers)
            answer = self._pipe.recv(4096)
        except OSError as error:
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
        """End the service; every client must have left."""
        with self._pipe, suppress(OSError):
            self._pipe.sendall(_END)
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Run the service; arguments: path, address, a socket's descriptor, replicas, heartbeat timeout."""
    address = sys.argv[2]
    descriptor, replicas, heartbeat_timeout_s = map(int, sys.argv[3:])
    with socket.socket(fileno=descriptor) as pipe:
        try:
            from jaxlib import _jax

            peers = _receive(pipe)
            if peers is None:
                return
            # jaxlib may crash where it cannot listen.
            host, _, port = address.rpartition(":")
            socket.create_server((host, int(port))).close()
            service = _jax.get_distributed_runtime_service(
                address, replicas, heartbeat_timeout=heartbeat_timeout_s
            )
        except Exception as error:
            pipe.sendall(str(error).encode()[:4096])
            return
        pipe.sendall(_READY)
        if pipe.recv(1) == _END:
            service.shutdown()
        else:
            _wait_for(peers)
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


def _wait_for(peers: Sequence[socket.socket]) -> None:
    """Tell the other processes that process 0 has died, and wait until they have ended."""
    deadline = time.monotonic() + ORPHANED_TIMEOUT_S
    for peer in peers:
        with suppress(OSError):
            peer.shutdown(socket.SHUT_WR)
    for peer in peers:
        with suppress(OSError):
            while (remaining_s := deadline - time.monotonic()) > 0:
                peer.settimeout(remaining_s)
                if not peer.recv(4096):
                    break
