"""The sockets of warm processes: the user's private directory of them, and the messages between both ends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyxla import UsageError

XDG_RUNTIME_DIR = "XDG_RUNTIME_DIR"
"""The user's directory for sockets.

Source: https://specifications.freedesktop.org/basedir-spec/latest/
"""
_LENGTH = struct.Struct("!I")
LONGEST_BYTES = 1 << 26
"""Longest message: an environment has at most some megabytes."""
DESCRIPTORS = 253
"""Most descriptors that the kernel sends with one message.

Source: SCM_MAX_FD of Linux's include/net/scm.h.
"""
Message = dict[str, Any]
"""A message. Its texts may hold lone surrogates, as in `os.environ`; JSON escapes them."""


def socket_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory's path: in `XDG_RUNTIME_DIR`, otherwise in the directory for temporary files."""
    if parent := environ.get(XDG_RUNTIME_DIR):
        return Path(parent, "polyxla-warm")
    return Path(environ.get("TMPDIR") or tempfile.gettempdir(), f"polyxla-warm-{os.getuid()}")


def find_sockets(environ: Mapping[str, str]) -> list[Path]:
    """Return the sockets of this interpreter's warm processes, the newest first.

    Raises:
        UsageError: the directory is not private.
    """
    directory = socket_directory(environ)
    try:
        _check_private(directory)
    except OSError:
        # It does not exist, or it is in another user's directory, which sudo leaves in the environment.
        return []
    found = directory.glob(f"{_interpreter()}-*")
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def new_socket(environ: Mapping[str, str], pid: int) -> Path:
    """Return the path of process `pid`'s socket, in the directory, which is made if there is none.

    Raises:
        UsageError: the directory cannot be made, or is not private.
    """
    directory = socket_directory(environ)
    try:
        # A directory that exists is checked below, because another user may have made it.
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(
            f"the directory {directory} for the warm process's socket cannot be made: {error}",
            where=XDG_RUNTIME_DIR if environ.get(XDG_RUNTIME_DIR) else "the directory for temporary files",
            fix=f"Set {XDG_RUNTIME_DIR} to a directory of yours.",
        ) from error
    _check_private(directory)
    return directory / f"{_interpreter()}-{pid}"


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Give a socket of any path a name that fits the 107 characters of a socket's address."""
    # XDG_RUNTIME_DIR and TMPDIR may be arbitrarily deep.
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _check_private(directory: Path) -> None:
    """Refuse a directory that another user made, or can look into: a link is never followed.

    Raises:
        UsageError: it is not private.
        OSError: it does not exist, or cannot be seen.
    """
    # Another user may have made the directory first, in /tmp, to serve processes with this user's
    # environment.
    found = directory.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and mode == 0o700:
        return
    kind = "is not a directory" if not stat.S_ISDIR(found.st_mode) else f"has mode {mode:o}"
    raise UsageError(
        f"{directory} {kind} and belongs to user {found.st_uid}, not mode 700 and user {os.getuid()}",
        where="the socket of polyxla warm",
        fix=f"Remove it, or set {XDG_RUNTIME_DIR} to a directory of yours.",
    )


def _interpreter() -> str:
    # Processes of another environment's Python have other packages, and cannot serve its programs.
    return hashlib.sha256(f"{sys.executable}\0{sys.prefix}".encode()).hexdigest()[:12]


def send(connection: socket.socket, **message: Any) -> None:
    """Send a message.

    Raises:
        OSError: the other end is gone, or did not read in time.
    """
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Message | None:
    """Return the next message; None if the other end has closed the connection, or sends something else.

    Raises:
        OSError: nothing arrived in time.
    """
    head = _read(connection, _LENGTH.size)
    # The length comes from outside, so it is checked before that much is read.
    if not head or _LENGTH.unpack(head)[0] > LONGEST_BYTES:
        return None
    try:
        message = json.loads(_read(connection, *_LENGTH.unpack(head)))
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def send_descriptors(connection: socket.socket, descriptors: list[int]) -> None:
    """Send descriptors, at most `DESCRIPTORS`, with one byte."""
    socket.send_fds(connection, [b"\0"], descriptors)


def receive_descriptors(connection: socket.socket) -> list[int]:
    """Return what `send_descriptors` sent; empty if the other end has closed the connection."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, DESCRIPTORS)
    return descriptors


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the other end, by the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", data)
    return int(user)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        # A client that is killed resets the connection: the same as its end.
        with contextlib.suppress(ConnectionResetError):
            if more := connection.recv(size - len(data)):
                data += more
                continue
        return b""
    return bytes(data)
