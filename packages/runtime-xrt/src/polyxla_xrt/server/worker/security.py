"""Access to a worker: by token, by certificate, or from this machine only."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from polyxla import UsageError
from polyxla.plugin import WHERE_PRIVATE
from polyxla_xrt import env
from polyxla_xrt.config.credentials import loopback_addresses, read_file, read_token
from polyxla_xrt.server.refusals import is_right, problem


@dataclass(frozen=True)
class Security:
    """The credentials that a worker has, and requires of its clients.

    Attributes:
        token_file: file with the token that every call must carry.
        token: this token.
        cert: file with the worker's certificate and those of its authorities; PEM.
        key: file with the certificate's key; PEM.
        client_ca: file with the authority of the clients' certificates; None if clients need none. PEM.
        is_insecure: whether everyone who reaches the worker may use it.
        own_token: the token that the worker has made for itself; None if it has other credentials.
    """

    token_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    is_insecure: bool = False
    token: str | None = field(default=None, repr=False)
    own_token: str | None = field(default=None, repr=False)

    def check(self, host: str) -> None:
        """Check that a worker may listen on a host's address with these credentials.

        Raises:
            UsageError: everyone on the network could use the worker, or the options are inconsistent.
        """
        if (self.cert is None) != (self.key is None):
            raise UsageError(
                "a certificate needs its key, and a key its certificate",
                where="--tls-cert, --tls-key",
                fix="Pass both.",
            )
        if self.client_ca and not self.cert:
            raise UsageError(
                "client certificates need a certificate of the worker",
                where=f"--tls-client-ca {self.client_ca}",
                fix="Pass --tls-cert and --tls-key, too.",
            )
        if not (self.token_file or self.cert or self.is_insecure or loopback_addresses(host)):
            raise UsageError(
                f"anyone who can reach {host} could use this worker and read other users' data",
                where="--address",
                fix="Pass --token-file, or --tls-cert and --tls-key; or listen on 127.0.0.1; or pass "
                "--insecure if the network itself is protected.",
            )

    def with_token(self) -> Security:
        """Return these credentials with their token, which is made now if there are none, as on loopback.

        Raises:
            UsageError: the file cannot be read, or holds no valid token.
        """
        if self.token_file:
            # It is read once: processes that are forked later must require the same one, whatever the file
            # holds by then.
            return replace(self, token=read_token(self.token_file, f"--token-file {self.token_file}"))
        if self.cert or self.is_insecure:
            return self
        # Every user of the machine can reach loopback, so a worker there needs a token as well.
        return replace(self, own_token=secrets.token_hex(32))

    def credentials(self) -> grpc.ServerCredentials | None:
        """Read the certificates; None if calls are not encrypted.

        Raises:
            UsageError: a file cannot be read, or holds no valid certificate or key.
        """
        if self.cert is None or self.key is None:
            return None
        pair = (read_file(self.key, "--tls-key"), read_file(self.cert, "--tls-cert"))
        ca = read_file(self.client_ca, "--tls-client-ca") if self.client_ca else None
        _check_pem(self.cert, self.key, self.client_ca)
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)

    def listen(self, server: grpc.Server, address: str) -> int:
        """Open a server's port, encrypted if there is a certificate; return it.

        Raises:
            RuntimeError: gRPC cannot bind the address.
        """
        credentials = self.credentials()
        port: int
        if credentials:
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
        return port

    def interceptors(self) -> list[grpc.ServerInterceptor]:
        """Return the interceptors that reject calls without the token."""
        token = self.token or self.own_token
        return [TokenInterceptor(token)] if token else []

    def as_client(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which this worker is a client of others with the same credentials.

        Args:
            environ: this process's environment, which names the authority of the workers' certificates.

        Raises:
            UsageError: it does not, and the workers have certificates.
        """
        if self.cert is None:
            # A worker that has made its own token has published it in the private directory.
            return {name: environ[name] for name in WHERE_PRIVATE if name in environ}
        if not environ.get(env.POLYXLA_XRT_TLS_CA):
            raise UsageError(
                "the workers of a slice check each other's certificates",
                where="--slice, --tls-cert",
                fix=f"Set {env.POLYXLA_XRT_TLS_CA} to the file with the authority of all their certificates.",
            )
        return {
            env.POLYXLA_XRT_TLS_CA: environ[env.POLYXLA_XRT_TLS_CA],
            env.POLYXLA_XRT_TLS_CERT: str(self.cert),
            env.POLYXLA_XRT_TLS_KEY: str(self.key),
        }


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Rejects calls without the right token, before anything else is done.

    Args:
        token: the token.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the call's handler, or one that rejects the call."""
        if is_right(details, self._token):
            return continuation(details)

        def refuse(_: Any, context: Any) -> Any:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, problem(details, "worker"))
            yield

        # A handler of streams serves calls of every kind. It begins before the first message has arrived,
        # which may never come.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _check_pem(cert: Path, key: Path, client_ca: Path | None) -> None:
    """Check the files now: gRPC would only log an error, later and in the serving process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    where = f"--tls-cert {cert}, --tls-key {key}"
    try:
        # The empty password makes an encrypted key fail, for which OpenSSL would otherwise prompt on the
        # terminal.
        context.load_cert_chain(cert, key, password="")
        if client_ca:
            where = f"--tls-client-ca {client_ca}"
            context.load_verify_locations(client_ca)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            f"the certificate and the key do not fit together, or are invalid: {error}",
            where=where,
            fix="Pass PEM files: a certificate and its own key, without a password.",
        ) from None
