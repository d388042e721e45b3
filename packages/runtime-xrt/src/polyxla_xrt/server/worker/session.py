"""One process's session: its arrays and programs, and what it asks to be done with them.

Numbers are the client's own, and looked up in its own tables only: nobody can name what is another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from polyxla_bridge.abi import DTYPES, Code, width
from polyxla_bridge.engine.engine import Buffer, Engine, EngineDevice
from polyxla_bridge.engine.futures import completion_of
from polyxla_bridge.errors import PjrtError, as_pjrt_error
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.chunks import chunks
from polyxla_xrt.protocol.worker import PROGRAM_BYTES, array_bytes
from polyxla_xrt.server.worker.memory_budget import MemoryBudget

DIMENSIONS = 64
"""Most dimensions of an array: as many as numpy takes."""
FAILURE_CHARS = 16_384
"""Longest text of a failure; compilers' may be any length, and what gathers is sent in one message."""
_ARRAY_BYTES = 1 << 63
_NAME_CHARS = 40

Send = Callable[[pb.Answer | bulk_encoding.Bulk, int], object]
"""Queues an answer, and says how many bytes of data it has; waits where too many are queued."""


class MisuseError(Exception):
    """A client that does not follow the protocol; its session ends."""


@dataclass
class _Held:
    """An array that a client has, and how many bytes it is counted for."""

    buffer: Buffer
    size: int


@dataclass
class _Arriving:
    """An array whose pieces are arriving.

    Attributes:
        array: its number.
        type: what it will be.
        device: where to.
        data: room for all of it, or all of it where it comes in one piece; empty where there is a problem.
        filled: how much of it has come.
        size: how much there will be.
        problem: why it is not kept.
    """

    array: int
    type: ArrayType
    device: EngineDevice
    data: memoryview
    size: int
    problem: str | None
    filled: int = 0


@dataclass
class _Program:
    """A program on its way."""

    request: int
    options: bytes
    hlo: bytearray = field(default_factory=bytearray)


class Session:
    """Does what one client asks. `handle` is called by one thread, in the order of the commands.

    Args:
        engine: the job's.
        cores: the cores that the client drives, by their number on this worker.
        budget: the job's.
        compilers: runs compilations, which may wait for each other.
        send: queues answers.
        on_broken: told when a program failed that others wait for, which program, and why.
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
        local = [device for device in engine.devices if device.is_local]
        self._engine = engine
        self._devices = {core: local[core] for core in cores}
        self._budget = budget
        self._compilers = compilers
        self._send = send
        self._on_broken = on_broken
        self._arrays: dict[int, _Held] = {}
        self._programs: dict[int, Executable] = {}
        self._arriving: _Arriving | None = None
        self._compiling: _Program | None = None
        self._handlers: dict[str, Callable[[Any], None]] = {
            "upload": self._upload,
            "execute": self._execute,
            "release": self._release,
            "download": self._download,
            "copy": self._copy,
            "compile": self._compile,
            "stats": self._stats,
        }

    def handle(self, command: pb.Command) -> None:
        """Begin what a command asks for.

        Raises:
            MisuseError: it makes no sense here.
        """
        kind = command.WhichOneof("kind")
        handler = self._handlers.get(kind or "")
        if handler is None:
            raise MisuseError(f"a command of the kind {kind!r} has no place here")
        # Frees come when there is nothing else to send at the moment, so also between pieces.
        if self._arriving and kind not in ("upload", "release"):
            raise MisuseError(f"{kind} came where the rest of array {self._arriving.array} was to come")
        if self._compiling and kind not in ("compile", "release"):
            raise MisuseError(f"{kind} came where the rest of a program was to come")
        handler(getattr(command, kind))

    def close(self) -> None:
        """Let go of everything; nothing is handled any more."""
        for number in list(self._arrays):
            self._forget(number)
        self._programs.clear()
        if self._arriving and not self._arriving.problem:
            self._budget.give_back(self._arriving.size)
        self._arriving = self._compiling = None

    def _upload(self, piece: pb.Upload) -> None:
        if self._arriving is None:
            self._arriving = self._announced(piece)
        arriving = self._arriving
        if piece.array != arriving.array:
            raise MisuseError(f"a piece of array {piece.array} came in the middle of array {arriving.array}")
        # Once: protobuf copies it each time it is asked for.
        data = piece.data
        end = arriving.filled + len(data)
        if end > arriving.size or (piece.ends and end < arriving.size):
            raise MisuseError(f"array {piece.array} has {end} bytes and not {arriving.size}")
        if piece.ends and not arriving.filled:
            arriving.data = memoryview(data)
        elif not arriving.problem:
            arriving.data[arriving.filled : end] = data
        arriving.filled = end
        if piece.ends:
            self._arriving = None
            self._arrays[piece.array] = self._arrived(arriving)

    def _announced(self, piece: pb.Upload) -> _Arriving:
        type_ = _array_type(piece.type)
        self._check_new(piece.array)
        device = self._device(piece.core)
        size = _size(type_)
        problem = self._budget.take(size)
        # Of what comes in one piece, that piece is all; and room need not be filled with zeros first.
        room = 0 if problem or piece.ends else size
        data = memoryview(np.empty(room, np.uint8).data)
        return _Arriving(piece.array, type_, device, data, size, problem)

    def _arrived(self, arriving: _Arriving) -> _Held:
        if arriving.problem:
            error = PjrtError(Code.RESOURCE_EXHAUSTED, arriving.problem)
            return _Held(_broken(arriving.type, arriving.device, error), 0)
        try:
            held = self._engine.from_host(arriving.device, arriving.type, arriving.data)
            return _Held(held, arriving.size)
        except Exception as error:
            return _Held(_broken(arriving.type, arriving.device, error), arriving.size)

    def _execute(self, wish: pb.Execute) -> None:
        device = self._device(wish.core)
        try:
            outputs, sizes = self._run(wish, device)
        except PjrtError as error:
            # So that nothing that follows is the client's mistake: it cannot know yet.
            program = self._programs.get(wish.program)
            types = program.outputs if program else ()
            outputs, sizes = [_broken(type_, device, error) for type_ in types], [0] * len(types)
            self._report(wish.sequence, program, error)
        else:
            program = self._programs[wish.program]
            if outputs:
                completion_of(outputs[0].value).add_done_callback(
                    lambda done: self._report(wish.sequence, program, done.exception())
                )
            else:
                self._report(wish.sequence, program, None)
        for number, (buffer, size) in enumerate(zip(outputs, sizes, strict=True), wish.first_result):
            self._check_new(number)
            self._arrays[number] = _Held(buffer, size)

    def _run(self, wish: pb.Execute, device: EngineDevice) -> tuple[list[Buffer], list[int]]:
        program = self._program(wish.program)
        held = [self._array(number) for number in wish.arguments]
        types = tuple(one.buffer.type for one in held)
        if types != program.native["parameters"]:
            raise _wrong_types(program.name, program.native["parameters"], types)
        sizes = [_size(type_) for type_ in program.outputs]
        self._take(sum(sizes), program.name)
        outputs = self._engine.execute(program, device, [one.buffer for one in held], frozenset(wish.keep))
        for one in held:
            if one.buffer.is_deleted:
                # Its memory is the results' now, which are counted.
                self._budget.give_back(one.size)
                one.size = 0
        return outputs, sizes

    def _take(self, size: int, what: str) -> None:
        if problem := self._budget.take(size):
            raise PjrtError(Code.RESOURCE_EXHAUSTED, f"there is no room for {what}: {problem}")

    def _report(self, sequence: int, program: Executable | None, error: BaseException | None) -> None:
        why = failure(error)
        size = len(why.message) if why else 0
        self._send(pb.Answer(executed=pb.Executed(sequence=sequence, failure=why)), size)
        if error is not None and program is not None and program.native["collectives"]:
            self._on_broken(program.name, error)

    def _release(self, wish: pb.Release) -> None:
        for number in wish.arrays:
            self._forget(number)
        for number in wish.programs:
            self._programs.pop(number, None)

    def _forget(self, number: int) -> None:
        held = self._arrays.pop(number, None)
        if held is not None:
            self._engine.delete(held.buffer)
            self._budget.give_back(held.size)

    def _download(self, wish: pb.Download) -> None:
        try:
            reading = self._engine.to_host(self._array(wish.array).buffer)
        except PjrtError as error:
            self._fail(wish.request, error)
            return
        reading.add_done_callback(lambda done: self._answer_with(wish.request, done))

    def _copy(self, wish: pb.Copy) -> None:
        self._check_new(wish.array)
        device = self._device(wish.core)
        type_ = ArrayType("uint8", ())
        try:
            source = self._array(wish.source).buffer
            type_ = source.type
            self._take(_size(type_), "a copy")
            self._arrays[wish.array] = _Held(self._engine.copy(source, device), _size(type_))
        except PjrtError as error:
            self._arrays[wish.array] = _Held(_broken(type_, device, error), 0)

    def _compile(self, piece: pb.Compile) -> None:
        if self._compiling is None:
            self._compiling = _Program(piece.request, piece.options)
        arriving = self._compiling
        if piece.request != arriving.request:
            raise MisuseError("a piece of another program came in the middle of one")
        arriving.hlo += piece.hlo
        if len(arriving.hlo) > PROGRAM_BYTES:
            raise MisuseError(f"a program has more than {PROGRAM_BYTES} bytes")
        if piece.ends:
            self._compiling = None
            self._compilers.submit(self._compile_now, arriving)

    def _compile_now(self, arriving: _Program) -> None:
        try:
            executable = self._engine.compile(bytes(arriving.hlo), arriving.options)
            # Once for all the replicas that share it.
            if "parameters" not in executable.native:
                parameters = hlo.parameters(executable.optimized_hlo)
                executable.native["parameters"] = tuple(ArrayType(dtype, dims) for dtype, dims in parameters)
            # The request numbers the program: the client counts both together.
            self._programs[arriving.request] = executable
        except Exception as error:
            self._fail(arriving.request, error)
            return
        program = pb.Program(
            program=arriving.request,
            name=executable.name,
            results=[pb.ArrayType(dtype=one.dtype, dims=one.dims) for one in executable.outputs],
            replicas=executable.num_replicas,
            optimized_hlo=executable.optimized_hlo,
            code_size_bytes=executable.code_size_bytes,
            fingerprint=executable.fingerprint,
        )
        self._answer(arriving.request, memoryview(program.SerializeToString()))

    def _stats(self, wish: pb.Stats) -> None:
        memory = pb.Memory(bytes=self._engine.memory_stats(self._device(wish.core)))
        self._answer(wish.request, memoryview(memory.SerializeToString()))

    def _answer_with(self, request: int, done: Future[memoryview]) -> None:
        error = done.exception()
        if error is not None:
            self._fail(request, error)
        else:
            self._answer(request, done.result())

    def _answer(self, request: int, data: memoryview) -> None:
        for piece, ends in chunks(data):
            if not self._send(bulk_encoding.part(pb.Part(request=request, ends=ends), piece), len(piece)):
                return

    def _fail(self, request: int, error: BaseException) -> None:
        why = failure(error)
        self._send(pb.Answer(part=pb.Part(request=request, ends=True, failure=why)), len(why.message))

    def _device(self, core: int) -> EngineDevice:
        if core not in self._devices:
            raise MisuseError(f"core {core} is not one of this session's, {sorted(self._devices)}")
        return self._devices[core]

    def _array(self, number: int) -> _Held:
        if number not in self._arrays:
            raise PjrtError(Code.NOT_FOUND, f"this session has no array {number}")
        return self._arrays[number]

    def _program(self, number: int) -> Executable:
        if number not in self._programs:
            raise PjrtError(Code.NOT_FOUND, f"this session has no program {number}")
        return self._programs[number]

    def _check_new(self, number: int) -> None:
        if number in self._arrays:
            raise MisuseError(f"there is an array {number} already")


@overload
def failure(error: BaseException) -> pb.Failure: ...
@overload
def failure(error: BaseException | None) -> pb.Failure | None: ...
def failure(error: BaseException | None) -> pb.Failure | None:
    """Return an error as a message."""
    if error is None:
        return None
    known = as_pjrt_error(error)
    return pb.Failure(code=known.code, message=known.message[:FAILURE_CHARS])


def _array_type(message: pb.ArrayType) -> ArrayType:
    if message.dtype not in DTYPES or width(message.dtype) == 0:
        raise MisuseError(f"{message.dtype[:_NAME_CHARS]!r} is no dtype of an array")
    if len(message.dims) > DIMENSIONS:
        raise MisuseError(f"an array has more than {DIMENSIONS} dimensions: {len(message.dims)}")
    if any(size < 0 for size in message.dims):
        raise MisuseError(f"an array cannot have the sizes {list(message.dims)}")
    type_ = ArrayType(message.dtype, tuple(message.dims))
    if _size(type_) >= _ARRAY_BYTES:
        raise MisuseError(f"an array cannot be so large: {list(message.dims)}")
    return type_


def _size(type_: ArrayType) -> int:
    return array_bytes(width(type_.dtype), type_.dims)


def _wrong_types(name: str, wanted: tuple[ArrayType, ...], given: tuple[ArrayType, ...]) -> PjrtError:
    if len(wanted) != len(given):
        return PjrtError(Code.INVALID_ARGUMENT, f"{name} takes {len(wanted)} arguments, not {len(given)}")
    number, pair = next(
        (number, pair) for number, pair in enumerate(zip(wanted, given, strict=True)) if pair[0] != pair[1]
    )
    return PjrtError(Code.INVALID_ARGUMENT, f"{name} takes as argument {number} {pair[0]}, not {pair[1]}")


def _broken(type_: ArrayType, device: EngineDevice, error: BaseException) -> Buffer:
    value: Future[Any] = Future()
    value.set_exception(error)
    return Buffer(type_, device, value)
