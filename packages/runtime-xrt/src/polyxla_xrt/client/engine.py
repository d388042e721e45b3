"""`RemoteEngine`: the bridge's engine, whose devices are cores of a worker.

Only requests with an answer wait for the worker: compilations, downloads and statistics. Everything else is
queued and sent in order; its errors come back on the same stream and surface when an array is read.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from polyxla_bridge.abi import Code, width
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, DeviceActivity, Engine, EngineDevice
from polyxla_bridge.engine.futures import CompletedFuture, DeletedFuture, GroupedFuture
from polyxla_bridge.env import Coordinates
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_xrt import env
from polyxla_xrt.client.journal import NO_ARRAYS, LiveArray
from polyxla_xrt.client.session import Commands, WorkerSession, uploads
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.errors import WorkerError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol.channels import CHUNK_BYTES, chunks
from polyxla_xrt.protocol.worker import array_bytes

CHANGING = {"infeed", "outfeed", "rng", "rng-get-and-update-state"}
"""Instructions whose results are not those of their operands. torch_xla's random numbers have a seed."""


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


class _Program:
    """A program on the worker, which frees it once nothing here refers to this object.

    Attributes:
        number: its number in the session.
    """

    def __init__(self, number: int, dropped: deque[int]) -> None:
        self.number = number
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)


class RemoteEngine(Engine):
    """Cores of a worker, behind a network connection.

    Any thread may call the methods. Callbacks of futures run on the session's reader thread, and must not
    wait for another answer.

    Args:
        assignment: the worker, the job, and this process's cores.
        environ: the environment to connect with.
        on_lost: receives, once, the error and the status code if the worker is gone or has ended the job.
        on_close: called at the end of `close`.

    Attributes:
        session: the connection to the worker.

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
        self._cores = {device.index: assignment.cores[n] for n, device in enumerate(self._local())}
        self._on_close = on_close
        self._is_closed = False
        self.session = WorkerSession(assignment, environ, on_lost)

    def _local(self) -> list[EngineDevice]:
        return [device for device in self.devices if device.is_local]

    def compile(self, hlo_module: bytes, options: bytes) -> Executable:
        """Compile on the worker, which does so once for all replicas.

        Raises:
            PjrtError: it does not compile; or the job can go on after the loss of its worker, and the program
                gives other results each time.
        """
        if self.session.journal:
            _refuse_changing(hlo_module)

        def compilation(number: int) -> Commands:
            messages = [
                pb.Compile(request=number, hlo=bytes(chunk), ends=ends) for chunk, ends in chunks(hlo_module)
            ]
            messages[0].options = options
            return [(pb.Command(compile=message), len(message.hlo)) for message in messages]

        message = pb.Program.FromString(bytes(self.session.ask(compilation).result()))
        return Executable(
            name=message.name,
            outputs=tuple(ArrayType(result.dtype, tuple(result.dims)) for result in message.results),
            num_replicas=message.replicas,
            optimized_hlo=message.optimized_hlo,
            code_size_bytes=message.code_size_bytes,
            fingerprint=message.fingerprint,
            num_partitions=message.partitions,
            native={
                "program": _Program(message.program, self.session.dropped),
                "donated": hlo.donated(message.optimized_hlo),
                "collectives": hlo.collectives(message.optimized_hlo),
                "source": (hlo_module, options),
            },
        )

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
        done: Future[None] = Future()
        first = self.session.new_numbers(len(devices) * len(executable.outputs))
        numbers = itertools.count(first)
        outputs: list[list[Buffer]] = [
            [
                RemoteBuffer(type_, device, GroupedFuture(done), number=next(numbers))
                for type_ in executable.outputs
            ]
            for device in devices
        ]
        request = pb.Execute(
            program=executable.native["program"].number,
            cores=[self._cores[device.index] for device in devices],
            arguments=[_number(argument) for row in rows for argument in row],
            first_result=first,
            keep=sorted(keep),
        )
        donated = executable.native["donated"] - keep
        makes, takes = NO_ARRAYS, []
        if self.session.journal:
            makes = {_number(result): self._live(result) for row in outputs for result in row}
            takes = [_number(row[number]) for row in rows for number in donated]
        self.session.execute(request, executable, done, makes, takes)
        for row in rows:
            # Only an execution that was sent takes its arguments: after a failure to send, they stay valid.
            for number in donated:
                row[number].give_up("was donated to a program")
        return outputs

    def _live(self, buffer: Buffer) -> LiveArray:
        return LiveArray(buffer.type, self._cores[buffer.device.index])

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Queue the array's bytes; blocks only while the outbox is full."""
        number, core = self.session.new_numbers(), self._cores[device.index]
        # The journal sends the data again, when the caller has long changed it.
        kept = memoryview(bytes(data)) if self.session.journal else data
        self.session.send(uploads(number, type_, core, kept), {number: LiveArray(type_, core)})
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
        return self.session.ask(
            lambda number: [(pb.Command(download=pb.Download(request=number, array=array)), 0)], into
        )

    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Copy on the worker."""
        if not isinstance(buffer, RemoteBuffer):
            return Buffer(buffer.type, device, buffer.value)
        number = self.session.new_numbers()
        copied = RemoteBuffer(buffer.type, device, CompletedFuture(), number=number)
        live = self._live(copied)
        request = pb.Copy(array=number, source=_number(buffer), core=live.core)
        self.session.send([(pb.Command(copy=request), 0)], {number: live})
        return copied

    def delete(self, buffer: Buffer) -> None:
        """Free the array on the worker, together with others, after everything that is queued."""
        if not isinstance(buffer, RemoteBuffer):
            buffer.give_up("was deleted")
        # An array that was donated is released as well: the worker keeps its number until then.
        elif not buffer.is_released:
            buffer.is_released = True
            buffer.give_up("was deleted")
            self.session.release(buffer.number)

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
        answer = self.session.ask(lambda number: [(pb.Command(stats=pb.Stats(request=number, core=core)), 0)])
        return dict(pb.Memory.FromString(bytes(answer.result())).bytes)

    def activities(self) -> list[DeviceActivity]:
        """Return the oldest execution in flight and since when it is, or since when the engine is idle."""
        return [self.session.executions.activity(self._local()[0].index)]

    def finish(self, timeout_s: float) -> bool:
        """Wait until no execution is in flight; return whether that happened in time."""
        return self.session.executions.finish(timeout_s)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, others_s: float = 0) -> None:
        """Wait for what was read, say goodbye, and wait until the worker has ended the session.

        A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.session.close(timeout_s)
        self._on_close()


def _refuse_changing(hlo_module: bytes) -> None:
    """Refuse a program that gives other results each time: a job cannot compute it again."""
    found = {instruction.opcode for instruction in hlo.instructions(hlo_module)} & CHANGING
    if found:
        raise PjrtError(
            Code.FAILED_PRECONDITION,
            f"{hlo.module_name(hlo_module)} has {', '.join(sorted(found))}, whose results depend on what the "
            "worker did before: they would change when the job goes on after the loss of the worker. Draw "
            f"random numbers from a seed, or unset {env.POLYXLA_XRT_RESUME}.",
        )


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
