"""Running a mesh service: bind its port, serve on a thread, and stop when every participant has left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import grpc
import grpc.aio

from polyxla import UsageError
from polyxla.plugin import SEAL_CHARS
from polyxla_xrt import env
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.config.timeouts import LONGEST_WAIT_S
from polyxla_xrt.proto import mesh_pb2 as pb
from polyxla_xrt.proto import mesh_pb2_grpc
from polyxla_xrt.protocol.channels import chunks, server_options
from polyxla_xrt.protocol.mesh import (
    MAX_PAYLOAD_BYTES,
    OPTIONS,
    PROTOCOL,
    SEAL_TRAILER,
    call_token,
    config_seal,
)
from polyxla_xrt.server.mesh.rendezvous import Arrival, FailureKind, Mesh, MeshFailure, Outcome
from polyxla_xrt.server.refusals import is_right, problem

START_S = 10.0
"""Longest wait for the thread to serve, in seconds."""
GRACE_S = 2.0
"""Time for answers in flight when the service stops, in seconds."""

_SERVER_OPTIONS = (
    *OPTIONS,
    # With a shared port, Linux would let two services listen, each with half of the participants.
    ("grpc.so_reuseport", 0),
)


class MeshServer:
    """A mesh service on a daemon thread, which ends with the process.

    Args:
        address: ``host:port`` to bind; port 0 chooses a free port.
        world_size: number of participants.
        secret: the job's; calls of others are rejected.
        config: the list of workers, for the hosts that ask for it.

    Attributes:
        address: ``host:port`` with the actual port.

    Raises:
        UsageError: the address cannot be bound.
    """

    def __init__(
        self, address: str, world_size: int, secret: str, config: pb.ConfigReply | None = None
    ) -> None:
        host, _, port = address.rpartition(":")
        _check_bindable(host.strip("[]"), int(port), address)
        self._mesh = Mesh(world_size)
        self._secret = secret
        self._config = config or pb.ConfigReply()
        self._started: Future[int] = Future()
        self._closing: Future[float] = Future()
        self._ended: Future[tuple[int, ...]] = Future()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(address,), name="mesh-service", daemon=True).start()
        try:
            bound = self._started.result(START_S)
        # Another process may have taken the port since the check, and then gRPC raises without the reason.
        except RuntimeError as error:
            _refuse(address, str(error))
        self.address = join_address(host.strip("[]"), bound)

    def close(self, timeout_s: float) -> tuple[int, ...]:
        """Wait until every participant has said goodbye or died, then stop the service.

        Blocks; Ctrl-C ends the wait.

        Args:
            timeout_s: longest wait; participants that still attend are then cut off.

        Returns:
            The ordinals of the participants that had not left.
        """
        with self._lock:
            # A second call must not set the future again. It waits for the same end.
            if not self._closing.done():
                self._closing.set_result(timeout_s)
        return self._ended.result(timeout_s + GRACE_S + START_S)

    def _run(self, address: str) -> None:
        try:
            self._ended.set_result(asyncio.run(self._serve(address)))
        except Exception as error:
            # No caller is on this thread: whoever waits for the start or the end gets the error.
            for waiting in (self._started, self._ended):
                if not waiting.done():
                    waiting.set_exception(error)

    async def _serve(self, address: str) -> tuple[int, ...]:
        callers = CallersOfTheJob(call_token(self._secret))
        server = grpc.aio.server(
            interceptors=[callers], options=(*_SERVER_OPTIONS, *server_options(self._mesh.world_size))
        )
        servicer = MeshServicer(self._mesh, self._config, self._secret)
        mesh_pb2_grpc.add_MeshServicer_to_server(servicer, server)
        port = server.add_insecure_port(address)
        await server.start()
        self._started.set_result(port)
        timeout_s = await asyncio.wrap_future(self._closing)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(servicer.all_gone.wait(), timeout_s)
        # This precedes the stop, which ends all streams and so makes every participant look lost.
        staying = self._mesh.staying
        await server.stop(GRACE_S)
        return staying


class CallersOfTheJob(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Rejects the calls of others as soon as their headers arrive, without waiting for a message.

    Args:
        token: what the calls of the job carry.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the call's handler, or one that rejects the call."""
        # Anyone who reaches the port can call. The headers arrive first, so no payload of others is ever
        # read.
        if is_right(details, self._token):
            return await continuation(details)

        async def refuse(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem(details, "mesh service"))

        # A handler of streams serves calls of every kind and waits for no message.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _check_bindable(host: str, port: int, address: str) -> None:
    """Bind as gRPC will: gRPC does not report why it failed, and accepts one of several addresses."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        _refuse(address, f"{host!r} does not resolve: {error.strerror}")
    problems = [problem for family, _, _, _, where in found if (problem := _try_to_bind(family, where))]
    for problem in problems:
        # A host may have an address of a family that this machine lacks, which is harmless. A taken port is
        # not: some participants would reach the other process.
        if problem.errno == errno.EADDRINUSE or len(problems) == len(found):
            _refuse(address, problem.strerror or str(problem))


def _try_to_bind(family: int, where: tuple[object, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            # gRPC does the same: a lingering connection of the last run does not block the port.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(where)
    except OSError as error:
        return error
    return None


def _refuse(address: str, why: str) -> NoReturn:
    raise UsageError(
        f"the mesh service cannot be bound to {address}: {why}",
        where=f"{env.XRT_MESH_SERVICE_ADDRESS}={address}",
        fix="Write a name or address of this host, which runs ordinal 0, and a free port; `ss -ltnp` shows "
        "which process holds a port, such as another run. With a single host, unset "
        f"{env.XRT_MESH_SERVICE_ADDRESS}.",
    )


# gRPC itself uses none of these statuses for a failed connection.
STATUS = {
    FailureKind.REFUSED: grpc.StatusCode.FAILED_PRECONDITION,
    FailureKind.DISAGREEMENT: grpc.StatusCode.INVALID_ARGUMENT,
    FailureKind.MISSING: grpc.StatusCode.OUT_OF_RANGE,
    FailureKind.GONE: grpc.StatusCode.ABORTED,
}


class MeshServicer:
    """Answers the calls of `polyxla.xrt.mesh.Mesh`; each method has the name of its call.

    Args:
        mesh: the state; used on the event loop only.
        config: the reply to hosts that ask for the list of workers.
        secret: the job's.

    Attributes:
        all_gone: set when every participant has said goodbye or died.
    """

    def __init__(self, mesh: Mesh, config: pb.ConfigReply, secret: str) -> None:
        self._mesh = mesh
        self._config = config
        self._secret = secret
        self._goodbyes: dict[int, asyncio.Event] = {}
        self.all_gone = asyncio.Event()

    async def Attend(self, request: pb.AttendRequest, context: Any) -> None:  # noqa: N802
        """Keep the stream open until the goodbye; if it breaks before, the participant is lost."""
        failure = _other_protocol(request) or self._mesh.attend(request.ordinal, request.world_size)
        if failure:
            await _abort(context, failure)
        # The event exists before the reply, after which the participant may say goodbye.
        goodbye = self._goodbyes[request.ordinal] = asyncio.Event()
        try:
            await context.write(pb.AttendReply())
            await goodbye.wait()
        finally:
            # This has no effect after a goodbye.
            self._mesh.lose(request.ordinal)
            self._check_all_gone()

    async def Rendezvous(  # noqa: N802
        self, requests: AsyncIterator[pb.RendezvousRequest], context: Any
    ) -> None:
        """Wait for the other participants, then write all payloads."""
        found = await _receive(requests)
        answer = found if isinstance(found, MeshFailure) else await self._meet(*found)
        if isinstance(answer, MeshFailure):
            await _abort(context, answer)
        else:
            for payload in answer:
                for chunk, ends in chunks(payload):
                    await context.write(pb.RendezvousReply(payload=bytes(chunk), ends=ends))

    async def Goodbye(self, request: pb.GoodbyeRequest, context: Any) -> pb.GoodbyeReply:  # noqa: N802
        """Record a participant's goodbye and end its stream."""
        # The goodbye is recorded before the stream ends, or its end would count as a death.
        self._mesh.leave(request.ordinal)
        self._check_all_gone()
        if goodbye := self._goodbyes.get(request.ordinal):
            goodbye.set()
        return pb.GoodbyeReply()

    async def Config(self, request: pb.ConfigRequest, context: Any) -> pb.ConfigReply:  # noqa: N802
        """Return the list of the job's workers."""
        if request.protocol != PROTOCOL:
            text = f"A host speaks protocol {request.protocol}, the mesh service {PROTOCOL}"
            await _abort(context, MeshFailure(FailureKind.REFUSED, text))
        # Serialization must be deterministic: the host computes the seal of the reply that it parsed.
        seal = config_seal(self._secret, self._config.SerializeToString(deterministic=True))
        context.set_trailing_metadata(((SEAL_TRAILER, seal),))
        return self._config

    async def _meet(self, request: pb.RendezvousRequest, payload: bytes) -> Outcome:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Outcome] = loop.create_future()

        def answer(found: Outcome) -> None:
            # It is done if its caller was cancelled in this iteration of the event loop.
            if not answered.done():
                answered.set_result(found)

        deadline = loop.time() + request.timeout_s
        replicas = tuple(request.replicas)
        arrival = Arrival(request.tag, request.ordinal, payload, replicas, deadline, answer)
        # `expire` gets the deadline and not the time: asyncio may call a moment early, and would then expire
        # nothing.
        timer = loop.call_at(deadline, self._mesh.expire, deadline)
        try:
            self._mesh.arrive(arrival)
            return await answered
        finally:
            # A caller that was cancelled must not count as arrived. After an answer, this has no effect.
            timer.cancel()
            self._mesh.withdraw(arrival)

    def _check_all_gone(self) -> None:
        if not self._mesh.staying:
            self.all_gone.set()


def _other_protocol(request: pb.AttendRequest) -> MeshFailure | None:
    if request.protocol == PROTOCOL:
        return None
    text = f"Ordinal {request.ordinal} speaks protocol {request.protocol}, the mesh service {PROTOCOL}"
    return MeshFailure(FailureKind.REFUSED, text)


async def _receive(
    requests: AsyncIterator[pb.RendezvousRequest],
) -> tuple[pb.RendezvousRequest, bytes] | MeshFailure:
    """Read the messages of a call; return the first one, and the whole payload."""
    first, parts, size = None, list[bytes](), 0
    async for request in requests:
        first = request if first is None else first
        parts.append(request.payload)
        size += len(request.payload)
        # Every message is checked, because the parts stay in memory until the last one.
        if size > MAX_PAYLOAD_BYTES + SEAL_CHARS:
            return MeshFailure(FailureKind.REFUSED, f"A payload has more than {MAX_PAYLOAD_BYTES} bytes")
    if first is None or not 0 < first.timeout_s <= LONGEST_WAIT_S:
        return MeshFailure(
            FailureKind.REFUSED, f"A call needs a timeout_s of more than 0 and at most {LONGEST_WAIT_S}"
        )
    return first, b"".join(parts)


async def _abort(context: Any, failure: MeshFailure) -> None:
    await context.abort(STATUS[failure.kind], failure.text)
