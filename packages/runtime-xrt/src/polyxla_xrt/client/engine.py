"""`RemoteEngine`: the bridge's engine, whose devices are cores of a worker.

Only requests with an answer wait for the worker: compilations, downloads and statistics. Everything else is
queued and sent in order; its errors come back on the same stream and surface when an array is read.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeAlias

import grpc
import numpy as np

from polyxla_bridge.abi import Code, width
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, DeviceActivity, Engine, EngineDevice
from polyxla_bridge.engine.futures import CompletedFuture, DeletedFuture, GroupedFuture
from polyxla_bridge.env import Coordinates
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.client.lease import lost
from polyxla_xrt.client.pending_answer import PendingAnswer
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.errors import WorkerError, WorkerLostError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.channels import CHUNK_BYTES, chunks
from polyxla_xrt.protocol.outbox import Outbox
from polyxla_xrt.protocol.worker import PROTOCOL, array_bytes

MAX_IN_FLIGHT = 64
"""Maximum executions in flight: hides latency, bounds memory."""
ATTACH_S = 120.0
"""Longest wait for the worker to accept the session, in seconds: its engine may be starting."""
MAX_RELEASES = 1024
"""Maximum number of arrays that wait to be freed together."""
GOODBYE_S = 5.0
"""Longest wait for the end of the session, in seconds."""
_Commands: TypeAlias = Iterable[tuple[pb.Command | bulk_encoding.BulkMessage, int]]
"""Commands, each with the size of its data."""


@dataclass
class RemoteBuffer(Buffer):
    """An array on a worker.

    Attributes:
        number: its number, chosen by the client and unique in the session.
        is_released: whether it is queued to be freed on the worker.
    """

    number: int = 0
    is_released: bool = False

    # A plain `Buffer` never reached the worker: the bridge makes it when `from_host` fails. Its value is the
    # error, and everything computed from it gets the same error.


@dataclass(frozen=True)
class _Execution:
    """An execution in flight."""

    done: Future[None]
    program: str
    collectives: tuple[str, ...]
    since: float


class RemoteEngine(Engine):
    """Cores of a worker, behind a network connection.

    Threads: any thread may call the methods, which queue commands in `_outbox`. A thread of gRPC takes them
    from there and sends them (`_commands`). One reader thread handles all answers (`_read`) and completes the
    futures, so callbacks of these futures run on it and must not wait for another answer.

    Locks: `_sending` keeps the chunks of one message together; `_counting` guards the numbers of arrays and
    requests; `_changed` guards `_in_flight` and wakes `finish`. None is held while waiting for an answer.
    `_sending` may be held while the outbox blocks for room (backpressure): the sender makes that room and
    needs none of these locks.

    Args:
        assignment: the worker, the job, and this process's cores.
        environ: the environment to connect with.
        on_lost: receives, once, the error and the status code if the worker is gone or has ended the job.
        on_close: called at the end of `close`.

    Attributes:
        waits: how many times this process has waited for an answer.
        holdups: how many times it has waited because `MAX_IN_FLIGHT` executions were in flight.

    Raises:
        WorkerError: the worker refuses this process.
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
        self.devices = _devices(assignment)
        self.waits = self.holdups = 0
        self._cores = {device.index: assignment.cores[n] for n, device in enumerate(self._local())}
        self._on_lost = on_lost
        self._on_close = on_close
        # Arrays and requests share one counter, and the number of a compilation also names its program.
        self._next = 1
        self._counting = threading.Lock()
        self._sequences = itertools.count(1)
        self._sending = threading.Lock()
        self._requests: dict[int, PendingAnswer] = {}
        self._in_flight: dict[int, _Execution] = {}
        self._idle_since = time.monotonic()
        self._released: list[int] = []
        self._dropped: deque[int] = deque()
        self._room = threading.Semaphore(MAX_IN_FLIGHT)
        self._changed = threading.Condition()
        self._attached: Future[None] = Future()
        self._error: PjrtError | None = None
        self._is_closing = False
        self._outbox = Outbox(self._releases)
        self._channel = WorkerChannel(assignment.address, environ)
        attach = pb.Attach(
            protocol=PROTOCOL, job=assignment.job, cores=assignment.cores, ordinal=assignment.ordinal
        )
        self._call = self._channel.session(self._commands(attach))
        self._reader = threading.Thread(target=self._read, name="polyxla-answers", daemon=True)
        self._reader.start()
        try:
            # This wait is longer than that of the worker for its engine, so that the reason of the worker
            # comes first.
            self._attached.result(ATTACH_S)
        except BaseException:
            # This covers Ctrl-C as well: the worker would regard an open stream as a process that drives the
            # cores. The outbox ends first, because gRPC's thread would wait for its commands for ever.
            self._outbox.cut()
            self._call.cancel()
            self._channel.close()
            raise

    def _local(self) -> list[EngineDevice]:
        return [device for device in self.devices if device.is_local]

    def _commands(self, attach: pb.Attach) -> Iterator[bytes]:
        """Yield commands to send. gRPC's thread iterates, the only one that takes from the outbox."""
        yield bulk_encoding.encode([pb.Command(attach=attach)])
        yield from bulk_encoding.encode_all(self._outbox.take)

    def _releases(self) -> pb.Command | None:
        """Return one command that frees everything released so far, or None."""
        if not self._released and not self._dropped:
            return None
        # The list is swapped as a whole, and the deque is popped, because other threads append to them
        # without a lock, and so do finalizers, which may run at any instruction.
        arrays, self._released = self._released, []
        programs = [self._dropped.popleft() for _ in range(len(self._dropped))]
        return pb.Command(release=pb.Release(arrays=arrays, programs=programs))

    def _send(self, commands: _Commands) -> None:
        """Queue commands without others in between."""
        with self._sending:
            for command, size in commands:
                if not self._outbox.put(command, size):
                    raise self._error or PjrtError(Code.UNAVAILABLE, "this process has left the worker")

    def _read(self) -> None:
        """Handle answers until the stream ends. Runs on the reader thread."""
        try:
            for answers in self._call:
                for answer, data in answers:
                    self._handle(answer, data)
            error = None
        except grpc.RpcError as broken:
            error = broken
        if not self._attached.done():
            found = self._channel.explain(error) if error else _ended(self._channel, "it ended the session")
            self._attached.set_exception(found)
        # The stream also ends after the goodbye, and after `_lose` has reported the end of the job.
        elif not self._is_closing and self._error is None:
            gone = lost(self._channel, error) if error else _ended(self._channel, "it ended the session")
            self._lose(Code.UNAVAILABLE, gone)

    def _handle(self, answer: pb.Answer, data: memoryview | None) -> None:
        match answer.WhichOneof("kind"):
            case "executed":
                # The callbacks below may queue the next execution, which needs this room.
                self._room.release()
                with self._changed:
                    done = self._in_flight.pop(answer.executed.sequence).done
                    if not self._in_flight:
                        self._idle_since = time.monotonic()
                        self._changed.notify_all()
                # This is outside of the lock: callbacks of the future run here, and may call this engine.
                if answer.executed.HasField("failure"):
                    done.set_exception(_error(answer.executed.failure))
                else:
                    done.set_result(None)
            case "part":
                request = self._requests[answer.part.request]
                if request.add(answer.part, data):
                    del self._requests[answer.part.request]
            case "attached":
                self._attached.set_result(None)
            # A process that has said goodbye must not fail because another process dies after it.
            case "ended" if not self._is_closing:
                failure = answer.ended.failure
                self._lose(failure.code, _ended(self._channel, failure.message))

    def _lose(self, code: int, error: WorkerError) -> None:
        """Fail every future: there will be no more answers. Runs on the reader thread.

        The order matters. `on_lost` comes first: it must know the cause before the program fails of it.
        `_error` is set before the outbox is cut, because `_send` raises it when `put` fails. The semaphore is
        released last: threads that wait for room then fail in `_send` as well.
        """
        self._on_lost(error, code)
        self._error = PjrtError(code, str(error))
        self._outbox.cut()
        with self._changed:
            in_flight, self._in_flight = list(self._in_flight.values()), {}
            self._changed.notify_all()
        # This is outside of the lock: callbacks of the futures may call this engine.
        for answer in in_flight:
            answer.done.set_exception(self._error)
        for request in list(self._requests.values()):
            request.fail(self._error)
        for _ in range(MAX_IN_FLIGHT):
            self._room.release()

    def _ask(
        self, commands: Callable[[int], _Commands], into: memoryview | None = None
    ) -> Future[memoryview]:
        """Send a request; return its answer, for which `into` has as much memory.

        Args:
            commands: returns the commands of the request with this number.
            into: gets the answer.
        """
        number = self._new_numbers(1)
        # It is registered before it is sent, because the reader may get its answer at once.
        request = self._requests[number] = PendingAnswer(into)
        try:
            self._send(commands(number))
        except BaseException:
            # Nobody will answer it, and `close` waits for every request that is left.
            self._requests.pop(number, None)
            raise
        return request.done

    def _wait(self, answer: Future[memoryview]) -> memoryview:
        self.waits += 1
        # The wait ends in any case: `_lose` fails the future if the worker goes away.
        return answer.result()

    def compile(self, hlo_module: bytes, options: bytes) -> Executable:
        """Compile on the worker, which does so once for all replicas."""

        def compilation(number: int) -> _Commands:
            messages = [
                pb.Compile(request=number, hlo=bytes(chunk), ends=ends) for chunk, ends in chunks(hlo_module)
            ]
            messages[0].options = options
            return [(pb.Command(compile=message), len(message.hlo)) for message in messages]

        message = pb.Program.FromString(bytes(self._wait(self._ask(compilation))))
        executable = Executable(
            name=message.name,
            outputs=tuple(ArrayType(result.dtype, tuple(result.dims)) for result in message.results),
            num_replicas=message.replicas,
            optimized_hlo=message.optimized_hlo,
            code_size_bytes=message.code_size_bytes,
            fingerprint=message.fingerprint,
            num_partitions=message.partitions,
            native={
                "program": message.program,
                "donated": hlo.donated(message.optimized_hlo),
                "collectives": hlo.collectives(message.optimized_hlo),
                "source": (hlo_module, options),
            },
        )
        # At exit the session ends, and with it all of its programs.
        weakref.finalize(executable, self._dropped.append, message.program).atexit = False
        return executable

    def execute(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int] = frozenset(),
    ) -> list[Buffer]:
        """Queue an execution; blocks only while `MAX_IN_FLIGHT` executions are in flight."""
        return self._execute(executable, [device], [arguments], keep)[0]

    def execute_partitioned(
        self,
        executable: Executable,
        arguments: Sequence[Sequence[Buffer]],
        keep: frozenset[int] = frozenset(),
    ) -> list[list[Buffer]]:
        """Queue one execution on all cores of this process; blocks as `execute` does."""
        return self._execute(executable, self._local(), arguments, keep)

    def _execute(
        self,
        executable: Executable,
        devices: Sequence[EngineDevice],
        rows: Sequence[Sequence[Buffer]],
        keep: frozenset[int],
    ) -> list[list[Buffer]]:
        # The check comes before anything is registered: a refused execution must leave no trace.
        for number, argument in (place for row in rows for place in enumerate(row)):
            if argument.is_deleted:
                raise PjrtError(Code.INVALID_ARGUMENT, f"argument {number} was given up: {argument.type}")
        # An argument that never reached the worker fails the execution here: the worker does not know its
        # number.
        if lost := [argument for row in rows for argument in row if not isinstance(argument, RemoteBuffer)]:
            return [
                [Buffer(type_, device, lost[0].value) for type_ in executable.outputs] for device in devices
            ]
        if not self._room.acquire(blocking=False):
            self.holdups += 1
            self._room.acquire()
        sequence = next(self._sequences)
        done: Future[None] = Future()
        collectives = executable.native["collectives"]
        with self._changed:
            # It is registered before it is sent, because the reader may get its answer at once.
            self._in_flight[sequence] = _Execution(done, executable.name, collectives, time.monotonic())
        first = self._new_numbers(len(devices) * len(executable.outputs))
        numbers = itertools.count(first)
        outputs: list[list[Buffer]] = [
            [
                RemoteBuffer(type_, device, GroupedFuture(done), number=next(numbers))
                for type_ in executable.outputs
            ]
            for device in devices
        ]
        request = pb.Execute(
            sequence=sequence,
            program=executable.native["program"],
            cores=[self._cores[device.index] for device in devices],
            arguments=[_number(argument) for row in rows for argument in row],
            first_result=first,
            keep=sorted(keep),
        )
        try:
            self._send([(pb.Command(execute=request), 8 * len(request.arguments))])
        except PjrtError:
            with self._changed:
                # `_lose` may have taken it out already.
                self._in_flight.pop(sequence, None)
            # Otherwise, calls that fail would use up the room, and the next one would wait for ever.
            self._room.release()
            raise
        for row in rows:
            # Only an execution that was sent takes its arguments: after a failure to send, they stay valid.
            for number in executable.native["donated"] - keep:
                row[number].give_up("was donated to a program")
        return outputs

    def _new_numbers(self, count: int) -> int:
        """Reserve `count` consecutive numbers and return the first."""
        with self._counting:
            first, self._next = self._next, self._next + count
        return first

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Queue the array's bytes; blocks only while the outbox is full."""
        number = self._new_numbers(1)

        def uploads() -> _Commands:
            announced: pb.ArrayType | None = pb.ArrayType(dtype=type_.dtype, dims=type_.dims)
            core = self._cores[device.index]
            for chunk, ends in chunks(data):
                head = pb.Upload(array=number, type=announced, core=core, ends=ends)
                yield bulk_encoding.upload(head, chunk), len(chunk)
                # The worker knows the type from the first chunk.
                announced = None

        self._send(uploads())
        # The future is complete although the worker may still fail: that error comes when the array is read.
        return RemoteBuffer(type_, device, CompletedFuture(), number=number)

    def to_host(self, buffer: Buffer, into: memoryview | None = None) -> Future[memoryview]:
        """Request an array's bytes."""
        if buffer.is_deleted or not isinstance(buffer, RemoteBuffer):
            why = DeletedFuture("was given up", buffer.type) if buffer.is_deleted else buffer.value
            broken: Future[memoryview] = Future()
            broken.set_exception(why.exception())
            return broken
        size = array_bytes(width(buffer.type.dtype), buffer.type.dims)
        if into is None and size > CHUNK_BYTES:
            # The memory is allocated once and not filled with zeros. An answer of one chunk is used as it
            # arrives.
            into = memoryview(np.empty(size, np.uint8).data)
        array = _number(buffer)
        self.waits += 1
        return self._ask(
            lambda number: [(pb.Command(download=pb.Download(request=number, array=array)), 0)], into
        )

    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Copy on the worker."""
        if not isinstance(buffer, RemoteBuffer):
            return Buffer(buffer.type, device, buffer.value)
        number = self._new_numbers(1)
        request = pb.Copy(array=number, source=_number(buffer), core=self._cores[device.index])
        self._send([(pb.Command(copy=request), 0)])
        return RemoteBuffer(buffer.type, device, CompletedFuture(), number=number)

    def delete(self, buffer: Buffer) -> None:
        """Free the array on the worker, together with others, after everything that is queued."""
        if not isinstance(buffer, RemoteBuffer):
            buffer.give_up("was deleted")
        # An array that was donated is released as well: the worker keeps its number until then.
        elif not buffer.is_released:
            buffer.is_released = True
            buffer.give_up("was deleted")
            self._released.append(buffer.number)
            if len(self._released) >= MAX_RELEASES:
                # The outbox sends releases only when it is empty, and a busy outbox never is.
                self._send([(command, 0)] if (command := self._releases()) else [])

    def serialize(self, executable: Executable) -> bytes:
        """Return the program before compilation: the compiled program exists only on the worker."""
        hlo_module, options = executable.native["source"]
        return pb.Compile(options=options, hlo=hlo_module).SerializeToString()

    def deserialize(self, data: bytes) -> Executable:
        """Compile the program on the worker again, which may find it in its cache."""
        try:
            source = pb.Compile.FromString(data)
        except Exception as error:
            raise PjrtError(Code.INVALID_ARGUMENT, f"not a program of a TPU node: {error}") from error
        return self.compile(source.hlo, source.options)

    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return the worker's statistics of a core's memory."""
        core = self._cores[device.index]
        answer = self._ask(lambda number: [(pb.Command(stats=pb.Stats(request=number, core=core)), 0)])
        return dict(pb.Memory.FromString(bytes(self._wait(answer))).bytes)

    def activities(self) -> list[DeviceActivity]:
        """Return the oldest execution in flight and since when it is, or since when the engine is idle."""
        with self._changed:
            # A dictionary keeps the order of entry, so the first execution is the oldest.
            oldest = next(iter(self._in_flight.values()), None)
        device = self._local()[0].index
        if oldest is None:
            return [DeviceActivity(device, None, (), time.monotonic() - self._idle_since)]
        return [DeviceActivity(device, oldest.program, oldest.collectives, time.monotonic() - oldest.since)]

    def finish(self, timeout_s: float) -> bool:
        """Wait until no execution is in flight; return whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, others_s: float = 0) -> None:
        """Wait for what was read, say goodbye, and wait until the worker has ended the session.

        A second call does nothing.
        """
        if self._is_closing:
            return
        # After the goodbye, the worker answers nothing.
        wait([request.done for request in list(self._requests.values())], min(timeout_s, GOODBYE_S))
        # From here on, the reader regards the end of the stream as the answer to the goodbye.
        self._is_closing = True
        # A full outbox must not delay the end of the process, whose worker may be gone.
        self._outbox.put(pb.Command(goodbye=pb.Goodbye()), may_wait=False)
        self._outbox.close()
        self._reader.join(GOODBYE_S)
        self._call.cancel()
        self._channel.close()
        # A thread inside gRPC while Python finalizes would crash the process.
        self._reader.join(GOODBYE_S)
        self._on_close()


def _number(buffer: Buffer) -> int:
    assert isinstance(buffer, RemoteBuffer)
    return buffer.number


def _devices(assignment: Assignment) -> tuple[EngineDevice, ...]:
    """Return every device of the job. All processes have equally many."""
    size, own, kind = assignment.world_size, assignment.process_index, f"{assignment.kind} core"
    each, is_tpu = size // assignment.process_count, assignment.kind == "TPU"
    places = (_place(index, size) if is_tpu else None for index in range(size))
    return tuple(
        EngineDevice(index, index // each, index // each == own, kind, place)
        for index, place in enumerate(places)
    )


def _place(index: int, size: int) -> Coordinates:
    """Return where a core of a TPU node is: x and y of its chip, and for z the core.

    A node is of v2 or v3: a square or a rectangle of chips with two cores each. For these, torch_xla's
    ``HybridMesh`` takes z for the core: cores at one place would overwrite each other in its mesh.
    """
    cores = 2 if size % 2 == 0 else 1
    chips = size // cores
    across = max(side for side in range(1, math.isqrt(chips) + 1) if chips % side == 0)
    chip, core = divmod(index, cores)
    return Coordinates(chip % across, chip // across, core, core)


def _error(failure: pb.Failure) -> PjrtError:
    return PjrtError(failure.code, failure.message)


def _ended(channel: WorkerChannel, why: str) -> WorkerLostError:
    return WorkerLostError(
        f"{channel.where} ended the job: {why}",
        where=channel.address,
        fix="See the output of the other replicas, and the worker's log.",
    )
