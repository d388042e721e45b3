"""Who may talk to a worker: a token, certificates, or this machine's own processes only."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from polyxla import UsageError

LEAST_TOKEN = 16
"""Fewest characters of a token: shorter ones can be guessed."""


@dataclass(frozen=True)
class Security:
    """What a worker asks of its clients.

    Attributes:
        token_file: holds the word that every call must bring.
        cert: the worker's certificate, with those that vouch for it; PEM.
        key: the certificate's key; PEM.
        client_ca: vouches for the clients' certificates; without it clients need none.
        is_insecure: whether anybody on the network may use it.
    """

    token_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    is_insecure: bool = False

    def check(self, host: str) -> None:
        """Check that this may be served at a host's address.

        Raises:
            UsageError: anybody on the network could use it, or the options do not fit together.
        """
        if (self.cert is None) != (self.key is None):
            raise UsageError(
                "a certificate needs its key, and a key its certificate",
                where="--tls-cert, --tls-key",
                fix="Give both.",
            )
        if self.client_ca and not self.cert:
            raise UsageError(
                "clients can show certificates only where the worker has one",
                where=f"--tls-client-ca {self.client_ca}",
                fix="Give --tls-cert and --tls-key, too.",
            )
        if not (self.token_file or self.cert or self.is_insecure or _is_loopback(host)):
            raise UsageError(
                f"anybody who reaches {host} could use this worker, and read what others compute",
                where="--address",
                fix="Give --token-file or --tls-cert and --tls-key; or listen at 127.0.0.1; or write "
                "--insecure where the network itself keeps strangers out.",
            )

    def token(self) -> str | None:
        """Read the token.

        Raises:
            UsageError: there is none in the file, or a short one.
        """
        if self.token_file is None:
            return None
        return read_token(self.token_file, f"--token-file {self.token_file}")

    def credentials(self) -> grpc.ServerCredentials | None:
        """Read the certificates; None where calls are not encrypted.

        Raises:
            UsageError: a file cannot be read, or holds something else.
        """
        if self.cert is None or self.key is None:
            return None
        pair = (_read(self.key, "--tls-key"), _read(self.cert, "--tls-cert"))
        ca = _read(self.client_ca, "--tls-client-ca") if self.client_ca else None
        _check_pem(self.cert, self.key, self.client_ca)
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Lets calls pass that bring the token; the others end before anything is done.

    Args:
        token: what they must bring.
    """

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the call's handler, or one that refuses."""
        given = dict(details.invocation_metadata).get("authorization", "")
        handler = continuation(details)
        # The same time whatever is given: how much of it is right must not show.
        if handler is None or hmac.compare_digest(str(given).encode(), self._wanted):
            return handler
        text = "the token is wrong" if given else "this worker wants a token, and the call has none"

        def refuse(_: Any, context: Any) -> Any:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

        def refuse_stream(_: Any, context: Any) -> Any:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
            yield

        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, refuse),
            (False, True): (grpc.unary_stream_rpc_method_handler, refuse_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, refuse),
            (True, True): (grpc.stream_stream_rpc_method_handler, refuse_stream),
        }
        make, refusal = kinds[handler.request_streaming, handler.response_streaming]
        return make(refusal)


def read_token(path: Path, where: str) -> str:
    """Read a token out of its file; what surrounds it, such as a line's end, is not part of it.

    Raises:
        UsageError: the file cannot be read, or holds no token that could be one.
    """
    token = _read(path, where).decode(errors="replace").strip()
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"{path} does not hold a token of at least {LEAST_TOKEN} printable characters",
            where=where,
            fix="Make one with: python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return token


def _read(path: Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", where=where, fix="Give a file that exists."
        ) from None


def _check_pem(cert: Path, key: Path, client_ca: Path | None) -> None:
    """Look at what gRPC would only say on its log, in the process that serves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    where = f"--tls-cert {cert}, --tls-key {key}"
    try:
        # The password of a key that has one is not asked for: nobody may be there to give it.
        context.load_cert_chain(cert, key, password="")
        if client_ca:
            where = f"--tls-client-ca {client_ca}"
            context.load_verify_locations(client_ca)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            f"these are no certificates that fit: {error}",
            where=where,
            fix="Give PEM files: a certificate with its own key, without a password.",
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(where[0]).is_loopback for *_, where in found)
