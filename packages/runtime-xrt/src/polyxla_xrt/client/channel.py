"""A connection to a worker, and what it means when there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import grpc
from google.protobuf.json_format import MessageToDict

from polyxla import UsageError
from polyxla_xrt import env
from polyxla_xrt.client.probe import ANSWER_S, RETRY_S, look, unreachable
from polyxla_xrt.config.variables import find
from polyxla_xrt.errors import WorkerConnectError, WorkerError, WorkerRefusedError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.worker import OPTIONS, PROTOCOL, SERVICE
from polyxla_xrt.server.worker.security import read_token

_CHANNEL_OPTIONS = (
    *OPTIONS,
    # A worker is reached directly; a proxy would answer in its place.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class WorkerChannel:
    """A channel to a worker. Make it after a fork; any thread may use it.

    Args:
        address: ``host:port``.
        environ: holds the token's and the certificates' files, and proxies that errors name.

    Attributes:
        stub: the worker's calls.
        where: the worker as errors name it.

    Raises:
        UsageError: a file that the environment names cannot be used.
    """

    def __init__(self, address: str, environ: Mapping[str, str]) -> None:
        self.address = address
        self.where = f"the worker at {address}"
        self._environ = environ
        # The scheme is written, or a host called `unix` would be one.
        target = f"dns:///{address}"
        self._metadata = _metadata(environ)
        credentials = _credentials(environ)
        self._channel: Any = (
            grpc.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
            if credentials
            else grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        )
        self.stub: Any = worker_pb2_grpc.WorkerStub(self._channel)

    def call(self, name: str, request: Any, **options: Any) -> Any:
        """Begin one of the worker's calls, with the token."""
        return getattr(self.stub, name)(request, metadata=self._metadata, **options)

    def session(self, commands: Iterator[list[Any]]) -> Any:
        """Begin a session: commands go out as they come, and the call's answers are iterated over."""
        session = self._channel.stream_stream(
            f"/{SERVICE}/Session",
            request_serializer=bulk_encoding.encode,
            response_deserializer=pb.Answers.FromString,
        )
        return session(commands, metadata=self._metadata)

    def status(self, call: Literal["Status", "Drain"] = "Status") -> pb.StatusReply:
        """Ask the worker what it serves; this also finds out whether it is one, and lets this client in.

        Raises:
            WorkerError: nothing answers in time, or it is no worker, or it refuses.
        """
        request = pb.StatusRequest() if call == "Status" else pb.DrainRequest()
        deadline = time.monotonic() + ANSWER_S
        while True:
            left = max(0.1, deadline - time.monotonic())
            try:
                reply: pb.StatusReply = self.call(call, request, timeout=left)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() + RETRY_S < deadline:
                    time.sleep(RETRY_S)
                    continue
                raise self.explain(error) from None
            if reply.protocol != PROTOCOL:
                raise WorkerRefusedError(
                    f"{self.where} speaks protocol {reply.protocol} (version {reply.version}), this client "
                    f"{PROTOCOL}",
                    where=self.address,
                    fix="Install the same version of polyxla-runtime-xrt on both sides.",
                )
            return reply

    def explain(self, error: Any) -> WorkerError:
        """Return the error that a call's failure means."""
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return WorkerRefusedError(
                f"{self.where} does not let this client in: {details}",
                where=self.address,
                fix=f"Set {env.POLYXLA_XRT_TOKEN_FILE} to a file with the same token as the worker's.",
            )
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return WorkerRefusedError(
                f"{self.where} refuses: {details}",
                where=self.address,
                fix="Install the same version of polyxla-runtime-xrt on both sides.",
            )
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return self._unreachable(look(self.address), details)
        if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL):
            return self._unreachable("a gRPC server answers there, but it is not a worker", details)
        return WorkerError(
            f"{self.where} answers {details} ({code.name})",
            where=self.address,
            fix=f"See its log, and: polyxla worker status {self.address}",
        )

    def _unreachable(self, found: str, details: str) -> WorkerConnectError:
        if any(word in details.lower() for word in ("handshake", "ssl", "certificate")):
            found = f"the encrypted connection does not come about: {details}"
        return unreachable(self.address, found, self._environ)

    def close(self) -> None:
        """Cut the connection and every call on it."""
        self._channel.close()


def ask(address: str, call: Literal["Status", "Drain"], environ: Mapping[str, str]) -> dict[str, Any]:
    """Ask a worker once, and return its answer as plain values."""
    channel = WorkerChannel(address, environ)
    try:
        reply = channel.status(call)
    finally:
        channel.close()
    plain: dict[str, Any] = MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    job = plain.pop("job", None)
    # JSON has no whole numbers of 64 bits, so protobuf writes them as text.
    plain |= {name: int(plain[name]) for name in ("memory_bytes", "jobs_served")}
    plain["up_s"] = round(plain["up_s"], 1)
    return {**plain, "job": job and {**job["holder"], "since": job["since"]}}


def _metadata(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    token = find(environ, env.POLYXLA_XRT_TOKEN_FILE)
    if token is None:
        return ()
    return (("authorization", f"Bearer {read_token(Path(token.text), token.where)}"),)


def _credentials(environ: Mapping[str, str]) -> grpc.ChannelCredentials | None:
    ca = _file(environ, env.POLYXLA_XRT_TLS_CA)
    cert = _file(environ, env.POLYXLA_XRT_TLS_CERT)
    key = _file(environ, env.POLYXLA_XRT_TLS_KEY)
    if ca is None and cert is None and key is None:
        return None
    if ca is None:
        raise UsageError(
            "a client shows its certificate only where it knows who vouches for the worker's",
            where=f"{env.POLYXLA_XRT_TLS_CERT}, {env.POLYXLA_XRT_TLS_KEY}",
            fix=f"Set {env.POLYXLA_XRT_TLS_CA}, too.",
        )
    if (cert is None) != (key is None):
        raise UsageError(
            "a certificate needs its key, and a key its certificate",
            where=f"{env.POLYXLA_XRT_TLS_CERT}, {env.POLYXLA_XRT_TLS_KEY}",
            fix="Set both, or none.",
        )
    return grpc.ssl_channel_credentials(ca, key, cert)


def _file(environ: Mapping[str, str], name: str) -> bytes | None:
    variable = find(environ, name)
    if variable is None:
        return None
    try:
        return Path(variable.text).read_bytes()
    except OSError as error:
        raise variable.error(f"it cannot be read: {error.strerror}", "Name a file that exists.") from None
