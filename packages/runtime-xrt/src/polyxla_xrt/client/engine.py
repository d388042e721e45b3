"""`RemoteEngine`: the bridge's engine, whose devices are cores of a worker.

Nothing here waits for the worker but what needs an answer: a compilation, a download, a question. All else is
queued and sent in order; errors come back on the same stream and surface where the array is read.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from polyxla_bridge.abi import Code, width
from polyxla_bridge.engine.engine import Buffer, DeviceActivity, Engine, EngineDevice
from polyxla_bridge.engine.futures import CompletedFuture, DeletedFuture, GroupedFuture
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_xrt.assignment import Assignment
from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.client.lease import lost
from polyxla_xrt.errors import WorkerError, WorkerLostError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.chunks import chunks
from polyxla_xrt.protocol.outbox import Outbox
from polyxla_xrt.protocol.worker import PROTOCOL, array_bytes

IN_FLIGHT = 64
"""How many programs may be sent ahead of those that are done: enough for any distance, and an end to it."""
ATTACH_S = 120.0
"""Longest wait for the worker to let this process in, in seconds: its engine may be starting."""
MANY_RELEASES = 1024
"""How many arrays may wait to be freed together."""
GOODBYE_S = 5.0
"""Longest wait for a session's end, in seconds."""


@dataclass
class RemoteBuffer(Buffer):
    """An array on a worker.

    Attributes:
        number: what both sides call it.
        is_released: whether the worker was told that it is not needed any more.
    """

    number: int = 0
    is_released: bool = False


@dataclass(frozen=True)
class _Running:
    """A program that was sent and is not known to be done."""

    done: Future[None]
    program: str
    collectives: tuple[str, ...]
    since: float


class RemoteEngine(Engine):
    """Cores behind a network service.

    Args:
        assignment: the worker, the job, and this process's cores.
        environ: the environment to connect with.
        on_lost: told, once, that the worker is gone or has ended the job, and with which code.
        on_close: called when the engine is closed, last.

    Attributes:
        waits: how many times this process has waited for an answer.
        holdups: how many times it has waited because too many programs were ahead of those that are done.

    Raises:
        WorkerError: the worker does not let this process in.
    """

    def __init__(
        self,
        assignment: Assignment,
        environ: Mapping[str, str],
        on_lost: Callable[[WorkerError, int], None] = lambda *_: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.platform = assignment.kind
        self.process_index = assignment.process_index
        self.devices = assignment.devices()
        self.waits = self.holdups = 0
        self._cores = {device.index: assignment.cores[n] for n, device in enumerate(self._local())}
        self._on_lost = on_lost
        self._on_close = on_close
        self._next = 1
        self._counting = threading.Lock()
        self._sequences = itertools.count(1)
        # Held by whoever sends a message in pieces, so that nothing comes between them.
        self._sending = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._running: dict[int, _Running] = {}
        self._idle_since = time.monotonic()
        self._released: list[int] = []
        self._dropped: deque[int] = deque()
        self._room = threading.Semaphore(IN_FLIGHT)
        self._changed = threading.Condition()
        self._attached: Future[None] = Future()
        self._error: PjrtError | None = None
        self._is_closing = False
        self._outbox = Outbox(self._releases)
        self._channel = WorkerChannel(assignment.address, environ)
        attach = pb.Attach(protocol=PROTOCOL, job=assignment.job, cores=assignment.cores, ordinal=assignment.ordinal)
        self._call = self._channel.session(self._commands(attach))
        self._reader = threading.Thread(target=self._read, name="polyxla-answers", daemon=True)
        self._reader.start()
        try:
            self._attached.result(ATTACH_S)
        except BaseException:
            self._call.cancel()
            self._channel.close()
            raise

    def _local(self) -> list[EngineDevice]:
        return [device for device in self.devices if device.is_local]

    def _commands(self, attach: pb.Attach) -> Iterator[list[Any]]:
        yield [pb.Command(attach=attach)]
        while (commands := self._outbox.take()) is not None:
            yield commands

    def _releases(self) -> pb.Command | None:
        if not self._released and not self._dropped:
            return None
        # Swapped as a whole: other threads go on adding to the new ones.
        arrays, self._released = self._released, []
        programs = [self._dropped.popleft() for _ in range(len(self._dropped))]
        return pb.Command(release=pb.Release(arrays=arrays, programs=programs))

    def _send(self, commands: Iterable[tuple[pb.Command | bulk_encoding.Bulk, int]]) -> None:
        """Queue commands together, each with the bytes of its data."""
        with self._sending:
            for command, size in commands:
                if not self._outbox.put(command, size):
                    raise self._error or PjrtError(Code.UNAVAILABLE, "this process has left the worker")

    def _read(self) -> None:
        try:
            for answers in self._call:
                for answer in answers.answers:
                    self._heed(answer)
            error = None
        except grpc.RpcError as broken:
            error = broken
        if not self._attached.done():
            found = self._channel.explain(error) if error else _ended(self._channel, "it ended the session")
            self._attached.set_exception(found)
        elif not self._is_closing and self._error is None:
            gone = lost(self._channel, error) if error else _ended(self._channel, "it ended the session")
            self._lose(Code.UNAVAILABLE, gone)

    def _heed(self, answer: pb.Answer) -> None:
        match answer.WhichOneof("kind"):
            case "executed":
                self._room.release()
                with self._changed:
                    done = self._running.pop(answer.executed.sequence).done
                    if not self._running:
                        self._idle_since = time.monotonic()
                        self._changed.notify_all()
                if answer.executed.HasField("failure"):
                    done.set_exception(_error(answer.executed.failure))
                else:
                    done.set_result(None)
            case "part":
                request = self._requests[answer.part.request]
                if request.take(answer.part):
                    del self._requests[answer.part.request]
            case "attached":
                self._attached.set_result(None)
            case "ended" if not self._is_closing:
                failure = answer.ended.failure
                self._lose(failure.code, _ended(self._channel, failure.message))

    def _lose(self, code: int, error: WorkerError) -> None:
        """Break every promise: there will be no more answers."""
        self._error = PjrtError(code, str(error))
        self._outbox.cut()
        with self._changed:
            running, self._running = list(self._running.values()), {}
            self._changed.notify_all()
        for one in running:
            one.done.set_exception(self._error)
        for request in list(self._requests.values()):
            request.fail(self._error)
        for _ in range(IN_FLIGHT):
            self._room.release()
        self._on_lost(error, code)

    def _ask(self, expected: int = 0) -> tuple[int, Future[memoryview]]:
        """Number a request that the worker answers, with so many bytes, if that is known."""
        number = self._numbered(1)
        request = self._requests[number] = _Request(expected)
        return number, request.done

    def _wait(self, answer: Future[memoryview]) -> memoryview:
        self.waits += 1
        # A worker that is gone breaks the promise, so this ends.
        return answer.result()

    def compile(self, hlo_module: bytes, options: bytes) -> Executable:
        """Have the worker compile; it does so once for all replicas."""
        number, answer = self._ask()
        pieces = [
            pb.Compile(request=number, hlo=bytes(piece), ends=ends)
            for piece, ends in chunks(memoryview(hlo_module))
        ]
        pieces[0].options = options
        self._send((pb.Command(compile=piece), len(piece.hlo)) for piece in pieces)
        message = pb.Program.FromString(bytes(self._wait(answer)))
        executable = Executable(
            name=message.name,
            outputs=tuple(ArrayType(one.dtype, tuple(one.dims)) for one in message.results),
            num_replicas=message.replicas,
            optimized_hlo=message.optimized_hlo,
            code_size_bytes=message.code_size_bytes,
            fingerprint=message.fingerprint,
            native={
                "program": message.program,
                "donated": hlo.donated(message.optimized_hlo),
                "collectives": hlo.collectives(message.optimized_hlo),
                "source": (hlo_module, options),
            },
        )
        weakref.finalize(executable, self._dropped.append, message.program).atexit = False
        return executable

    def execute(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int] = frozenset(),
    ) -> list[Buffer]:
        """Queue an execution; waits only where too many are ahead of what is done."""
        for number, argument in enumerate(arguments):
            if argument.is_deleted:
                raise PjrtError(Code.INVALID_ARGUMENT, f"argument {number} was given up: {argument.type}")
        if not self._room.acquire(blocking=False):
            self.holdups += 1
            self._room.acquire()
        sequence = next(self._sequences)
        done: Future[None] = Future()
        collectives = executable.native["collectives"]
        with self._changed:
            self._running[sequence] = _Running(done, executable.name, collectives, time.monotonic())
        first = self._numbered(len(executable.outputs))
        outputs: list[Buffer] = [
            RemoteBuffer(type_, device, GroupedFuture(done), number=number)
            for number, type_ in enumerate(executable.outputs, first)
        ]
        wish = pb.Execute(
            sequence=sequence,
            program=executable.native["program"],
            core=self._cores[device.index],
            arguments=[_number(argument) for argument in arguments],
            first_result=first,
            keep=sorted(keep),
        )
        try:
            self._send([(pb.Command(execute=wish), 8 * len(wish.arguments))])
        except PjrtError:
            with self._changed:
                self._running.pop(sequence, None)
            raise
        for number in executable.native["donated"] - keep:
            arguments[number].give_up("was given to a program for its results")
        return outputs

    def _numbered(self, count: int) -> int:
        """Return the first of so many new numbers in a row."""
        with self._counting:
            first, self._next = self._next, self._next + count
        return first

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Queue the array's bytes; waits only where too many are queued already."""
        number = self._numbered(1)

        def pieces() -> Iterator[tuple[pb.Command | bulk_encoding.Bulk, int]]:
            announced: pb.ArrayType | None = pb.ArrayType(dtype=type_.dtype, dims=type_.dims)
            core = self._cores[device.index]
            for piece, ends in chunks(data):
                head = pb.Upload(array=number, type=announced, core=core, ends=ends)
                # A copy: the caller's memory is only lent.
                yield bulk_encoding.upload(head, bytes(piece)), len(piece)
                announced = None

        self._send(pieces())
        return RemoteBuffer(type_, device, CompletedFuture(), number=number)

    def to_host(self, buffer: Buffer) -> Future[memoryview]:
        """Ask for an array's bytes."""
        if buffer.is_deleted:
            broken: Future[memoryview] = Future()
            broken.set_exception(DeletedFuture("was given up", buffer.type).exception())
            return broken
        number, answer = self._ask(array_bytes(width(buffer.type.dtype), buffer.type.dims))
        self.waits += 1
        self._send([(pb.Command(download=pb.Download(request=number, array=_number(buffer))), 0)])
        return answer

    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Have the worker copy."""
        number = self._numbered(1)
        wish = pb.Copy(array=number, source=_number(buffer), core=self._cores[device.index])
        self._send([(pb.Command(copy=wish), 0)])
        return RemoteBuffer(buffer.type, device, CompletedFuture(), number=number)

    def delete(self, buffer: Buffer) -> None:
        """Let the worker free the array, together with others, after what is queued."""
        assert isinstance(buffer, RemoteBuffer)
        if not buffer.is_released:
            buffer.is_released = True
            buffer.give_up("was deleted")
            self._released.append(buffer.number)
            if len(self._released) >= MANY_RELEASES:
                # Where the queue is never empty they would wait for ever.
                self._send([(command, 0)] if (command := self._releases()) else [])

    def serialize(self, executable: Executable) -> bytes:
        """Return the program as it was before it was compiled: only the worker has what it made of it."""
        hlo_module, options = executable.native["source"]
        return pb.Compile(options=options, hlo=hlo_module).SerializeToString()

    def deserialize(self, data: bytes) -> Executable:
        """Have the worker compile the program again, or find it among those it has."""
        try:
            source = pb.Compile.FromString(data)
        except Exception as error:
            raise PjrtError(Code.INVALID_ARGUMENT, f"this is no program of a TPU node: {error}") from error
        return self.compile(source.hlo, source.options)

    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Ask the worker what the core's arrays take."""
        number, answer = self._ask()
        wish = pb.Stats(request=number, core=self._cores[device.index])
        self._send([(pb.Command(stats=wish), 0)])
        return dict(pb.Memory.FromString(bytes(self._wait(answer))).bytes)

    def activities(self) -> list[DeviceActivity]:
        """Return what the oldest program is that is not done, and since when it was sent or nothing is."""
        with self._changed:
            running = next(iter(self._running.values()), None)
        device = self._local()[0].index
        if running is None:
            return [DeviceActivity(device, None, (), time.monotonic() - self._idle_since)]
        return [DeviceActivity(device, running.program, running.collectives, time.monotonic() - running.since)]

    def finish(self, timeout_s: float) -> bool:
        """Wait until every program that was sent is done."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def close(self) -> None:
        """Say goodbye, and wait for the worker to have heard it."""
        self._is_closing = True
        self._outbox.put(pb.Command(goodbye=pb.Goodbye()), may_wait=False)
        self._outbox.close()
        self._reader.join(GOODBYE_S)
        self._call.cancel()
        self._channel.close()
        # A thread that is inside gRPC when Python ends would end the process with a crash.
        self._reader.join(GOODBYE_S)
        self._on_close()


class _Request:
    """An answer that is awaited, which arrives in pieces."""

    def __init__(self, expected: int) -> None:
        self.done: Future[memoryview] = Future()
        # Room for all of it, not filled with zeros first.
        self._data = memoryview(np.empty(expected, np.uint8).data)
        self._filled = 0

    def take(self, part: pb.Part) -> bool:
        """Add a piece; return whether it was the last."""
        if part.HasField("failure"):
            self.done.set_exception(_error(part.failure))
            return True
        data = part.data
        if part.ends and not self._filled:
            self.done.set_result(memoryview(data))
            return True
        end = self._filled + len(data)
        if end > len(self._data):
            # An answer whose length is not known before.
            self._data = memoryview(
                bytearray(self._data[: self._filled]) + bytearray(max(end, 2 * len(data)))
            )
        self._data[self._filled : end] = data
        self._filled = end
        if part.ends:
            self.done.set_result(self._data[:end])
        return part.ends

    def fail(self, error: PjrtError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def _number(buffer: Buffer) -> int:
    assert isinstance(buffer, RemoteBuffer)
    return buffer.number


def _error(failure: pb.Failure) -> PjrtError:
    return PjrtError(failure.code, failure.message)


def _ended(channel: WorkerChannel, why: str) -> WorkerLostError:
    return WorkerLostError(
        f"{channel.where} ended the job: {why}",
        where=channel.address,
        fix="See the output of the other replicas, and the worker's log.",
    )
