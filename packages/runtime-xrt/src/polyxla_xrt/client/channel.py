"""A connection to a worker, and the errors that its failures mean."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import grpc
from google.protobuf.json_format import MessageToDict

from polyxla import UsageError
from polyxla.plugin import printable
from polyxla_xrt import env
from polyxla_xrt.client.probe import ANSWER_S, BUSY_S, RETRY_S, SPEAKS_HTTP2, look, unreachable
from polyxla_xrt.config.credentials import own_token, read_file, read_token, refuse_another_users
from polyxla_xrt.config.variables import find
from polyxla_xrt.errors import WorkerConnectError, WorkerError, WorkerRefusedError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol import bulk_decoding
from polyxla_xrt.protocol.channels import CLIENT_OPTIONS
from polyxla_xrt.protocol.worker import OPTIONS, PROTOCOL, SERVICE

_REPLACED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""What a call gets while the worker's process is replaced: the old process ends with the call, or the
connection was waiting for a process."""


class WorkerChannel:
    """A channel to a worker. Create it after any fork; it is thread-safe.

    Args:
        address: ``host:port``.
        environ: names the files of the token and the certificates, and proxies for error messages.
        port: the port of a job's own process, to which the worker has moved the job; 0 for the worker itself.
        token: the token, if the environment does not name its file.

    Attributes:
        stub: the worker's calls.
        where: the worker as errors name it.

    Raises:
        UsageError: a file that the environment names cannot be used.
    """

    def __init__(
        self, address: str, environ: Mapping[str, str], port: int = 0, token: str | None = None
    ) -> None:
        self.address = address
        self.where = f"the worker at {address}"
        self._environ = environ
        host = address.rpartition(":")[0]
        self._moved = f"{host}:{port}" if port else None
        # The scheme is explicit, because gRPC would read a host called `unix` as a scheme.
        target = f"dns:///{self._moved or address}"
        self._token = token or _token(environ)
        credentials = _credentials(environ)
        self._channel: Any = (
            grpc.secure_channel(target, credentials, options=(*OPTIONS, *CLIENT_OPTIONS))
            if credentials
            else grpc.insecure_channel(target, options=(*OPTIONS, *CLIENT_OPTIONS))
        )
        self.stub: Any = worker_pb2_grpc.WorkerStub(self._channel)
        # The link of a slice has the same credentials as its workers, but an address of its own.
        self._slice: Any = worker_pb2_grpc.SliceStub(self._channel)

    def call(self, name: str, request: Any, **options: Any) -> Any:
        """Begin one of the worker's calls, with the token.

        Args:
            name: the method's name.
            request: its request.
            options: gRPC's options of a call, such as ``timeout``.
        """
        return getattr(self.stub, name)(request, metadata=self._metadata, **options)

    def begin(self, name: str, request: Any) -> Any:
        """Begin one of the worker's calls with one answer, with the token; return its future.

        Args:
            name: the method's name.
            request: its request.
        """
        return getattr(self.stub, name).future(request, metadata=self._metadata)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        # The token of a worker that makes its own is read at each call, because the worker may have been
        # started again.
        token = self._token or own_token(self.address, self._environ)
        # The job's process may have ended, and another user may have its port, who must not get the token.
        if token and self._moved:
            refuse_another_users(self._moved)
        return (("authorization", f"Bearer {token}"),) if token else ()

    def session(self, commands: Iterator[bytes]) -> Any:
        """Begin a session: sends the encoded `commands`; the returned call iterates over the answers."""
        # The generated stub would let protobuf copy the bulk data. Here the caller encodes it, and the
        # answers are decoded as views.
        session = self._channel.stream_stream(
            f"/{SERVICE}/Session",
            response_deserializer=bulk_decoding.answers,
        )
        return session(commands, metadata=self._metadata)

    def join(self, request: pb.JoinRequest) -> Any:
        """Begin to take part in a slice; the address is that of its link, not a worker's."""
        return self._slice.Join(request, metadata=self._metadata)

    def exchange(self, account: pb.Account, timeout_s: float) -> Sequence[pb.Account]:
        """Tell the progress of one worker of a slice, at the address of its link; return that of all.

        Raises:
            grpc.RpcError: there is no answer within `timeout_s` seconds.
        """
        reply: pb.Accounts = self._slice.Exchange(account, metadata=self._metadata, timeout=timeout_s)
        return reply.accounts

    def status(
        self, call: Literal["Status", "Drain"] = "Status", timeout_s: float = ANSWER_S
    ) -> pb.StatusReply:
        """Ask for the worker's status, which also checks that it is a worker and accepts this client.

        Args:
            call: ``Drain`` also drains the worker.
            timeout_s: longest wait, in seconds; `BUSY_S` for a server that is alive and does not answer yet.

        Raises:
            WorkerError: nothing answers in time, the server is not a worker, or it refuses this client.
        """
        request = pb.StatusRequest() if call == "Status" else pb.DrainRequest()
        deadline = time.monotonic() + timeout_s
        last = max(deadline, time.monotonic() + BUSY_S)
        while True:
            # gRPC fails a call at once if its deadline has passed.
            left = max(0.1, deadline - time.monotonic())
            try:
                reply: pb.StatusReply = self.call(call, request, timeout=left)
            except grpc.RpcError as error:
                if error.code() in _REPLACED and time.monotonic() + RETRY_S < deadline:
                    time.sleep(RETRY_S)
                    continue
                is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and deadline < last
                if is_late and self._look() == SPEAKS_HTTP2:
                    deadline = last
                    continue
                raise self.explain(error) from None
            # The worker would refuse a lease for the same reason; here the error can name both versions.
            if reply.protocol != PROTOCOL:
                raise WorkerRefusedError(
                    f"{self.where} speaks protocol {reply.protocol} (version {reply.version}), this client "
                    f"{PROTOCOL}",
                    where=self.address,
                    fix="Install the same version of polyxla-runtime-xrt on both sides.",
                )
            return reply

    def explain(self, error: Any) -> WorkerError:
        """Return the error that a failed call means."""
        code, details = error.code(), printable(error.details() or "")
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return WorkerRefusedError(
                f"{self.where} rejects this client: {details}",
                where=self.address,
                fix=f"Set {env.POLYXLA_XRT_TOKEN_FILE} to a file with the same token as the worker's; one on "
                "loopback that has no such file admits its own user's clients only.",
            )
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return WorkerRefusedError(
                f"{self.where} refuses: {details}",
                where=self.address,
                fix="Install the same version of polyxla-runtime-xrt on both sides.",
            )
        if code in (*_REPLACED, grpc.StatusCode.DEADLINE_EXCEEDED):
            # gRPC has the same statuses for every way in which a connection fails, so a short connection
            # finds the cause.
            found = self._look()
            if code in _REPLACED and found == SPEAKS_HTTP2:
                return WorkerConnectError(
                    f"the connection to {self.where} broke: {details}",
                    where=self.address,
                    fix="Check the network to it, and see the worker's log.",
                )
            return self._unreachable(found, details)
        if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL):
            return self._unreachable("the gRPC server there is not a worker", details)
        return WorkerError(
            f"{self.where} answered: {details} ({code.name})",
            where=self.address,
            fix=f"See the worker's log, and run: polyxla worker status {self.address}",
        )

    def _look(self) -> str:
        return look(self._moved or self.address, self._environ)

    def _unreachable(self, found: str, details: str) -> WorkerConnectError:
        # gRPC has no status for a failed handshake and mentions it only in the text.
        if any(word in details.lower() for word in ("handshake", "ssl", "certificate")):
            found = f"the encrypted connection failed: {details}"
        if self._moved:
            return WorkerConnectError(
                f"{self.where} has moved the job to {self._moved}, which cannot be reached: {found}",
                where=self.address,
                fix="See in the worker's log whether the job's process has ended. If not, let the network "
                "pass its port: polyxla worker --jobs N --job-ports FIRST-LAST says which it may be.",
            )
        return unreachable(self.address, found, self._environ)

    def close(self) -> None:
        """Close the connection and every call on it."""
        self._channel.close()


def ask(address: str, call: Literal["Status", "Drain"], environ: Mapping[str, str]) -> dict[str, Any]:
    """Call a worker once, and return its status as plain values.

    Args:
        address: ``host:port``.
        call: ``Status``, or ``Drain`` to drain the worker as well.
        environ: the environment to connect with.

    Raises:
        WorkerError: nothing answers in time, the server is not a worker, or it refuses this client.
    """
    channel = WorkerChannel(address, environ)
    try:
        reply = channel.status(call)
    finally:
        channel.close()
    plain: dict[str, Any] = MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # JSON has no 64-bit integers, so protobuf writes them as text.
    plain["jobs_served"] = int(plain["jobs_served"])
    plain["up_s"] = round(plain["up_s"], 1)
    plain["jobs"] = [_plain_job(job) for job in plain["jobs"]]
    plain["kept"] = [{**kept.pop("holder"), **kept, "bytes": int(kept["bytes"])} for kept in plain["kept"]]
    return plain


def _plain_job(job: dict[str, Any]) -> dict[str, Any]:
    return {**job.pop("holder"), **job, "memory_bytes": int(job["memory_bytes"])}


def _token(environ: Mapping[str, str]) -> str | None:
    token = find(environ, env.POLYXLA_XRT_TOKEN_FILE)
    return read_token(Path(token.text), token.where) if token else None


def _credentials(environ: Mapping[str, str]) -> grpc.ChannelCredentials | None:
    names = env.POLYXLA_XRT_TLS_CA, env.POLYXLA_XRT_TLS_CERT, env.POLYXLA_XRT_TLS_KEY
    ca, cert, key = (_content(environ, name) for name in names)
    if ca is None and cert is None and key is None:
        return None
    if ca is None:
        raise UsageError(
            "a client certificate needs the authority that signed the worker's certificate",
            where=f"{env.POLYXLA_XRT_TLS_CERT}, {env.POLYXLA_XRT_TLS_KEY}",
            fix=f"Set {env.POLYXLA_XRT_TLS_CA}, too.",
        )
    if (cert is None) != (key is None):
        raise UsageError(
            "a certificate needs its key, and a key its certificate",
            where=f"{env.POLYXLA_XRT_TLS_CERT}, {env.POLYXLA_XRT_TLS_KEY}",
            fix="Set both or neither.",
        )
    return grpc.ssl_channel_credentials(ca, key, cert)


def _content(environ: Mapping[str, str], name: str) -> bytes | None:
    variable = find(environ, name)
    return read_file(Path(variable.text), variable.where) if variable else None
