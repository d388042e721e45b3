"""The gRPC calls of the mesh service: each unpacks its request, calls `Mesh`, and maps a failure to a status.

Everything runs on one event loop: a thousand waiting calls need no threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from polyxla.plugin import SEAL_CHARS
from polyxla_xrt.config.timeouts import LONGEST_WAIT_S
from polyxla_xrt.proto import mesh_pb2 as pb
from polyxla_xrt.protocol.chunks import chunks
from polyxla_xrt.protocol.mesh import MAX_PAYLOAD_BYTES, PROTOCOL, SEAL_TRAILER, config_seal
from polyxla_xrt.server.mesh.rendezvous import Arrival, FailureKind, Mesh, MeshFailure, Outcome

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
        goodbye = self._goodbyes[request.ordinal] = asyncio.Event()
        try:
            await context.write(pb.AttendReply())
            await goodbye.wait()
        finally:
            # No effect after a goodbye.
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
        seal = config_seal(self._secret, self._config.SerializeToString(deterministic=True))
        context.set_trailing_metadata(((SEAL_TRAILER, seal),))
        return self._config

    async def _meet(self, request: pb.RendezvousRequest, payload: bytes) -> Outcome:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Outcome] = loop.create_future()

        def answer(found: Outcome) -> None:
            # Done if its caller was cancelled in this iteration of the event loop.
            if not answered.done():
                answered.set_result(found)

        deadline = loop.time() + request.timeout_s
        replicas = tuple(request.replicas)
        arrival = Arrival(request.tag, request.ordinal, payload, replicas, deadline, answer)
        timer = loop.call_at(deadline, self._mesh.expire, deadline)
        try:
            self._mesh.arrive(arrival)
            return await answered
        finally:
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
        if size > MAX_PAYLOAD_BYTES + SEAL_CHARS:
            return MeshFailure(FailureKind.REFUSED, f"A payload has more than {MAX_PAYLOAD_BYTES} bytes")
    if first is None or not 0 < first.timeout_s <= LONGEST_WAIT_S:
        return MeshFailure(
            FailureKind.REFUSED, f"A call needs a timeout_s of more than 0 and at most {LONGEST_WAIT_S}"
        )
    return first, b"".join(parts)


async def _abort(context: Any, failure: MeshFailure) -> None:
    await context.abort(STATUS[failure.kind], failure.text)
