"""A participant of the mesh: it attends, meets the others in rendezvous, and says goodbye."""

from __future__ import annotations

import contextlib
import hmac
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self

import grpc

from polyxla import UsageError
from polyxla.plugin import POLYXLA_SECRET, printable, sealed, unsealed
from polyxla_xrt import env
from polyxla_xrt.client.attendance import Attendance, attend
from polyxla_xrt.client.probe import BUSY_S, look, proxies
from polyxla_xrt.config.timeouts import LONGEST_WAIT_S
from polyxla_xrt.errors import (
    MeshConnectError,
    MeshError,
    MeshRefusedError,
    MeshServiceLostError,
    MismatchError,
    MissingError,
    ParticipantLostError,
)
from polyxla_xrt.proto import mesh_pb2 as pb
from polyxla_xrt.proto import mesh_pb2_grpc
from polyxla_xrt.protocol.channels import CLIENT_OPTIONS, chunks
from polyxla_xrt.protocol.mesh import (
    MAX_PAYLOAD_BYTES,
    OPTIONS,
    PROTOCOL,
    RENDEZVOUS_TIMEOUT_S,
    SEAL_TRAILER,
    call_token,
    config_seal,
    payload_of,
)

MARGIN_S = 60.0
"""How long a rendezvous may exceed its timeout: payloads travel, and the service names who is missing."""
GOODBYE_S = 5.0
"""Longest wait for the answer to a goodbye, in seconds."""

SAME_SECRET = (
    f"Set {POLYXLA_SECRET} to the same random text on all hosts, or {env.POLYXLA_XRT_TOKEN_FILE} to a file "
    "with the same token; end processes that are left over from another run."
)
"""What to do where the processes of a job do not know each other."""

_FAILURES: dict[grpc.StatusCode, tuple[type[MeshError], str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (
        MismatchError,
        "Call the rendezvous once per tag and participant, with the same replicas and its own ordinal.",
    ),
    grpc.StatusCode.OUT_OF_RANGE: (
        MissingError,
        (
            "See what these replicas do instead: every participant must reach the same call. "
            "If they are only slow, pass a longer timeout_s."
        ),
    ),
    grpc.StatusCode.ABORTED: (ParticipantLostError, "See the output of that replica for why it ended."),
    grpc.StatusCode.FAILED_PRECONDITION: (
        MeshRefusedError,
        (
            "Start all processes of a job with the same version of polyxla-runtime-xrt, the same world size "
            "and different ordinals; end processes that are left over from another run."
        ),
    ),
    grpc.StatusCode.UNAUTHENTICATED: (MeshRefusedError, SAME_SECRET),
}
"""The error and the fix for each status of the service. Other statuses come from the connection."""


class MeshClient:
    """A participant of the mesh. Create it after any fork; it is thread-safe.

    Args:
        address: ``host:port`` of the mesh service.
        ordinal: this participant, ``0 <= ordinal < world_size``.
        world_size: number of participants.
        secret: the job's: it proves each call, and payloads that were not sealed with it are not returned.
        connect_wait_s: longest wait for the service, in seconds. If it may start later than this process,
            pass ``Configuration.mesh_connect_wait_s``.
        environ: the environment, whose proxies error messages name.
        protocol: the protocol version to announce.

    Raises:
        MeshConnectError: nothing answers at the address, or the server there is not a mesh service.
        MeshRefusedError: the service speaks another protocol version, or has a participant of this ordinal.
    """

    def __init__(
        self,
        address: str,
        ordinal: int,
        world_size: int,
        secret: str,
        *,
        connect_wait_s: float = BUSY_S,
        environ: Mapping[str, str] = MappingProxyType({}),
        protocol: int = PROTOCOL,
    ) -> None:
        self.address = address
        self.ordinal = ordinal
        self._world_size = world_size
        self._secret = secret
        self._metadata = _metadata(secret)
        self._lock = threading.Lock()
        self._is_closed = False
        self._channel: Any = _open_channel(address)
        self._stub = mesh_pb2_grpc.MeshStub(self._channel)
        request = pb.AttendRequest(protocol=protocol, ordinal=ordinal, world_size=world_size)
        try:
            self._attendance = self._attend(request, connect_wait_s, environ)
        except BaseException:
            # No caller gets this object, so nobody else could close the channel.
            self._channel.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def rendezvous(
        self,
        tag: str,
        payload: bytes = b"",
        replicas: Iterable[int] = (),
        timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    ) -> tuple[bytes, ...]:
        """Wait for the other participants of a tag. Blocks; Ctrl-C ends the wait.

        Args:
            tag: the name of the rendezvous; it may be reused once the rendezvous is over.
            payload: sent to the other participants; at most 1 GiB.
            replicas: ordinals of the participants, including this one; empty for all.
            timeout_s: longest wait, in seconds. The shortest timeout of the participants applies to all.

        Returns:
            The payloads in ordinal order.

        Raises:
            RendezvousError: participants contradict each other, are missing or gone; all get the error.
            MeshServiceLostError: the mesh service went away.
            UsageError: the payload is too large, or `timeout_s` is out of range.
        """
        _check(tag, payload, timeout_s)
        replicas = sorted(replicas)
        first = pb.RendezvousRequest(tag=tag, ordinal=self.ordinal, replicas=replicas, timeout_s=timeout_s)
        if self._is_closed:
            raise self._lost(tag, "this process has said goodbye")
        # The seal names the rendezvous and the participant, so that no other payload of the job can take its
        # place.
        sent = sealed(self._secret, payload_of(tag, self.ordinal, replicas), payload)
        # The service times the rendezvous. This deadline only ends a call that the service no longer answers.
        call = self._stub.Rendezvous(
            _requests(first, sent), timeout=timeout_s + MARGIN_S, metadata=self._metadata
        )
        try:
            return self._opened(tag, replicas, _payloads(call))
        except grpc.RpcError as error:
            raise self._explain(tag, error) from None
        except BaseException:
            # After Ctrl-C, the service must not count a participant that no longer waits.
            call.cancel()
            raise

    def _opened(self, tag: str, replicas: Sequence[int], received: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the payloads, of which each must be its participant's own: callers unpickle them."""
        ordinals = replicas or range(self._world_size)
        try:
            return tuple(
                unsealed(self._secret, payload_of(tag, ordinal, replicas), payload)
                # A wrong number of payloads is as suspicious as a wrong seal: both raise ValueError.
                for ordinal, payload in zip(ordinals, received, strict=True)
            )
        except ValueError:
            raise self._lost(tag, "what answers there is not the mesh service of this job") from None

    def close(self) -> None:
        """Say goodbye; calls that still wait fail. A service that is already gone is not an error."""
        with self._lock:
            if self._is_closed:
                return
            # It is set first: a call that begins during the goodbye must fail and not wait for the others.
            self._is_closed = True
        try:
            with contextlib.suppress(grpc.RpcError):
                request = pb.GoodbyeRequest(ordinal=self.ordinal)
                self._stub.Goodbye(request, timeout=GOODBYE_S, metadata=self._metadata)
            # The service ends the stream when it has the goodbye.
            self._attendance.end(timeout_s=1.0)
        finally:
            self._channel.close()

    def _attend(self, request: pb.AttendRequest, wait_s: float, environ: Mapping[str, str]) -> Attendance:
        try:
            return attend(lambda: self._stub.Attend(request, metadata=self._metadata), wait_s)
        except TimeoutError:
            raise self._unreachable(look(self.address), environ) from None
        except grpc.RpcError as error:
            code, details = _status(error)
            if code in _FAILURES:
                kind, fix = _FAILURES[code]
                raise kind(f"the mesh service refuses: {details}", where=self._where, fix=fix) from None
            # A gRPC server answers this to a service that it does not have.
            if code is grpc.StatusCode.UNIMPLEMENTED:
                found = "the gRPC server there is not a mesh service"
            else:
                found = look(self.address)
            raise self._unreachable(found, environ) from None

    @property
    def _where(self) -> str:
        return f"{env.XRT_MESH_SERVICE_ADDRESS}={self.address}"

    def _unreachable(self, found: str, environ: Mapping[str, str]) -> MeshConnectError:
        return MeshConnectError(
            f"ordinal {self.ordinal} finds no mesh service at {self.address}: {found}",
            where=self._where,
            fix="Check that ordinal 0 is running there, that the address is that of its host, and "
            f"that the port is open between the hosts.{proxies(environ)}",
        )

    def _explain(self, tag: str, error: grpc.RpcError) -> MeshError:
        code, details = _status(error)
        if code not in _FAILURES:
            return self._lost(tag, f"{details} ({code.name})")
        kind, fix = _FAILURES[code]
        return kind(f"rendezvous {_short(tag)} failed: {details}", where=self._where, fix=fix)

    def _lost(self, tag: str, why: str) -> MeshServiceLostError:
        return MeshServiceLostError(
            f"rendezvous {_short(tag)} failed: ordinal {self.ordinal} lost the mesh service at "
            f"{self.address}: {why}",
            where=self._where,
            fix="See the output of ordinal 0, whose launcher runs the service, for why it ended.",
        )


def read_config(address: str, wait_s: float, environ: Mapping[str, str]) -> pb.ConfigReply:
    """Fetch the list of workers, which a host needs before it starts its processes.

    Args:
        address: ``host:port`` of the mesh service.
        wait_s: longest wait for the service, in seconds: the first host may start later.
        environ: the environment with the job's secret; error messages name its proxies.

    Raises:
        MeshConnectError: nothing answers at the address in time, or the server there is not the mesh service
            of this job.
    """
    secret = environ[POLYXLA_SECRET]
    channel = _open_channel(address)
    try:
        stub = mesh_pb2_grpc.MeshStub(channel)
        request = pb.ConfigRequest(protocol=PROTOCOL)
        reply: pb.ConfigReply
        # gRPC itself retries until the deadline, because the first host may start later.
        reply, call = stub.Config.with_call(
            request, timeout=wait_s, wait_for_ready=True, metadata=_metadata(secret)
        )
        # The list says where the job's data goes, so it must come from a process that knows the job's secret.
        given = dict(call.trailing_metadata()).get(SEAL_TRAILER, "")
        if not hmac.compare_digest(given, config_seal(secret, reply.SerializeToString(deterministic=True))):
            raise MeshConnectError(
                f"what answers at {address} is not the mesh service of this job",
                where=f"{env.XRT_MESH_SERVICE_ADDRESS}={address}",
                fix=SAME_SECRET,
            )
    except grpc.RpcError as error:
        code, details = _status(error)
        # gRPC does not say why nothing answered; a short connection shows what is there.
        found = look(address) if code is grpc.StatusCode.DEADLINE_EXCEEDED else f"{details} ({code.name})"
        raise MeshConnectError(
            f"this host got no list of workers from the mesh service at {address}: {found}",
            where=f"{env.XRT_MESH_SERVICE_ADDRESS}={address}",
            fix=SAME_SECRET
            if code is grpc.StatusCode.UNAUTHENTICATED
            else f"Check that the job was started on the host of task 0, too.{proxies(environ)}",
        ) from None
    finally:
        channel.close()
    return reply


def _metadata(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {call_token(secret)}"),)


def _open_channel(address: str) -> Any:
    # The scheme is explicit, because gRPC would read a host called `unix` as a scheme.
    return grpc.insecure_channel(f"dns:///{address}", options=(*OPTIONS, *CLIENT_OPTIONS))


def _requests(first: pb.RendezvousRequest, payload: bytes) -> Iterator[pb.RendezvousRequest]:
    request = first
    # Only the first message has the other fields; see the protocol.
    for piece, _ in chunks(payload):
        request.payload = bytes(piece)
        yield request
        request = pb.RendezvousRequest()


def _payloads(replies: Iterable[pb.RendezvousReply]) -> tuple[bytes, ...]:
    payloads, parts = list[bytes](), list[bytes]()
    for reply in replies:
        parts.append(reply.payload)
        if reply.ends:
            payloads.append(b"".join(parts))
            parts.clear()
    return tuple(payloads)


def _check(tag: str, payload: bytes, timeout_s: float) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise UsageError(
            f"the payload of rendezvous {_short(tag)} has {len(payload)} bytes, "
            f"more than {MAX_PAYLOAD_BYTES}",
            fix="Send it in several rendezvous, or write it to a file.",
        )
    if not 0 < timeout_s <= LONGEST_WAIT_S:
        raise UsageError(
            f"a rendezvous cannot wait for {timeout_s} seconds",
            where=f"timeout_s={timeout_s}",
            fix=f"Pass more than 0 and at most {LONGEST_WAIT_S:.0f}.",
        )


def _short(tag: str) -> str:
    return repr(tag if len(tag) <= 80 else f"{tag[:80]}...")


def _status(error: Any) -> tuple[grpc.StatusCode, str]:
    return error.code(), printable(error.details() or "")
