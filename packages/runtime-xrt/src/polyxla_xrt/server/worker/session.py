"""The session of one client process: its arrays and programs, and its commands.

The client numbers its arrays and programs, and these numbers are looked up in its own session only: no client
can name another's arrays.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, overload

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.engine import Buffer, Engine, EngineDevice
from polyxla_bridge.engine.futures import completion_of, when_all_are_done
from polyxla_bridge.errors import PjrtError, as_pjrt_error
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.compile_request import without_texts
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.channels import chunks
from polyxla_xrt.protocol.worker import MAX_PROGRAM_BYTES
from polyxla_xrt.server.worker.incoming_array import IncomingArray, MisuseError, array_type, size_of

MAX_FAILURE_CHARS = 16_384
"""Maximum length of a failure's text: compiler errors have any length, and answers share messages."""

Send = Callable[[pb.Answer | bulk_encoding.BulkMessage, int], object]
"""Queues an answer with the size of its data; blocks while the outbox is full. False: the client has gone."""


@dataclass
class _SessionArray:
    """An array of the session, and its size in the job's memory budget."""

    buffer: Buffer
    size: int


@dataclass
class _IncomingProgram:
    """A program whose chunks are arriving."""

    request: int
    options: bytes
    hlo: bytearray = field(default_factory=bytearray)


class Session:
    """Carries out the commands of one client.

    Threads: one reader thread calls `handle`, in the order of the commands, and must never wait for the
    device: later commands, such as another core's half of a collective, may be what the device waits for. So
    uploads and executions are only queued at the engine, and compilations run on `compilers`. Answers come
    from the reader, from compiler threads and from the engine's threads (callbacks of futures); `send` is
    thread-safe. `close` may run on another thread beside a command of the reader, which then frees what that
    command has added. `_programs` is also written by the compiler threads, one key at a time.

    A failed command leaves broken arrays in place of its results: the client has already queued commands that
    use them, and each of these must fail with the same error instead of violating the protocol.

    Args:
        engine: the job's engine.
        cores: the cores that the client drives, numbered among those of the job.
        budget: the job's memory budget.
        compilers: runs compilations, which may wait for each other.
        send: queues answers.
        on_broken: receives the name and the error of a failed program that other replicas wait for.
    """

    def __init__(
        self,
        engine: Engine,
        cores: Sequence[int],
        budget: MemoryBudget,
        compilers: Executor,
        send: Send,
        on_broken: Callable[[str, BaseException], None],
    ) -> None:
        # The client numbers its cores among those of the job on this worker, in the order of the local
        # devices.
        self._local = [device for device in engine.devices if device.is_local]
        self._engine = engine
        self._devices = {core: self._local[core] for core in cores}
        self._budget = budget
        self._compilers = compilers
        self._send = send
        self._on_broken = on_broken
        self._arrays: dict[int, _SessionArray] = {}
        self._programs: dict[int, Executable] = {}
        self._is_closed = False
        self._taking = threading.Lock()
        self._incoming_array: IncomingArray | None = None
        self._incoming_program: _IncomingProgram | None = None
        self._handlers: dict[str, Callable[..., None]] = {
            "upload": self._upload,
            "execute": self._execute,
            "release": self._release,
            "download": self._download,
            "copy": self._copy,
            "compile": self._compile,
            "stats": self._stats,
        }

    def handle(self, command: pb.Command, data: memoryview | None = None) -> None:
        """Begin to carry out a command.

        Args:
            command: the command.
            data: the data of an upload; None if `command` has all of it.

        Raises:
            MisuseError: the command is invalid here.
        """
        kind = command.WhichOneof("kind")
        # The service itself handles Attach and Goodbye, so that a second Attach is a misuse here.
        handler = self._handlers.get(kind or "")
        if handler is None:
            raise MisuseError(f"a command of kind {kind!r} is not valid here")
        # Clients send releases whenever their queue is empty, even between the chunks of an array.
        if self._incoming_array and kind not in ("upload", "release"):
            raise MisuseError(f"{kind} came before the rest of array {self._incoming_array.array}")
        if self._incoming_program and kind not in ("compile", "release"):
            raise MisuseError(f"{kind} came before the rest of a program")
        try:
            if data is None:
                handler(getattr(command, kind))
            else:
                handler(getattr(command, kind), data)
        finally:
            if self._is_closed:
                self._free()

    def retire(self) -> None:
        """Record that the client will run no more programs, which other replicas must not wait for."""
        for device in self._devices.values():
            # A replica that waits for this device would hang otherwise: the watchdog reports a wait for a
            # replica that has returned.
            self._engine.retire(device.index)

    def close(self) -> None:
        """Free everything. May be called twice."""
        self._is_closed = True
        self._free()

    def _free(self) -> None:
        # The list is a copy, because the reader may still add the arrays of its last command.
        for number in list(self._arrays):
            self._forget(number)
        self._programs.clear()
        # An array that the budget refused was never counted.
        if (incoming := self._take_incoming()) and not incoming.problem:
            self._budget.give_back(incoming.size)
        self._incoming_program = None

    def _take_incoming(self) -> IncomingArray | None:
        """Return the array that is arriving, to one caller only, so that its memory is given back once."""
        with self._taking:
            incoming, self._incoming_array = self._incoming_array, None
        return incoming

    def _upload(self, chunk: pb.Upload, data: memoryview | None = None) -> None:
        if self._incoming_array is None:
            self._incoming_array = self._announced(chunk)
        incoming = self._incoming_array
        incoming.add(chunk, chunk.data if data is None else data)
        # `close` may have taken it.
        if chunk.ends and self._take_incoming():
            self._arrays[chunk.array] = self._arrived(incoming)

    def _announced(self, chunk: pb.Upload) -> IncomingArray:
        # The budget comes last: an array that one of the checks refuses must not stay counted.
        type_ = array_type(chunk.type)
        self._check_new(chunk.array)
        device = self._device(chunk.core)
        problem = self._budget.take(size_of(type_))
        return IncomingArray(chunk.array, type_, device, problem)

    def _arrived(self, incoming: IncomingArray) -> _SessionArray:
        if incoming.problem:
            error = PjrtError(Code.RESOURCE_EXHAUSTED, incoming.problem)
            return _SessionArray(_broken(incoming.type, incoming.device, error), 0)
        try:
            # The engine may keep the memory itself: `IncomingArray` has aligned it for use without a copy.
            held = self._engine.from_host(incoming.device, incoming.type, incoming.data)
            return _SessionArray(held, incoming.size)
        except Exception as error:
            # The budget has counted the array already. The size stays here, so that the release subtracts it.
            return _SessionArray(_broken(incoming.type, incoming.device, error), incoming.size)

    def _execute(self, request: pb.Execute) -> None:
        devices = [self._device(core) for core in request.cores]
        if not devices or len(request.arguments) % len(devices):
            count = len(request.arguments)
            raise MisuseError(f"an execution on {len(devices)} cores cannot have {count} arguments")
        # The types of the broken results come from the program. An unknown program has no known results, and
        # later uses of their numbers fail because these do not exist.
        program = self._programs.get(request.program)
        try:
            rows = self._run(request, devices)
        except PjrtError as error:
            # The client has queued commands that use these results already; see the class.
            types = program.outputs if program else ()
            rows = [
                [_SessionArray(_broken(type_, device, error), 0) for type_ in types] for device in devices
            ]
            self._report(request.sequence, program, error)
        else:
            # The results of a core complete together, so the first of each core is enough. Without results
            # there is nothing to wait for.
            parts = [completion_of(row[0].buffer.value) for row in rows if row]
            when_all_are_done(parts, lambda error: self._report(request.sequence, program, error))
        for number, result in enumerate(itertools.chain.from_iterable(rows), request.first_result):
            # A second array with the same number would replace the first, whose memory could then not be
            # freed.
            self._check_new(number)
            self._arrays[number] = result

    def _run(self, request: pb.Execute, devices: list[EngineDevice]) -> list[list[_SessionArray]]:
        """Queue an execution, and return the results of each device."""
        program = self._program(request.program)
        is_partitioned = program.num_partitions > 1
        # `execute_partitioned` assigns the rows to the local devices by their index, so the cores must be all
        # of them, in order.
        if devices != (self._local if is_partitioned else devices[:1]):
            raise PjrtError(
                Code.INVALID_ARGUMENT,
                f"{program.name} has {program.num_partitions} partitions: it cannot run on cores "
                f"{list(request.cores)} of this worker",
            )
        held = [self._array(number) for number in request.arguments]
        each = len(held) // len(devices)
        rows = [held[place * each : (place + 1) * each] for place in range(len(devices))]
        # PJRT compares sizes only, so a wrong array of the right size would give wrong numbers without an
        # error.
        for row in rows:
            program.check([array.buffer.type for array in row])
        sizes = [size_of(type_) for type_ in program.outputs]
        # The programs of a core run one after another, so the temporary arrays of a program are gone before
        # the next program needs the room.
        temporary = len(devices) * self._engine.temporary_bytes(program)
        self._take(len(devices) * sum(sizes) + temporary, program.name)
        self._budget.give_back(temporary)
        buffers, keep = [[array.buffer for array in row] for row in rows], frozenset(request.keep)
        with self._given_back_on_error(len(devices) * sum(sizes)):
            if is_partitioned:
                results = self._engine.execute_partitioned(program, buffers, keep)
            else:
                results = [self._engine.execute(program, devices[0], buffers[0], keep)]
        for array in held:
            # The entry itself stays until the client releases the number, as it does with every array.
            if array.buffer.is_deleted:
                # The array was donated: its memory now belongs to the results, which are counted.
                self._budget.give_back(array.size)
                array.size = 0
        return [[_SessionArray(*pair) for pair in zip(row, sizes, strict=True)] for row in results]

    def _take(self, size: int, what: str) -> None:
        if problem := self._budget.take(size):
            raise PjrtError(Code.RESOURCE_EXHAUSTED, f"out of memory for {what}: {problem}")

    @contextlib.contextmanager
    def _given_back_on_error(self, size: int) -> Iterator[None]:
        # The arrays of a command that the engine refuses do not exist, so no release would subtract them.
        try:
            yield
        except BaseException:
            self._budget.give_back(size)
            raise

    def _report(self, sequence: int, program: Executable | None, error: BaseException | None) -> None:
        why = failure(error)
        size = len(why.message) if why else 0
        self._send(pb.Answer(executed=pb.Executed(sequence=sequence, failure=why)), size)
        # The answer is queued before the job may end, so that this client gets the error of its own program.
        if error is not None and program is not None and self._is_awaited(program):
            self._on_broken(program.name, error)

    def _is_awaited(self, program: Executable) -> bool:
        """Return whether other processes wait for the program: one may drive all of its devices."""
        devices = program.num_replicas * program.num_partitions
        return devices > len(self._devices) and bool(hlo.collectives(program.optimized_hlo))

    def _release(self, request: pb.Release) -> None:
        for number in request.arrays:
            self._forget(number)
        for number in request.programs:
            self._programs.pop(number, None)

    def _forget(self, number: int) -> None:
        # A number without an array is not a misuse: an execution of an unknown program makes no results, and
        # the client releases their numbers all the same.
        held = self._arrays.pop(number, None)
        if held is not None:
            self._engine.delete(held.buffer)
            self._budget.give_back(held.size)

    def _download(self, request: pb.Download) -> None:
        try:
            reading = self._engine.to_host(self._array(request.array).buffer)
        except PjrtError as error:
            self._fail(request.request, error)
            return
        # The answer is sent by the thread that completes the value: the reader must not wait for the device.
        reading.add_done_callback(lambda done: self._answer_with(request.request, done))

    def _copy(self, request: pb.Copy) -> None:
        self._check_new(request.array)
        device = self._device(request.core)
        # The type of an unknown source is unknown. Any type will do for a broken array, whose value is an
        # error.
        type_ = ArrayType("uint8", ())
        try:
            source = self._array(request.source).buffer
            type_ = source.type
            self._take(size_of(type_), "a copy")
            with self._given_back_on_error(size_of(type_)):
                copied = self._engine.copy(source, device)
            self._arrays[request.array] = _SessionArray(copied, size_of(type_))
        except PjrtError as error:
            self._arrays[request.array] = _SessionArray(_broken(type_, device, error), 0)

    def _compile(self, chunk: pb.Compile) -> None:
        if self._incoming_program is None:
            self._incoming_program = _IncomingProgram(chunk.request, chunk.options)
        incoming = self._incoming_program
        if chunk.request != incoming.request:
            raise MisuseError("a chunk of another program came amid a program")
        incoming.hlo += chunk.hlo
        # Every chunk is checked: a client that never ends its program must not fill the memory.
        if len(incoming.hlo) > MAX_PROGRAM_BYTES:
            raise MisuseError(f"a program has more than {MAX_PROGRAM_BYTES} bytes")
        if chunk.ends:
            self._incoming_program = None
            self._compilers.submit(self._compile_now, incoming)

    def _compile_now(self, incoming: _IncomingProgram) -> None:
        try:
            # A client could name files of this machine in the options: XLA would read and write them here.
            executable = self._engine.compile(bytes(incoming.hlo), without_texts(incoming.options))
            # The types are read from the program here, once, and not by the reader at the first execution.
            _ = executable.parameters
            # The number of the request also names the program, because the client draws both from one
            # counter.
            self._programs[incoming.request] = executable
        except Exception as error:
            self._fail(incoming.request, error)
            return
        program = pb.Program(
            program=incoming.request,
            name=executable.name,
            results=[pb.ArrayType(dtype=output.dtype, dims=output.dims) for output in executable.outputs],
            replicas=executable.num_replicas,
            optimized_hlo=executable.optimized_hlo,
            code_size_bytes=executable.code_size_bytes,
            fingerprint=executable.fingerprint,
            partitions=executable.num_partitions,
        )
        self._answer(incoming.request, memoryview(program.SerializeToString()))

    def _stats(self, request: pb.Stats) -> None:
        memory = pb.Memory(bytes=self._engine.memory_stats(self._device(request.core)))
        self._answer(request.request, memoryview(memory.SerializeToString()))

    def _answer_with(self, request: int, done: Future[memoryview]) -> None:
        error = done.exception()
        if error is not None:
            self._fail(request, error)
        else:
            self._answer(request, done.result())

    def _answer(self, request: int, data: memoryview) -> None:
        for chunk, ends in chunks(data):
            # The client has gone, and the remaining chunks of a large array would be encoded for no reader.
            if not self._send(bulk_encoding.part(pb.Part(request=request, ends=ends), chunk), len(chunk)):
                return

    def _fail(self, request: int, error: BaseException) -> None:
        why = failure(error)
        self._send(pb.Answer(part=pb.Part(request=request, ends=True, failure=why)), len(why.message))

    def _device(self, core: int) -> EngineDevice:
        # A client knows its own cores, so another core is a misuse and not an error of the program.
        if core not in self._devices:
            raise MisuseError(f"core {core} is not one of this session's, {sorted(self._devices)}")
        return self._devices[core]

    def _array(self, number: int) -> _SessionArray:
        if number not in self._arrays:
            # This is an error of the command and not a misuse: the array may be the result of a command that
            # failed.
            raise PjrtError(Code.NOT_FOUND, f"this session has no array {number}")
        return self._arrays[number]

    def _program(self, number: int) -> Executable:
        if number not in self._programs:
            raise PjrtError(Code.NOT_FOUND, f"this session has no program {number}")
        return self._programs[number]

    def _check_new(self, number: int) -> None:
        if number in self._arrays:
            raise MisuseError(f"array {number} already exists")


@overload
def failure(error: BaseException) -> pb.Failure: ...
@overload
def failure(error: BaseException | None) -> pb.Failure | None: ...
def failure(error: BaseException | None) -> pb.Failure | None:
    """Return the message of an error; None for no error."""
    if error is None:
        return None
    known = as_pjrt_error(error)
    return pb.Failure(code=known.code, message=known.message[:MAX_FAILURE_CHARS])


def _broken(type_: ArrayType, device: EngineDevice, error: BaseException) -> Buffer:
    value: Future[Any] = Future()
    value.set_exception(error)
    return Buffer(type_, device, value)


class MemoryBudget:
    """Counts the bytes of a job's arrays in all its sessions. Thread-safe.

    Args:
        limit_bytes: the limit.
        job: the owner of the job, for messages.

    Attributes:
        held_bytes: the size of the job's arrays.
    """

    def __init__(self, limit_bytes: int, job: str) -> None:
        self._limit_bytes = limit_bytes
        self._job = job
        self._lock = threading.Lock()
        self.held_bytes = 0

    def take(self, size: int) -> str | None:
        """Count an array, or return why it exceeds the limit."""
        # The check and the count are one step: two sessions of a job must not both take the last bytes.
        with self._lock:
            if self.held_bytes + size > self._limit_bytes:
                limit, held, more = (number / 2**20 for number in (self._limit_bytes, self.held_bytes, size))
                return (
                    f"the job of {self._job} may hold {limit:,.0f} MiB of this worker's memory, holds "
                    f"{held:,.0f} MiB, and requests {more:,.1f} MiB more"
                )
            self.held_bytes += size
        return None

    def give_back(self, size: int) -> None:
        """Remove an array from the count."""
        with self._lock:
            self.held_bytes -= size
