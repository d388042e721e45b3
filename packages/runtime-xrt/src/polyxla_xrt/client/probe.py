"""What is at an address that should be a mesh service and is not: one short look, without gRPC."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

PROBE_S = 0.4
"""Longest look: once to connect, and once to listen."""

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
    except TimeoutError:
        return "no connection came about, as behind a firewall that drops packets"
    except OSError as error:
        return f"{error.strerror or error}"
    return _describe(answer)


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
        return "something accepts connections there and never answers"
    if not answer:
        return "something there closes connections"
    if answer.startswith(b"HTTP/") or answer.lstrip()[:1] == b"<":
        return "an HTTP server answers there, or a proxy"
    if len(answer) > 3 and answer[3] == _SETTINGS:
        return "it speaks HTTP/2, but did not let this process in in time"
    return "what answers there does not speak gRPC"
