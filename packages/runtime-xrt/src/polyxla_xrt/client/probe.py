"""What is at an address that should be a service of ours and is not: one short look, without gRPC."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from polyxla_xrt import env
from polyxla_xrt.errors import WorkerConnectError

PROBE_S = 0.4
"""Longest look: once to connect, and once to listen."""

ANSWER_S = 2.5
"""Longest wait for a service's first answer, in seconds; an error comes within 5 s."""
RETRY_S = 0.1
"""Pause before the next attempt where nobody listens, in seconds."""
SILENT = "something accepts connections there and never answers"
SPEAKS_HTTP2 = "it speaks HTTP/2, but did not let this process in in time"

_CA = env.POLYXLA_XRT_TLS_CA
# How every HTTP/2 client begins. Source: RFC 9113, section 3.4; then an empty SETTINGS frame, section 6.5.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS = 4
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


def look(address: str) -> str:
    """Say what is found at ``host:port``, as the end of a sentence about it. Blocks shortly."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S) as peer:
            peer.sendall(_PREFACE)
            answer = _listen(peer)
    except socket.gaierror as error:
        return f"its host does not resolve: {error.strerror}"
    except (BrokenPipeError, ConnectionResetError):
        # An end, too: which of them it is depends on who is quicker.
        return _describe(b"")
    except TimeoutError:
        return "no connection came about, as behind a firewall that drops packets"
    except OSError as error:
        return f"{error.strerror or error}"
    return _describe(answer)


def check_reachable(address: str, environ: Mapping[str, str], patience_s: float = ANSWER_S) -> None:
    """Look whether a worker may be at ``host:port``, before anything is imported or started for it.

    Args:
        address: where it should be.
        environ: the environment to connect with.
        patience_s: how long to look again where nobody listens: a worker's process may just be replaced.

    Raises:
        WorkerConnectError: what is there is no worker, if anything is.
    """
    if environ.get(env.POLYXLA_XRT_TLS_CA):
        # It would only say that it does not understand.
        return
    deadline = time.monotonic() + patience_s
    while (found := look(address)) not in (SPEAKS_HTTP2, SILENT):
        if time.monotonic() >= deadline:
            raise unreachable(address, found, environ)
        time.sleep(RETRY_S)
    if found == SILENT:
        raise unreachable(address, found, environ)


def unreachable(address: str, found: str, environ: Mapping[str, str]) -> WorkerConnectError:
    """Return the error for an address where no worker is.

    Args:
        address: ``host:port``.
        found: what is there, as the end of a sentence.
        environ: the environment to connect with.
    """
    tls = "" if environ.get(env.POLYXLA_XRT_TLS_CA) else f" A worker with a certificate needs {_CA}."
    return WorkerConnectError(
        f"there is no worker at {address}: {found}",
        where=address,
        fix="See whether `polyxla worker` is running there, whether its host and port are these, and "
        f"whether a firewall keeps this host from it.{tls}{proxies(environ)}",
    )


def proxies(environ: Mapping[str, str]) -> str:
    """Name the variables that ask for a proxy, as a sentence; nothing where there are none."""
    names = [name for low in _PROXIES for name in (low, low.upper()) if environ.get(name)]
    return f" {', '.join(names)} is set: processes of a job meet without a proxy." if names else ""


def _listen(peer: socket.socket) -> bytes | None:
    """Return the first bytes that come, none for an end, or None for silence."""
    answer, deadline = b"", time.monotonic() + PROBE_S
    try:
        while len(answer) < 9 and (left := deadline - time.monotonic()) > 0:
            peer.settimeout(left)
            piece = peer.recv(64)
            if not piece:
                return answer
            answer += piece
    except TimeoutError:
        pass
    return answer or None


def _describe(answer: bytes | None) -> str:
    if answer is None:
        return SILENT
    if not answer:
        return "something there closes connections"
    if answer.startswith(b"HTTP/") or answer.lstrip()[:1] == b"<":
        return "an HTTP server answers there, or a proxy"
    if len(answer) > 3 and answer[3] == _SETTINGS:
        return SPEAKS_HTTP2
    return "what answers there does not speak gRPC"
