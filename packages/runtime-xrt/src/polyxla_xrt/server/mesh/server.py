"""Running a mesh service: bind its port, serve on a thread, and stop when every participant has left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import grpc.aio

from polyxla import UsageError
from polyxla_xrt import env
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.proto import mesh_pb2 as pb
from polyxla_xrt.proto import mesh_pb2_grpc
from polyxla_xrt.protocol.channel_options import server_options
from polyxla_xrt.protocol.mesh import OPTIONS, call_token
from polyxla_xrt.server.callers import is_right, problem
from polyxla_xrt.server.mesh.rendezvous import Mesh
from polyxla_xrt.server.mesh.service import MeshServicer

START_S = 10.0
"""Longest wait for the thread to serve, in seconds."""
GRACE_S = 2.0
"""Time for answers in flight when the service stops, in seconds."""

_SERVER_OPTIONS = (
    *OPTIONS,
    # Otherwise Linux would let two services share a port, each with half of the participants.
    ("grpc.so_reuseport", 0),
    # A waiting participant pings all the time; by default a server closes the connection at the third ping.
    ("grpc.http2.max_ping_strikes", 0),
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
            if not self._closing.done():
                self._closing.set_result(timeout_s)
        return self._ended.result(timeout_s + GRACE_S + START_S)

    def _run(self, address: str) -> None:
        try:
            self._ended.set_result(asyncio.run(self._serve(address)))
        except Exception as error:
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
        staying = self._mesh.staying
        await server.stop(GRACE_S)
        return staying


class CallersOfTheJob(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Rejects the calls of others when their headers arrive; no message of them is waited for.

    Args:
        token: what the calls of the job carry.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the call's handler, or one that rejects the call."""
        if is_right(details, self._token):
            return await continuation(details)

        async def refuse(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem(details, "mesh service"))

        return grpc.stream_stream_rpc_method_handler(refuse)


def _check_bindable(host: str, port: int, address: str) -> None:
    """Bind as gRPC will: gRPC does not report why it failed, and accepts one of several addresses."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        _refuse(address, f"{host!r} does not resolve: {error.strerror}")
    problems = [problem for family, _, _, _, where in found if (problem := _try_to_bind(family, where))]
    for problem in problems:
        if problem.errno == errno.EADDRINUSE or len(problems) == len(found):
            _refuse(address, problem.strerror or str(problem))


def _try_to_bind(family: int, where: tuple[object, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            # As gRPC does: a lingering connection of the last run does not block the port.
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
