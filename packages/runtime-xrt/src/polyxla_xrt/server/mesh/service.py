"""The calls of the mesh service: each unpacks, asks `Mesh`, and maps a failure to a status.

Everything here runs on one event loop, so a thousand waiting calls need no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from polyxla_xrt.config.timeouts import LONGEST_WAIT_S
from polyxla_xrt.proto import mesh_pb2 as pb
from polyxla_xrt.protocol.chunks import chunks
from polyxla_xrt.protocol.mesh import PAYLOAD_BYTES, PROTOCOL
from polyxla_xrt.server.mesh.rendezvous import Arrival, FailureKind, Mesh, MeshFailure, Outcome

# None of these is a status that gRPC gives by itself when a connection fails.
STATUS = {
    FailureKind.REFUSED: grpc.StatusCode.FAILED_PRECONDITION,
    FailureKind.DISAGREEMENT: grpc.StatusCode.INVALID_ARGUMENT,
    FailureKind.MISSING: grpc.StatusCode.OUT_OF_RANGE,
    FailureKind.GONE: grpc.StatusCode.ABORTED,
}


class MeshServicer:
    """Answers the calls of `polyxla.xrt.mesh.Mesh`. Method names are those of the calls.

    Args:
        mesh: used on the event loop only.
        config: what a host is told before it starts its processes.
    """

    def __init__(self, mesh: Mesh, config: pb.ConfigReply) -> None:
        self._mesh = mesh
        self._config = config
        self._goodbyes: dict[int, asyncio.Event] = {}
        self.all_gone = asyncio.Event()

    async def Attend(self, request: pb.AttendRequest, context: Any) -> None:  # noqa: N802
        """Keep a stream open until goodbye; when it breaks before, its participant is lost."""
        failure = _other_protocol(request) or self._mesh.attend(request.ordinal, request.world_size)
        if failure:
            await _abort(context, failure)
        goodbye = self._goodbyes[request.ordinal] = asyncio.Event()
        try:
            await context.write(pb.AttendReply())
            await goodbye.wait()
        finally:
            self._mesh.lose(request.ordinal)
            self._note()

    async def Rendezvous(  # noqa: N802
        self, requests: AsyncIterator[pb.RendezvousRequest], context: Any
    ) -> None:
        """Wait for the others, then write everybody's payload."""
        found = await _receive(requests)
        answer = found if isinstance(found, MeshFailure) else await self._meet(*found)
        if isinstance(answer, MeshFailure):
            await _abort(context, answer)
        else:
            for payload in answer:
                for piece, ends in chunks(payload):
                    await context.write(pb.RendezvousReply(payload=piece, ends=ends))

    async def Goodbye(self, request: pb.GoodbyeRequest, context: Any) -> pb.GoodbyeReply:  # noqa: N802
        """Let a participant go; its stream ends."""
        self._mesh.leave(request.ordinal)
        self._note()
        if goodbye := self._goodbyes.get(request.ordinal):
            goodbye.set()
        return pb.GoodbyeReply()

    async def Config(self, request: pb.ConfigRequest, context: Any) -> pb.ConfigReply:  # noqa: N802
        """Tell a host of the job's workers."""
        if request.protocol != PROTOCOL:
            text = f"A host speaks protocol {request.protocol}, the mesh service {PROTOCOL}"
            await _abort(context, MeshFailure(FailureKind.REFUSED, text))
        return self._config

    async def _meet(self, request: pb.RendezvousRequest, payload: bytes) -> Outcome:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Outcome] = loop.create_future()

        def answer(found: Outcome) -> None:
            # Its caller may have gone in this very turn of the loop.
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

    def _note(self) -> None:
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
    """Put a call's messages together: the first, and the whole payload."""
    first, parts, size = None, list[bytes](), 0
    async for request in requests:
        first = request if first is None else first
        parts.append(request.payload)
        size += len(request.payload)
        if size > PAYLOAD_BYTES:
            return MeshFailure(FailureKind.REFUSED, f"A payload has more than {PAYLOAD_BYTES} bytes")
    if first is None or not 0 < first.timeout_s <= LONGEST_WAIT_S:
        return MeshFailure(
            FailureKind.REFUSED, f"A call has no timeout_s of more than 0 and at most {LONGEST_WAIT_S}"
        )
    return first, b"".join(parts)


async def _abort(context: Any, failure: MeshFailure) -> None:
    await context.abort(STATUS[failure.kind], failure.text)
