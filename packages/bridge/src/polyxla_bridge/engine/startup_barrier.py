"""Before jaxlib's clients connect, their processes see that all are there.

jaxlib ends a process whose client waits in vain, with a C++ stack for an explanation. Here it learns
which replicas never came.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from polyxla_bridge.env import Share
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.table.abi import Code

_RETRY_S = 0.05
_GREETING_TIMEOUT_S = 5.0
"""How long one that connects may take to say who it is; a stranger says nothing."""
_GO = b"go\n"


class Company:
    """The processes that came. A connection to process 0 lasts until its process leaves, or dies.

    Args:
        share: this process's.
        peers: the connections; process 0 has all of them, any other the one to process 0.
    """

    def __init__(self, share: Share, peers: dict[int, socket.socket]) -> None:
        self._share = share
        self._peers = peers

    def leave(self, timeout_s: float) -> None:
        """Say that this process needs the others no more; process 0 waits until all have said so.

        jaxlib ends a process that still uses its service when the service ends, and asks nobody.

        Raises:
            PjrtError: somebody was still there after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        staying = [process for process, peer in self._peers.items() if not self._part(peer, deadline)]
        self._peers.clear()
        if staying:
            raise PjrtError(
                Code.DEADLINE_EXCEEDED,
                f"process 0 waited {timeout_s:g} s for {_named(staying, self._share)} to end, and ends first",
            )

    def _part(self, peer: socket.socket, deadline: float) -> bool:
        with peer:
            try:
                if self._share.process == 0:
                    peer.settimeout(max(0.001, deadline - time.monotonic()))
                    peer.recv(1)
                # Not only closed: a process that was forked from this one may hold it too.
                peer.shutdown(socket.SHUT_RDWR)
            except TimeoutError:
                return False
            except OSError:
                # It is gone, however it went.
                return True
        return True


def hold(share: Share, start_service: Callable[[], None], timeout_s: float) -> Company:
    """Wait for all processes; process 0 starts what they will connect to before any goes on.

    Raises:
        PjrtError: somebody did not come within `timeout_s` seconds, or came with other numbers.
    """
    deadline = time.monotonic() + timeout_s
    if share.process:
        return Company(share, {0: _answer(share, deadline, timeout_s)})
    return Company(share, _call(share, start_service, deadline, timeout_s))


def _call(
    share: Share, start_service: Callable[[], None], deadline: float, timeout_s: float
) -> dict[int, socket.socket]:
    here: dict[int, socket.socket] = {}
    try:
        with _listen(share) as listener:
            while len(here) < share.processes - 1:
                process, peer = _next(listener, share, deadline, set(here), timeout_s)
                here[process] = peer
        # On the port that the listener had: closed, so that it is free.
        start_service()
        for peer in here.values():
            peer.sendall(_GO)
    except BaseException as error:
        for peer in here.values():
            with suppress(OSError), peer:
                peer.sendall(f"{error}\n".encode())
        raise
    return here


def _listen(share: Share) -> socket.socket:
    host, _, port = share.coordinator.rpartition(":")
    try:
        return socket.create_server((host, int(port)), backlog=share.processes)
    except OSError as error:
        raise PjrtError(
            Code.UNAVAILABLE,
            f"process 0 cannot listen on {share.coordinator}, where {share.replicas} replicas were to meet: "
            f"{error.strerror or error}",
        ) from error


def _next(
    listener: socket.socket, share: Share, deadline: float, here: set[int], timeout_s: float
) -> tuple[int, socket.socket]:
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            break
        peer.settimeout(_GREETING_TIMEOUT_S)
        said = _greeting(peer)
        if said is None or said["process"] in here:
            peer.close()
            continue
        if said["shape"] != _shape(share):
            text = f"process {said['process']} came with {said['shape']}, process 0 has {_shape(share)}"
            peer.sendall(f"{text}\n".encode())
            peer.close()
            raise PjrtError(Code.INVALID_ARGUMENT, text)
        return said["process"], peer
    missing = sorted(set(range(1, share.processes)) - here)
    raise PjrtError(
        Code.DEADLINE_EXCEEDED,
        f"{_named(missing, share)} did not come to {share.coordinator} within {timeout_s:g} s",
    )


def _named(processes: list[int], share: Share) -> str:
    replicas = [one * share.per_process + i for one in processes for i in range(share.per_process)]
    return f"replicas {replicas} (processes {processes} of {share.processes})"


def _shape(share: Share) -> dict[str, int]:
    return {"replicas": share.replicas, "processes": share.processes}


def _greeting(peer: socket.socket) -> dict[str, Any] | None:
    try:
        said = json.loads(_line(peer))
        return {"process": int(said["process"]), "shape": dict(said["shape"])}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _line(peer: socket.socket) -> bytes:
    with peer.makefile("rb") as file:
        return file.readline(1 << 16)


def _answer(share: Share, deadline: float, timeout_s: float) -> socket.socket:
    peer = _reach(share, deadline, timeout_s)
    said = {"process": share.process, "shape": _shape(share)}
    try:
        peer.sendall(json.dumps(said).encode() + b"\n")
        # Process 0 has the same deadline, and needs a moment to say who is missing.
        peer.settimeout(max(0.0, deadline - time.monotonic()) + _GREETING_TIMEOUT_S)
        answer = _line(peer)
    except OSError as error:
        answer = f"process 0, at {share.coordinator}, gave no answer: {error}".encode()
    if answer != _GO:
        peer.close()
        reason = answer.decode(errors="replace").strip()
        text = reason or f"process 0, at {share.coordinator}, ended before all replicas had come"
        raise PjrtError(Code.UNAVAILABLE, text)
    return peer


def _reach(share: Share, deadline: float, timeout_s: float) -> socket.socket:
    host, _, port = share.coordinator.rpartition(":")
    while (left := deadline - time.monotonic()) > 0:
        try:
            peer = socket.create_connection((host, int(port)), timeout=left)
            # Where nobody listens, a socket may by chance be given the very port, and find itself.
            if peer.getsockname() != peer.getpeername():
                return peer
            peer.close()
        except ConnectionError:
            # Process 0 has not come so far yet.
            time.sleep(_RETRY_S)
        except OSError as error:
            raise PjrtError(
                Code.UNAVAILABLE,
                f"process {share.process} cannot reach {share.coordinator}, where replicas meet: {error}",
            ) from error
    raise PjrtError(
        Code.DEADLINE_EXCEEDED,
        f"nobody listened on {share.coordinator} within {timeout_s:g} s: {_named([0], share)} did not come",
    )
