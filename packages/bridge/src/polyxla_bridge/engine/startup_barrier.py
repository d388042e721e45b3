"""Barrier that all processes of a job pass before jaxlib's clients connect.

jaxlib ends a process whose client cannot connect, and prints a C++ stack. This barrier fails first, with an
error that names the missing replicas.

Process 0 listens on the coordinator's port. Each other process connects and sends one JSON line: its index,
the job's size, and where its replicas are. When all have connected, process 0 numbers the replicas, starts
jaxlib's service on the same port and answers ``go`` with the numbers, or an error text. The connections stay
open until each process leaves, so that process 0, which ends the service, is the last to end.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from polyxla_bridge.abi import Code
from polyxla_bridge.engine import numbering
from polyxla_bridge.engine.numbering import Share, Shares
from polyxla_bridge.env import POLYXLA_BRIDGE_PROCESSES, POLYXLA_BRIDGE_REPLICAS, BridgeSettings, Coordinates
from polyxla_bridge.errors import PjrtError

StartService = Callable[[Sequence[socket.socket]], None]
"""Starts the service. Argument: the connections to the other processes."""
_RETRY_S = 0.05
"""Pause between two attempts to connect, in seconds."""
_HELLO_TIMEOUT_S = 5.0
"""Longest wait for the JSON line of a new connection, in seconds; a foreign program never sends one."""
_GO, _READY = b"go ", b"."
_KEEPALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 20),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
)
"""Options with which the kernel closes the connection to a host that answers nothing for 50 s."""


class PeerConnections:
    """Connections between process 0 and the other processes, each open until its process leaves or dies.

    Args:
        settings: of this process.
        peers: connections by process index; process 0 has all of them, the others only the one to process 0.
        shares: the replicas of each process.

    Attributes:
        shares: the same.
    """

    def __init__(self, settings: BridgeSettings, peers: dict[int, socket.socket], shares: Shares) -> None:
        self.shares = shares
        self._settings = settings
        self._peers = peers

    def wait_for_all(self) -> None:
        """Wait until every other process calls this too, or is gone.

        One of them may work alone for as long as it likes, to evaluate or to save, while the others have
        finished. They must stay connected for that long: a client of jaxlib that shuts down waits for all
        others and sends no heartbeats meanwhile, after 100 s of which jaxlib ends the process that works.
        """
        for peer in self._peers.values():
            peer.settimeout(None)
            # A host that is cut off sends nothing, and never closes its connection.
            for option, value in _KEEPALIVE:
                peer.setsockopt(*option, value)
        if self._settings.process:
            self._tell(_READY)
            self._hear()
        else:
            self._hear()
            self._tell(_GO)

    def _tell(self, text: bytes) -> None:
        for peer in self._peers.values():
            with suppress(OSError):
                peer.sendall(text)

    def _hear(self) -> None:
        for peer in self._peers.values():
            with suppress(OSError):
                peer.recv(len(_GO))

    def leave(self, timeout_s: float) -> None:
        """Close this process's connections; process 0 first waits until all others have left.

        jaxlib ends a process that still uses the service when process 0 shuts the service down.

        Raises:
            PjrtError: a process had not left after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        remaining = [index for index, peer in self._peers.items() if not self._close(peer, deadline)]
        self._peers.clear()
        if remaining:
            raise PjrtError(
                Code.DEADLINE_EXCEEDED,
                f"process 0 waited {timeout_s:g} s for {_named(remaining, self._settings)} to end, "
                "and now ends before them",
            )

    def _close(self, peer: socket.socket, deadline: float) -> bool:
        with peer:
            try:
                if self._settings.process == 0:
                    peer.settimeout(max(0.001, deadline - time.monotonic()))
                    peer.recv(1)
                # Closing alone is not enough: a process that was forked from this one may hold the socket.
                peer.shutdown(socket.SHUT_RDWR)
            except TimeoutError:
                return False
            except OSError:
                # The other process is gone, whether it left or died.
                return True
        return True


def wait_for_peers(
    settings: BridgeSettings, start_service: StartService, timeout_s: float
) -> PeerConnections:
    """Wait for all processes of the job.

    Args:
        settings: of this process.
        start_service: starts the service on the coordinator's port; called in process 0, when all processes
            have connected and before any of them continues.
        timeout_s: longest wait, in seconds.

    Raises:
        PjrtError: a process did not connect in time, or was started for a job of another size, or the
            coordinates of the replicas contradict each other.
    """
    deadline = time.monotonic() + timeout_s
    if settings.process:
        peer, shares = _join(settings, deadline, timeout_s)
        return PeerConnections(settings, {0: peer}, shares)
    return PeerConnections(settings, *_gather(settings, start_service, deadline, timeout_s))


def _gather(
    settings: BridgeSettings, start_service: StartService, deadline: float, timeout_s: float
) -> tuple[dict[int, socket.socket], Shares]:
    """Run process 0's side: accept all others, number the replicas, start the service, answer."""
    peers: dict[int, socket.socket] = {}
    places = {0: list(settings.places)}
    try:
        with _listen(settings) as listener:
            while len(peers) < settings.processes - 1:
                hello, peer = _accept(listener, settings, deadline, set(peers), timeout_s)
                peers[hello.process] = peer
                places[hello.process] = hello.places
        shares = numbering.by_coordinates(places) if settings.places else numbering.by_process(settings)
        # After the listener is closed, because the service listens on the same port; before "go", because the
        # others connect to the service as soon as they read it.
        start_service(list(peers.values()))
        for peer in peers.values():
            peer.sendall(_GO + json.dumps(list(shares.items())).encode() + b"\n")
    except BaseException as error:
        for peer in peers.values():
            with suppress(OSError), peer:
                peer.sendall(f"{error}\n".encode())
        raise
    return peers, shares


def _listen(settings: BridgeSettings) -> socket.socket:
    host, _, port = settings.coordinator.rpartition(":")
    try:
        return socket.create_server((host, int(port)), backlog=settings.processes)
    except OSError as error:
        raise PjrtError(
            Code.UNAVAILABLE,
            f"process 0 cannot listen on {settings.coordinator}, where {settings.replicas} replicas meet: "
            f"{error.strerror or error}",
        ) from error


def _accept(
    listener: socket.socket,
    settings: BridgeSettings,
    deadline: float,
    connected: set[int],
    timeout_s: float,
) -> tuple[_Hello, socket.socket]:
    """Return what the next process sent, and its connection."""
    while (remaining_s := deadline - time.monotonic()) > 0:
        listener.settimeout(remaining_s)
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            break
        peer.settimeout(_HELLO_TIMEOUT_S)
        hello = _read_hello(peer)
        if hello is None or hello.process in connected:
            peer.close()
            continue
        if hello.job != _job_size(settings):
            text = (
                f"process {hello.process} expects a job of {hello.job}, process 0 one of "
                f"{_job_size(settings)}: {POLYXLA_BRIDGE_REPLICAS} and {POLYXLA_BRIDGE_PROCESSES} must be "
                "the same in all processes"
            )
            peer.sendall(f"{text}\n".encode())
            peer.close()
            raise PjrtError(Code.INVALID_ARGUMENT, text)
        return hello, peer
    missing = sorted(set(range(1, settings.processes)) - connected)
    raise PjrtError(
        Code.DEADLINE_EXCEEDED,
        f"{_named(missing, settings)} did not connect to {settings.coordinator} within {timeout_s:g} s",
    )


def _named(processes: list[int], settings: BridgeSettings) -> str:
    if settings.places:
        return f"processes {processes} of {settings.processes}"
    replicas = [one * settings.per_process + i for one in processes for i in range(settings.per_process)]
    return f"replicas {replicas} (processes {processes} of {settings.processes})"


def _job_size(settings: BridgeSettings) -> dict[str, int]:
    return {"replicas": settings.replicas, "processes": settings.processes}


class _Hello(NamedTuple):
    """What a process sends first."""

    process: int
    job: dict[str, int]
    places: list[Coordinates]


def _read_hello(peer: socket.socket) -> _Hello | None:
    """Return what a new connection sent; None if it is not a process of ours."""
    try:
        process, job, places = json.loads(_line(peer))
        return _Hello(int(process), dict(job), [_coordinates(place) for place in places])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _coordinates(place: Any) -> Coordinates:
    x, y, z, core = map(int, place)
    return x, y, z, core


def _line(peer: socket.socket) -> bytes:
    with peer.makefile("rb") as file:
        return file.readline(1 << 16)


def _join(settings: BridgeSettings, deadline: float, timeout_s: float) -> tuple[socket.socket, Shares]:
    """Run the side of a process other than 0: connect, send the hello, wait for the answer."""
    peer = _connect(settings, deadline, timeout_s)
    hello = _Hello(settings.process, _job_size(settings), list(settings.places))
    try:
        peer.sendall(json.dumps(hello).encode() + b"\n")
        # Process 0 has the same deadline, and needs a moment more to send which processes are missing.
        peer.settimeout(max(0.0, deadline - time.monotonic()) + _HELLO_TIMEOUT_S)
        answer = _line(peer)
    except OSError as error:
        answer = f"process 0, at {settings.coordinator}, did not answer: {error}".encode()
    if not answer.startswith(_GO):
        peer.close()
        reason = answer.decode(errors="replace").strip()
        text = reason or f"process 0, at {settings.coordinator}, ended before all replicas had connected"
        raise PjrtError(Code.UNAVAILABLE, text)
    return peer, {
        process: Share(tuple(replicas), tuple(_coordinates(place) for place in places))
        for process, (replicas, places) in json.loads(answer.removeprefix(_GO))
    }


def _connect(settings: BridgeSettings, deadline: float, timeout_s: float) -> socket.socket:
    host, _, port = settings.coordinator.rpartition(":")
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            peer = socket.create_connection((host, int(port)), timeout=remaining_s)
            # As long as process 0 does not listen, the kernel may pick that very port as this socket's own,
            # and the socket connects to itself.
            if peer.getsockname() != peer.getpeername():
                return peer
            peer.close()
        except ConnectionError:
            # Process 0 does not listen yet.
            time.sleep(_RETRY_S)
        except OSError as error:
            raise PjrtError(
                Code.UNAVAILABLE,
                f"process {settings.process} cannot reach {settings.coordinator}, "
                f"where replicas meet: {error}",
            ) from error
    raise PjrtError(
        Code.DEADLINE_EXCEEDED,
        f"nothing listened on {settings.coordinator} within {timeout_s:g} s: "
        f"{_named([0], settings)} did not start",
    )
