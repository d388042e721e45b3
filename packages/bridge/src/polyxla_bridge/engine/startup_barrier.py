"""Barrier that all processes of a job pass before jaxlib's clients connect.

jaxlib ends a process whose client cannot connect, and prints a C++ stack. This barrier fails first, with an
error that names the missing replicas.

Process 0 listens on the coordinator's port. Each other process connects and sends one line of JSON behind
its seal: its index, the job's size, where its replicas are, and the memory that it offers to share. When all
have connected, process 0 numbers the replicas, starts jaxlib's service on the same port and answers with the
numbers and the shared memory, or an error text. The
connections stay open until each process leaves: the service ends when all of them are closed.

Other users of the machine may connect as well. They are not waited for, and a line without the right seal
is not read.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Self

from polyxla_bridge.abi import Code
from polyxla_bridge.engine import numbering
from polyxla_bridge.engine.numbering import Share, Shares
from polyxla_bridge.engine.shared_memory import SharedMemory
from polyxla_bridge.env import POLYXLA_BRIDGE_PROCESSES, POLYXLA_BRIDGE_REPLICAS, BridgeSettings, Coordinates
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.sealing import sealed, unsealed
from polyxla_bridge.shared_file import Address

StartService = Callable[[Sequence[socket.socket]], None]
"""Starts the service. Argument: the connections to the other processes."""
_RETRY_S = 0.05
"""Pause between two attempts to connect, in seconds."""
_HELLO_TIMEOUT_S = 5.0
"""Longest wait for the line of a new connection, in seconds; a foreign program never sends one."""
_MOST_UNPROVED = 64
"""Number of connections that may be waiting for their line at a time. A further one replaces the oldest."""
_LINE_BYTES = 1 << 16
"""Length of the longest line of a process."""
_ANSWER_BYTES = 1 << 24
"""Length of the longest answer of process 0, which names every replica."""


class PeerConnections:
    """Connections between process 0 and the other processes, each open until its process leaves or dies.

    Args:
        settings: of this process.
        peers: connections by process index; process 0 has all of them, the others only the one to process 0.
        shares: the replicas of each process.
        memory: what all processes share; None if they do not.

    Attributes:
        shares: the same.
        memory: the same.
    """

    def __init__(
        self,
        settings: BridgeSettings,
        peers: dict[int, socket.socket],
        shares: Shares,
        memory: Address | None,
    ) -> None:
        self.shares = shares
        self.memory = memory
        self._settings = settings
        self._peers = peers

    def wait_for_others(self, timeout_s: float) -> None:
        """Wait in process 0 until every other process has left, or has died.

        Raises:
            PjrtError: a process had not left after `timeout_s` seconds.
        """
        if self._settings.process:
            return
        deadline = time.monotonic() + timeout_s
        if late := [index for index, peer in self._peers.items() if not _has_ended(peer, deadline)]:
            raise PjrtError(
                Code.DEADLINE_EXCEEDED,
                f"process 0 waited {timeout_s:g} s for {_named(late, self._settings)} to end, "
                "and now ends before them",
            )

    def leave(self) -> None:
        """Close this process's connections."""
        for peer in self._peers.values():
            with suppress(OSError), peer:
                # Closing alone is not enough: a process that was forked from this one may hold the socket.
                # The service also holds the sockets of process 0, and still needs them.
                if self._settings.process:
                    peer.shutdown(socket.SHUT_RDWR)
        self._peers.clear()


def _has_ended(peer: socket.socket, deadline: float) -> bool:
    """Return whether the process at the other end has closed the connection before the deadline."""
    # A timeout of 0 would make the socket non-blocking.
    peer.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        peer.recv(1)
    except TimeoutError:
        return False
    except OSError:
        # The process has died, or its host is cut off.
        pass
    return True


def wait_for_peers(
    settings: BridgeSettings, memory: SharedMemory, start_service: StartService, timeout_s: float
) -> PeerConnections:
    """Wait for all processes of the job.

    Args:
        settings: of this process.
        memory: what this process offers to share.
        start_service: starts the service on the coordinator's port; called in process 0, when all processes
            have connected and before any of them continues.
        timeout_s: longest wait, in seconds.

    Raises:
        PjrtError: a process did not connect in time, or was started for a job of another size, or the
            coordinates of the replicas contradict each other.
    """
    deadline = time.monotonic() + timeout_s
    if settings.process:
        return _join(settings, memory.offer(), deadline, timeout_s)
    return _gather(settings, memory, start_service, deadline, timeout_s)


def _gather(
    settings: BridgeSettings,
    memory: SharedMemory,
    start_service: StartService,
    deadline: float,
    timeout_s: float,
) -> PeerConnections:
    """Run process 0's side: accept all others, number the replicas, start the service, answer."""
    peers: dict[int, socket.socket] = {}
    places, offers = {0: list(settings.places)}, []
    try:
        with _listen(settings) as listener, _Arrivals(listener, settings) as arrivals:
            while len(peers) < settings.processes - 1:
                hello, peer = arrivals.next(deadline) or _give_up(settings, set(peers), timeout_s)
                if hello.process in peers:
                    peer.close()
                    continue
                # The peer is added before the check, so that a process that fails it also gets the error.
                peers[hello.process] = peer
                places[hello.process] = hello.places
                offers.append(hello.memory)
                _check_job(settings, hello)
        shares = numbering.by_coordinates(places) if settings.places else numbering.by_process(settings)
        shared = memory.decide(offers)
        # Start the service after the listener is closed, because both have the same port, and before the
        # answers, because the others connect to it as soon as they read them.
        start_service(list(peers.values()))
        for peer in peers.values():
            peer.sendall(_answer(settings, shares=list(shares.items()), memory=shared))
    # Without an answer, the others would only see that process 0 has closed the connection, but not why.
    except BaseException as error:
        for peer in peers.values():
            with suppress(OSError), peer:
                peer.sendall(_answer(settings, error=str(error)))
        raise
    return PeerConnections(settings, peers, shares, shared)


def _listen(settings: BridgeSettings) -> socket.socket:
    host, _, port = settings.coordinator.rpartition(":")
    try:
        return socket.create_server((host, int(port)), backlog=_MOST_UNPROVED + settings.processes)
    except OSError as error:
        raise PjrtError(
            Code.UNAVAILABLE,
            f"process 0 cannot listen on {settings.coordinator}, where {settings.replicas} replicas meet: "
            f"{error.strerror or error}",
        ) from error


class _Arrivals:
    """The connections that wait at process 0's port, and what they have sent so far."""

    def __init__(self, listener: socket.socket, settings: BridgeSettings) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        # The dict keeps the order of arrival, by which `_accept` finds the oldest connection.
        self._waiting: dict[socket.socket, tuple[float, bytearray]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in list(self._waiting):
            self._drop(peer)
        self._selector.close()

    def next(self, deadline: float) -> tuple[_Hello, socket.socket] | None:
        """Return what the next process of the job sends, and its connection; None after the deadline."""
        while (remaining_s := deadline - time.monotonic()) > 0:
            # Wake up at least every few seconds to drop the connections that have sent nothing.
            for key, _ in self._selector.select(min(remaining_s, _HELLO_TIMEOUT_S)):
                if key.fileobj is self._listener:
                    self._accept()
                elif (hello := self._read(peer := key.fileobj)) is not None:  # type: ignore[arg-type]
                    return hello, peer  # type: ignore[return-value]
            now = time.monotonic()
            for peer in [peer for peer, (until, _) in self._waiting.items() if until < now]:
                self._drop(peer)
        return None

    def _accept(self) -> None:
        # A process may have closed its connection again by now, which is not an error.
        with suppress(OSError):
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            if len(self._waiting) >= _MOST_UNPROVED:
                self._drop(next(iter(self._waiting)))
            self._waiting[peer] = time.monotonic() + _HELLO_TIMEOUT_S, bytearray()
            self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> _Hello | None:
        """Read on; return the hello of a process of the job if it is complete."""
        if peer not in self._waiting:
            # The same round of `select` has dropped it to make room for another.
            return None
        _, line = self._waiting[peer]
        try:
            data = peer.recv(_LINE_BYTES)
            line += data
            if data and not line.endswith(b"\n") and len(line) < _LINE_BYTES:
                return None
            hello = _read_hello(bytes(line), self._settings)
        except (OSError, ValueError):
            self._drop(peer)
            return None
        self._selector.unregister(peer)
        del self._waiting[peer]
        # Process 0 sends its answers with this timeout, so no peer can make it hang.
        peer.settimeout(_HELLO_TIMEOUT_S)
        return hello

    def _drop(self, peer: socket.socket) -> None:
        del self._waiting[peer]
        self._selector.unregister(peer)
        peer.close()


def _give_up(settings: BridgeSettings, connected: set[int], timeout_s: float) -> NoReturn:
    missing = sorted(set(range(1, settings.processes)) - connected)
    raise PjrtError(
        Code.DEADLINE_EXCEEDED,
        f"{_named(missing, settings)} did not connect to {settings.coordinator} within {timeout_s:g} s",
    )


def _check_job(settings: BridgeSettings, hello: _Hello) -> None:
    if hello.job != _job_size(settings):
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"process {hello.process} expects a job of {hello.job}, process 0 one of {_job_size(settings)}: "
            f"{POLYXLA_BRIDGE_REPLICAS} and {POLYXLA_BRIDGE_PROCESSES} must be the same in all processes",
        )


def _named(processes: list[int], settings: BridgeSettings) -> str:
    if settings.places:
        return f"processes {processes} of {settings.processes}"
    replicas = [
        process * settings.per_process + i for process in processes for i in range(settings.per_process)
    ]
    return f"replicas {replicas} (processes {processes} of {settings.processes})"


def _job_size(settings: BridgeSettings) -> dict[str, int]:
    return {"replicas": settings.replicas, "processes": settings.processes}


class _Hello(NamedTuple):
    """What a process sends first."""

    process: int
    job: dict[str, int]
    places: list[Coordinates]
    memory: Address | None


def _read_hello(line: bytes, settings: BridgeSettings) -> _Hello:
    """Read what a new connection sent.

    Raises:
        ValueError: it is not a process of this job.
    """
    process, job, places, memory = json.loads(
        unsealed(settings.secret, _hello_to(settings), line.removesuffix(b"\n"))
    )
    return _Hello(int(process), dict(job), [Coordinates(*place) for place in places], memory)


def _hello_to(settings: BridgeSettings) -> str:
    return f"hello to {settings.coordinator}"


def _answer(settings: BridgeSettings, **fields: Any) -> bytes:
    """Return process 0's answer to the others: the `shares` and the `memory`, or the `error`."""
    return sealed(settings.secret, _answer_of(settings), json.dumps(fields).encode()) + b"\n"


def _answer_of(settings: BridgeSettings) -> str:
    return f"answer of {settings.coordinator}"


def _join(
    settings: BridgeSettings, memory: Address | None, deadline: float, timeout_s: float
) -> PeerConnections:
    """Run the side of a process other than 0: connect, send the hello, wait for the answer."""
    peer = _connect(settings, deadline, timeout_s)
    hello = _Hello(settings.process, _job_size(settings), list(settings.places), memory)
    try:
        peer.sendall(sealed(settings.secret, _hello_to(settings), json.dumps(hello).encode()) + b"\n")
        # Process 0 has the same deadline, and needs a moment more to send which processes are missing.
        peer.settimeout(max(0.0, deadline - time.monotonic()) + _HELLO_TIMEOUT_S)
        shares, shared = _read_answer(peer, settings)
    except BaseException as error:
        peer.close()
        if isinstance(error, OSError):
            text = f"process 0, at {settings.coordinator}, did not answer: {error}"
            raise PjrtError(Code.UNAVAILABLE, text) from None
        raise
    return PeerConnections(settings, {0: peer}, shares, shared)


def _read_answer(peer: socket.socket, settings: BridgeSettings) -> tuple[Shares, Address | None]:
    with peer.makefile("rb") as file:
        line = file.readline(_ANSWER_BYTES)
    if not line:
        text = f"process 0, at {settings.coordinator}, ended before all replicas had connected"
        raise PjrtError(Code.UNAVAILABLE, text)
    try:
        answer = json.loads(unsealed(settings.secret, _answer_of(settings), line.removesuffix(b"\n")))
    except ValueError:
        text = f"what answers at {settings.coordinator} is not process 0 of this job"
        raise PjrtError(Code.UNAVAILABLE, text) from None
    if "error" in answer:
        raise PjrtError(Code.UNAVAILABLE, answer["error"])
    shares = {
        process: Share(tuple(replicas), tuple(Coordinates(*place) for place in places))
        for process, (replicas, places) in answer["shares"]
    }
    return shares, answer["memory"]


def _connect(settings: BridgeSettings, deadline: float, timeout_s: float) -> socket.socket:
    host, _, port = settings.coordinator.rpartition(":")
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            peer = socket.create_connection((host, int(port)), timeout=remaining_s)
            # While process 0 does not listen, the kernel may pick its port for this socket, which then
            # connects to itself.
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
