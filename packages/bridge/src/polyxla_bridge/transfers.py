"""Arrays that one process of a job sends to another, outside of any program.

The receiver announces an array: it listens on a port, and returns a descriptor, which the framework brings to
the sender. The sender connects. The receiver first sends a challenge; the sender answers with a line of JSON
that names the array, sealed with the job's secret for that challenge; then come the bytes of the array, and
the receiver confirms them. Nothing that arrives is executed or unpickled.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType
from polyxla_bridge.sealing import SEAL_BYTES, sealed, unsealed

CONNECT_TIMEOUT_S = 60.0
"""Longest wait of a sender for the receiver's challenge, in seconds."""
PROOF_TIMEOUT_S = 10.0
"""Longest wait of a receiver for a connection to prove that it belongs to the job, in seconds."""
MOST_UNPROVED = 64
"""Number of connections that may be about to prove it; further ones are closed."""
_PAUSE_S = 0.05
_CHALLENGE_BYTES, _LINE_BYTES = 16, 256
_RECEIVED = b"."
_DESCRIPTOR = "descriptor of an array"

_tickets: dict[bytes, Callable[[], bytes | None]] = {}
_numbers = itertools.count()


def ticket(look: Callable[[], bytes | None]) -> bytes:
    """Return a substitute for a descriptor that may not exist yet; `Transfers.send` exchanges it.

    Args:
        look: returns the descriptor, or None until there is one.
    """
    name = b"ticket %d" % next(_numbers)
    _tickets[name] = look
    return name


class _Descriptor(NamedTuple):
    """Where a process awaits which array."""

    host: str
    port: int
    process: int
    number: int
    content: str


class _Awaited(NamedTuple):
    """An array that this process awaits."""

    type: ArrayType
    arrived: Future[Any]


class Transfers:
    """The arrays that this process awaits from others, and those that it sends.

    Args:
        secret: of the job's processes.
        host: address at which the other processes reach this one.
        process: index of this process.
        timeout_s: longest time that one array may take once it is being moved, in seconds.
    """

    def __init__(self, secret: str, host: str, process: int, timeout_s: float) -> None:
        self._secret = secret
        self._host = host
        self._process = process
        # The timeout may be infinite, which a socket refuses.
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._numbers = itertools.count()
        self._awaited: dict[int, _Awaited] = {}
        self._lock = threading.Lock()
        self._unproved = threading.Semaphore(MOST_UNPROVED)
        self._listener: socket.socket | None = None
        self._closed = threading.Event()

    def receive(self, type_: ArrayType) -> tuple[Future[Any], bytes]:
        """Announce an array; return the future of its bytes, and the descriptor."""
        arrived: Future[Any] = Future()
        with self._lock:
            # The port is opened for the first array: a job without such arrays needs none.
            if self._listener is None:
                self._listener = socket.create_server((self._host, 0), backlog=MOST_UNPROVED)
                _start(self._accept, self._listener)
            port = self._listener.getsockname()[1]
            number = next(self._numbers)
            self._awaited[number] = _Awaited(type_, arrived)
        found = _Descriptor(self._host, port, self._process, number, _content(type_))
        return arrived, sealed(self._secret, _DESCRIPTOR, json.dumps(found).encode())

    def send(self, type_: ArrayType, data: memoryview, descriptor: bytes) -> None:
        """Send an array, and wait until it has arrived.

        Args:
            type_: the array's.
            data: the array's bytes.
            descriptor: what the receiver's `receive` has returned, or a `ticket` for it.

        Raises:
            PjrtError: the receiver has ended, does not belong to this job, or awaits another array.
        """
        if look := _tickets.pop(descriptor, None):
            descriptor = self._exchange(look)
        try:
            receiver = _Descriptor(*json.loads(unsealed(self._secret, _DESCRIPTOR, descriptor)))
        except (ValueError, TypeError) as error:
            raise PjrtError(
                Code.INVALID_ARGUMENT, f"a process of another job awaits an array: {descriptor[:80]!r}"
            ) from error
        content = _content(type_)
        try:
            with self._connect(receiver.host, receiver.port) as peer:
                challenge = _exactly(peer, _CHALLENGE_BYTES)
                peer.settimeout(self._timeout_s)
                # The line has a fixed length: the receiver parses nothing before it has verified the seal.
                line = json.dumps([receiver.number, self._process, content]).encode().ljust(_LINE_BYTES)
                # A seal that answers this challenge is valid on no other connection: it cannot be replayed.
                peer.sendall(sealed(self._secret, _proof_of(challenge), line))
                # Checked after the line is sent, because the receiver learns from it that the arrays differ.
                if content != receiver.content:
                    raise _unlike(self._process, content, receiver.process, receiver.content)
                peer.sendall(data)
                # The kernel accepts bytes for a process that may end before it reads them.
                if _exactly(peer, 1) != _RECEIVED:
                    raise ConnectionError("it does not confirm the array")
        except OSError as error:
            raise PjrtError(
                Code.UNAVAILABLE,
                f"process {receiver.process} has not received {content} from process {self._process}, as if "
                f"it had ended: {error}",
            ) from error

    def close(self) -> None:
        """Receive and send nothing more; arrays that are still awaited fail."""
        # The thread that takes an array out of the dictionary completes its future, so that happens once.
        with self._lock:
            self._closed.set()
            awaited, self._awaited = self._awaited, {}
        if self._listener is not None:
            with suppress(OSError):
                # Closing alone does not end the `accept` in which the thread waits.
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for each in awaited.values():
            each.arrived.set_exception(_ended())

    def _exchange(self, look: Callable[[], bytes | None]) -> bytes:
        """Wait until there is a descriptor; the stall watchdog ends a wait that is too long."""
        # Each look is a request to the store, so the pauses grow. The first are short, because the
        # descriptor may come soon.
        pause_s = 0.001
        while not self._closed.is_set():
            try:
                found = look()
            except Exception as error:
                raise PjrtError(
                    Code.UNAVAILABLE,
                    f"process {self._process} cannot learn where the array that it sends is awaited: {error}",
                ) from error
            if found is not None:
                return found
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)
        raise _ended()

    def _connect(self, host: str, port: int) -> socket.socket:
        """Return a connection on which the receiver's challenge has arrived.

        A receiver to which many processes send at once closes the connections that are too many.
        """
        # Only a closed connection is retried. The receiver listens before it returns a descriptor, so it has
        # ended if it refuses a connection.
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            peer = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
            try:
                # Peeking leaves the challenge for the caller to read.
                if peer.recv(1, socket.MSG_PEEK):
                    return peer
            except ConnectionResetError:
                pass
            except BaseException:
                peer.close()
                raise
            peer.close()
            if time.monotonic() > deadline:
                raise ConnectionError("it has closed the connection")
            time.sleep(_PAUSE_S)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = listener.accept()
            except OSError:
                # The listener is closed, or the process is out of file descriptors for a moment.
                self._closed.wait(_PAUSE_S)
                continue
            # Anyone may connect. The limit keeps third parties from filling this process with threads.
            if self._unproved.acquire(blocking=False):
                _start(self._serve, peer)
            else:
                peer.close()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                found = self._proved(peer)
            finally:
                # A proved connection no longer counts, however long its array takes.
                self._unproved.release()
            if found is None:
                return
            awaited, sender, content = found
            try:
                data = self._read(peer, awaited.type, sender, content)
            except BaseException as error:
                awaited.arrived.set_exception(error)
            else:
                awaited.arrived.set_result(data)

    def _proved(self, peer: socket.socket) -> tuple[_Awaited, int, str] | None:
        """Return the array that a process of this job sends, that process, and what it sends."""
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        peer.settimeout(PROOF_TIMEOUT_S)
        try:
            peer.sendall(challenge)
            line = unsealed(self._secret, _proof_of(challenge), _exactly(peer, SEAL_BYTES + _LINE_BYTES))
        except (OSError, ValueError):
            return None
        number, sender, content = json.loads(line)
        with self._lock:
            awaited = self._awaited.pop(number, None)
        return awaited and (awaited, sender, content)

    def _read(self, peer: socket.socket, type_: ArrayType, sender: int, content: str) -> bytearray:
        if content != _content(type_):
            raise _unlike(sender, content, self._process, _content(type_))
        data = bytearray(type_.size_bytes)
        peer.settimeout(self._timeout_s)
        try:
            _fill(peer, memoryview(data))
            peer.sendall(_RECEIVED)
        except OSError as error:
            raise PjrtError(
                Code.UNAVAILABLE,
                f"process {sender} has not sent all of {content} to process {self._process}, as if it had "
                f"ended: {error}",
            ) from error
        return data


def _start(task: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=task, args=args, name="polyxla-transfers", daemon=True).start()


def _content(type_: ArrayType) -> str:
    # The shapes may differ: torch.distributed sends elements, and the receiver may give them another shape.
    return f"{math.prod(type_.dims)} elements of {type_.dtype}"


def _unlike(sender: int, sent: str, receiver: int, awaited: str) -> PjrtError:
    return PjrtError(
        Code.INVALID_ARGUMENT,
        f"process {sender} sends {sent}, and process {receiver} awaits {awaited}: make the tensors of send "
        "and recv equal in size and dtype",
    )


def _ended() -> PjrtError:
    return PjrtError(Code.CANCELLED, "the program has ended before the array was moved")


def _proof_of(challenge: bytes) -> str:
    return f"transfer {challenge.hex()}"


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(peer, memoryview(data))
    return bytes(data)


def _fill(peer: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = peer.recv_into(view[done:])
        if not count:
            raise ConnectionError("the connection was closed")
        done += count
