"""A proxy between a gRPC client and its server, whose network fails at a message that a test chooses."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

WAIT_S = 10.0
"""Longest wait for the proxy's thread, in seconds."""
# Source: RFC 9113, 3.4 (the preface), 4.1 (the header of a frame) and 6.1 (DATA).
_PREFACE_BYTES = 24
_HEADER_BYTES = 9
_DATA = 0


class Direction(Enum):
    """Where a message goes."""

    TO_SERVER = "to the server"
    TO_CLIENT = "to the client"


class How(Enum):
    """What happens to the network at the chosen message."""

    CUT = "cut"
    """The message is lost, and both ends of every connection get a reset."""
    HALF = "half"
    """As `CUT`, but half of the message arrives first."""
    ONE = "one"
    """As `CUT`, but only the connection of the message is reset."""
    NEAR = "near"
    """Clients get resets. Servers get nothing any more, as behind a firewall that forgot the connection."""
    FAR = "far"
    """Servers get resets, and clients get nothing any more."""
    STOP = "stop"
    """Nothing arrives any more, in either direction; new connections are accepted and stay silent."""


@dataclass(frozen=True)
class Fault:
    """A failure of the network.

    Attributes:
        direction: the direction whose messages are counted.
        at: number of the message, from 1.
        how: what happens.
        seconds: when a stop ends, in seconds; None for a stop for good.
        times: how many times the network fails: also at twice the number, and so on.
    """

    direction: Direction
    at: int
    how: How
    seconds: float | None = None
    times: int = 1

    @property
    def numbers(self) -> range:
        """The numbers of the messages at which the network fails."""
        return range(self.at, self.at * self.times + 1, self.at)


class WireProxy:
    """A TCP proxy on loopback. It counts the frames with messages (DATA) of all its connections together.

    A thread of its own carries the bytes. The methods are for one thread of the test.

    Args:
        target: ``host:port`` of the server.
        delay_s: how long every message is held up, in seconds.
        pieces: sizes of the pieces in which the bytes are sent on, over and over; empty to send whole frames.

    Attributes:
        address: ``host:port`` of the proxy.
    """

    def __init__(self, target: str, delay_s: float = 0.0, pieces: Sequence[int] = ()) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._delay_s = delay_s
        self._sizes = itertools.cycle(pieces) if pieces else None
        self._fault: Fault | None = None
        self._failed_at: float | None = None
        self._goes_on: asyncio.TimerHandle | None = None
        self._counts = dict.fromkeys(Direction, 0)
        # The ends of the connections, each with where it sends, and those that send nothing any more.
        self._writers: dict[asyncio.StreamWriter, Direction] = {}
        self._silent: set[asyncio.StreamWriter] = set()
        self._links: set[asyncio.Task[None]] = set()
        started = Future[str]()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="wire-proxy")
        self._thread.start()
        self.address = started.result(WAIT_S)

    def begin(self, fault: Fault | None = None) -> None:
        """End all connections and whatever has failed; count from zero, and fail as `fault` says."""

        async def begin() -> None:
            if self._goes_on:
                self._goes_on.cancel()
            self._fault, self._failed_at = fault, None
            self._counts = dict.fromkeys(Direction, 0)
            self._reset()
            self._flows.set()

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(WAIT_S)

    def count(self, direction: Direction) -> int:
        """Return the number of messages since `begin`."""
        return self._counts[direction]

    @property
    def failed_at(self) -> float | None:
        """When the network last failed, on `time.monotonic`'s clock; None while it has not."""
        return self._failed_at

    def close(self) -> None:
        """Close all connections and the port."""
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    async def _serve(self, started: Future[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._flows, self._ends = asyncio.Event(), asyncio.Event()
        self._flows.set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        started.set_result(f"{host}:{port}")
        await self._ends.wait()
        server.close()
        self._reset()
        # No connection is open any more, so that these end by themselves.
        self._flows.set()
        await asyncio.gather(*self._links)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link
        self._links.add(link)
        self._writers[writer] = Direction.TO_CLIENT
        ends = {writer}
        try:
            await self._flows.wait()
            from_server, to_server = await asyncio.open_connection(self._host, self._port)
            ends.add(to_server)
            self._writers[to_server] = Direction.TO_SERVER
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._carry(reader, to_server, Direction.TO_SERVER))
                ways.create_task(self._carry(from_server, writer, Direction.TO_CLIENT))
        except* OSError:
            # The server does not listen, or one side was reset: the other side is reset, too.
            pass
        finally:
            self._links.discard(link)
            for end in ends - self._silent:
                self._writers.pop(end, None)
                _abort(end)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        """Carry one direction of a connection until its sender ends it.

        Raises:
            OSError: the connection broke.
        """
        try:
            if direction is Direction.TO_SERVER:
                await self._send(writer, await reader.readexactly(_PREFACE_BYTES))
            while True:
                header = await reader.readexactly(_HEADER_BYTES)
                size = int.from_bytes(header[:3])
                frame = header + await reader.readexactly(size)
                # An empty frame has no message: it only ends the stream.
                await self._frame(writer, frame, direction, is_message=header[3] == _DATA and size > 0)
        except asyncio.IncompleteReadError as end:
            # A sender that died may end amid a frame.
            await self._send(writer, end.partial)
            writer.write_eof()

    async def _frame(
        self, writer: asyncio.StreamWriter, frame: bytes, direction: Direction, *, is_message: bool
    ) -> None:
        await self._flows.wait()
        if is_message and self._is_open(writer):
            self._counts[direction] += 1
            fault, number = self._fault, self._counts[direction]
            if fault and fault.direction is direction and number in fault.numbers:
                await self._fail(fault, writer, frame)
            await asyncio.sleep(self._delay_s)
        await self._send(writer, frame)

    async def _fail(self, fault: Fault, writer: asyncio.StreamWriter, frame: bytes) -> None:
        if fault.how is How.HALF:
            await self._send(writer, frame[: len(frame) // 2])
        self._failed_at = time.monotonic()
        if fault.how is How.STOP:
            self._flows.clear()
            if fault.seconds is not None:
                self._goes_on = self._loop.call_later(fault.seconds, self._flows.set)
            await self._flows.wait()
        elif fault.how is How.ONE:
            # Its other side is reset as soon as this one has failed.
            _abort(writer)
        elif fault.how in (How.NEAR, How.FAR):
            to_reset = Direction.TO_CLIENT if fault.how is How.NEAR else Direction.TO_SERVER
            self._silent = {end for end, to in self._writers.items() if to is not to_reset}
            for end in self._writers.keys() - self._silent:
                _abort(end)
        else:
            self._reset()

    def _is_open(self, writer: asyncio.StreamWriter) -> bool:
        return not writer.is_closing() and writer not in self._silent

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not self._is_open(writer):
            raise ConnectionResetError
        at = 0
        while at < len(data):
            size = next(self._sizes) if self._sizes else len(data)
            writer.write(data[at : at + size])
            await writer.drain()
            at += size

    def _reset(self) -> None:
        """Reset both ends of every connection."""
        for writer in self._writers:
            _abort(writer)
        self._writers.clear()
        self._silent.clear()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once. Its peer gets a reset, which a socket sends if it may not linger."""
    connection = writer.get_extra_info("socket")
    if connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
