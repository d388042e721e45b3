"""Diagnosis of an address where no service of ours answers: one short connection, without gRPC."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from polyxla_xrt import env
from polyxla_xrt.config.variables import find
from polyxla_xrt.errors import WorkerConnectError

PROBE_S = 0.4
"""Timeout of a probe, in seconds: once to connect, once to listen."""
ANSWER_S = 2.5
"""Longest wait for a service's first answer, in seconds: an error comes within 5 s even on a busy host."""
BUSY_S = 20.0
"""Longest wait for the first answer of a mesh service, or of a worker that speaks HTTP/2, in seconds. On a
busy host, its process may answer late, because it still imports much."""
RETRY_S = 0.1
"""Pause before the next attempt if nothing listens, in seconds."""
SILENT = "something accepts connections there and never answers"
SPEAKS_HTTP2 = "a server there speaks HTTP/2, but did not admit this process in time"

_CA = env.POLYXLA_XRT_TLS_CA
# The connection preface of HTTP/2 clients, and an empty SETTINGS frame. Source: RFC 9113, 3.4 and 6.5.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS = 4
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


def look(address: str, environ: Mapping[str, str] | None = None) -> str:
    """Return what is at ``host:port``, as the end of a sentence. Blocks for a few times `PROBE_S` at most.

    Args:
        address: the address.
        environ: the environment to connect with, which may ask for encryption; None to connect without.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=PROBE_S) as bare,
            _encrypted(bare, host, environ or {}) as peer,
        ):
            # A server of HTTP/2 answers the preface with its settings; a server of anything else answers with
            # an error, closes or stays silent.
            peer.sendall(_PREFACE)
            answer = _listen(peer)
    except socket.gaierror as error:
        return f"its host does not resolve: {error.strerror}"
    except (BrokenPipeError, ConnectionResetError):
        # The peer has closed the connection. Timing decides which of the two errors the socket raises, if
        # any.
        return _describe(b"")
    except TimeoutError:
        return "the connection timed out: a firewall may drop packets"
    except OSError as error:
        return f"{error.strerror or error}"
    return _describe(answer)


def _encrypted(bare: socket.socket, host: str, environ: Mapping[str, str]) -> socket.socket:
    """Return a connection as a client with this environment uses it.

    Raises:
        OSError: the peer does not answer, or the credentials do not fit.
    """
    if not (ca := find(environ, _CA)):
        return bare
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca.text)
    cert, key = find(environ, env.POLYXLA_XRT_TLS_CERT), find(environ, env.POLYXLA_XRT_TLS_KEY)
    if cert and key:
        # The empty password makes an encrypted key fail, for which OpenSSL would otherwise prompt.
        context.load_cert_chain(cert.text, key.text, password="")
    context.set_alpn_protocols(["h2"])
    try:
        return context.wrap_socket(bare, server_hostname=host)
    except TimeoutError:
        raise OSError(SILENT) from None


def check_reachable(address: str, environ: Mapping[str, str], timeout_s: float = ANSWER_S) -> None:
    """Check that a worker may be at ``host:port``, before anything is imported or started for it.

    Args:
        address: the worker's address.
        environ: the environment to connect with.
        timeout_s: how long to retry: while the worker's process is replaced, connections are not answered.

    Raises:
        WorkerConnectError: there is no worker at the address.
    """
    if environ.get(_CA):
        # The lease tells what is wrong with the certificates, too.
        return
    deadline = time.monotonic() + timeout_s
    while (found := look(address)) != SPEAKS_HTTP2:
        if time.monotonic() >= deadline:
            raise unreachable(address, found, environ)
        time.sleep(RETRY_S)


def unreachable(address: str, found: str, environ: Mapping[str, str]) -> WorkerConnectError:
    """Return the error for an address without a worker.

    Args:
        address: ``host:port``.
        found: what is there, as the end of a sentence.
        environ: the environment to connect with.
    """
    tls = "" if environ.get(_CA) else f" For a worker with a certificate, set {_CA}."
    return WorkerConnectError(
        f"there is no worker at {address}: {found}",
        where=address,
        fix="Check that `polyxla worker` is running there, that its host and port are these, and that no "
        f"firewall is in between.{tls}{proxies(environ)}",
    )


def proxies(environ: Mapping[str, str]) -> str:
    """Return a sentence that names the proxy variables that are set; empty if none are."""
    names = [name for low in _PROXIES for name in (low, low.upper()) if environ.get(name)]
    return f" {', '.join(names)} is set, but processes of a job connect without a proxy." if names else ""


def _listen(peer: socket.socket) -> bytes | None:
    """Return the first bytes that the peer sends; empty if it closes, None if it is silent."""
    answer, deadline = b"", time.monotonic() + PROBE_S
    try:
        # HTTP/2 frames begin with nine bytes, of which the fourth is the type (RFC 9113, 4.1).
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
        return "an HTTP server or a proxy answers there"
    if len(answer) > 3 and answer[3] == _SETTINGS:
        return SPEAKS_HTTP2
    return "the server there does not speak gRPC"
