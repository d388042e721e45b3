"""`RemoteEngine`: the bridge's engine, whose devices are cores of a worker.

Only requests with an answer wait for the worker: compilations, downloads and statistics. Everything else is
queued and sent in order; its errors come back on the same stream and surface when an array is read.

With `POLYXLA_XRT_RESUME`, the loss of the connection or the worker ends nothing: the engine begins a session
on the worker that the job has next, and sends the commands of its journal again.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import numpy as np

from polyxla.plugin import say
from polyxla_bridge.abi import Code, width
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, DeviceActivity, Engine, EngineDevice
from polyxla_bridge.engine.futures import (
    CompletedFuture,
    DeletedFuture,
    GroupedFuture,
    when_all_are_done,
)
from polyxla_bridge.env import Coordinates
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_xrt import env
from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.client.journal import NO_ARRAYS, Arrays, Command, Journal, LiveArray, Sized
from polyxla_xrt.client.lease import lost
from polyxla_xrt.client.pending_answer import PendingAnswer
from polyxla_xrt.client.probe import RETRY_S
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.resuming import read_resuming
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
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.NOT_FOUND)
CHANGING = {"infeed", "outfeed", "rng", "rng-get-and-update-state"}
"""Instructions whose results are not those of their operands. torch_xla's random numbers have a seed."""
MAX_FRUITLESS = 5
"""Number of times that sessions may be lost at one place; then what they run is taken for the cause."""
_Commands: TypeAlias = Iterable[Sized]


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


@dataclass(frozen=True)
class _Execution:
    """An execution in flight."""

    done: Future[None]
    program: str
    collectives: tuple[str, ...]
    since: float


@dataclass(frozen=True)
class _Loss:
    """Why a session is over, and the status code with which it ended."""

    error: WorkerError
    code: int


@dataclass
class _Resumption:
    """A session that began anew and is brought to the state of the last one.

    Attributes:
        outbox: its commands.
        meetings: `Snapshot.meetings` of the snapshot that it begins with.
        programs: the programs that it compiles again.
        compiling: those that the worker still compiles; everything else follows.
        since: when the last session was lost, on `time.monotonic`'s clock.
    """

    outbox: Outbox
    meetings: int
    programs: frozenset[int]
    compiling: set[int]
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
        self._assignment, self._environ = assignment, environ
        self._resuming = read_resuming(environ)
        self._journal = (
            Journal(self._resuming.every, is_alone=assignment.process_count == 1) if self._resuming else None
        )
        self._is_away = False
        self._resumption: _Resumption | None = None
        # The requests of a snapshot that is not whole.
        self._reading: set[int] = set()
        # Answers that somebody waited for, and how many there were when the last session was lost.
        self._answered = self._answered_before = self._fruitless = 0
        self._outbox = self._begin(assignment.address)
        self._reader = threading.Thread(target=self._read, name="polyxla-answers", daemon=True)
        self._reader.start()
        try:
            self._wait_for_session()
        except BaseException:
            # This covers Ctrl-C as well: the worker would regard an open stream as a process that drives the
            # cores. The outbox ends first, because gRPC's thread would wait for its commands for ever.
            self._is_closing = True
            self._outbox.cut()
            self._call.cancel()
            self._channel.close()
            raise

    def _wait_for_session(self) -> None:
        # This wait is longer than that of the worker for its engine, so that the reason of the worker comes
        # first.
        limit_s = ATTACH_S + (self._resuming.wait_s if self._resuming else 0)
        try:
            self._attached.result(limit_s)
        except TimeoutError:
            raise WorkerLostError(
                f"{self._channel.where} has not begun a session within {limit_s:g} s",
                where=self._channel.address,
                fix="See the worker's log; restart the worker if it does not answer `polyxla worker status`.",
            ) from None

    def _local(self) -> list[EngineDevice]:
        return [device for device in self.devices if device.is_local]

    def _begin(self, address: str, port: int = 0) -> Outbox:
        """Begin a session and return its outbox.

        Args:
            address: of the worker.
            port: of the job's own process there; 0 for the worker.
        """
        outbox = Outbox(self._releases)
        attach = pb.Attach(
            protocol=PROTOCOL,
            job=self._assignment.job,
            cores=self._assignment.cores,
            ordinal=self._assignment.ordinal,
            snapshot=self._journal.newest if self._journal else None,
        )

        def commands() -> Iterator[bytes]:
            # gRPC's thread iterates, the only one that takes from the outbox.
            yield bulk_encoding.encode([pb.Command(attach=attach)])
            yield from bulk_encoding.encode_all(outbox.take)

        self._channel = WorkerChannel(address, self._environ, port)
        self._call = self._channel.session(commands())
        return outbox

    def _releases(self) -> pb.Command | None:
        """Return one command that frees everything released so far, or None."""
        # A session that begins anew first compiles its programs, and has no arrays so far.
        if self._is_away or (not self._released and not self._dropped):
            return None
        # The list is swapped as a whole, and the deque is popped, because other threads append to them
        # without a lock, and so do finalizers, which may run at any instruction.
        arrays, self._released = self._released, []
        programs = [self._dropped.popleft() for _ in range(len(self._dropped))]
        command = pb.Command(release=pb.Release(arrays=arrays, programs=programs))
        if self._journal:
            self._journal.add(command, 0, takes=arrays)
        return command

    def _send(self, commands: _Commands) -> None:
        """Queue commands without others in between."""
        with self._sending:
            for command, size in commands:
                self._put(command, size)

    def _put(self, command: Command, size: int, makes: Arrays = NO_ARRAYS, takes: Iterable[int] = ()) -> None:
        """Record a command, as `Journal.add` does, and queue it; `_sending` is held."""
        if self._journal and self._error is None:
            self._journal.add(command, size, makes, takes)
        self._queue(command, size)

    def _queue(self, command: Command, size: int) -> None:
        """Queue a command for the session, if there is one; `_sending` is held."""
        # While the worker is away, the journal keeps the command for the next session.
        if not self._outbox.put(command, size) and (self._error or not self._is_away):
            raise self._error or PjrtError(Code.UNAVAILABLE, "this process has left the worker")

    def _read(self) -> None:
        """Handle answers until the last session ends. Runs on the reader thread."""
        loss = self._read_session()
        while self._resuming and loss.code == Code.UNAVAILABLE and not self._is_closing:
            try:
                self._resume(loss)
            except WorkerError as error:
                loss = _Loss(error, Code.UNAVAILABLE)
                break
            loss = self._read_session()
        if not self._attached.done():
            self._attached.set_exception(loss.error)
        # A process that has said goodbye must not fail because another process dies after it.
        elif not self._is_closing:
            self._lose(loss.code, loss.error)
        self._cut()

    def _cut(self) -> None:
        """End the threads of gRPC that take commands, also of a session that only begins."""
        self._outbox.cut()
        if self._resumption:
            self._resumption.outbox.cut()

    def _read_session(self) -> _Loss:
        """Handle answers until the session ends; return why."""
        error: Any = None
        try:
            for answers in self._call:
                for answer, data in answers:
                    if answer.WhichOneof("kind") == "ended":
                        failure = answer.ended.failure
                        return _Loss(_ended(self._channel, failure.message), failure.code)
                    # This is the first answer or none, so no command has been sent.
                    if answer.WhichOneof("kind") == "moved":
                        self._cut()
                        self._channel.close()
                        self._outbox = self._begin(self._assignment.address, answer.moved.port)
                        return self._read_session()
                    self._handle(answer, data)
        except grpc.RpcError as broken:
            error = broken
        except WorkerError as unresumed:
            return _Loss(unresumed, Code.ABORTED)
        if not self._attached.done():
            found = self._channel.explain(error) if error else _ended(self._channel, "it ended the session")
            # A worker that was lost since it granted the cores is gone, or does not know the job.
            is_gone = error is not None and error.code() in _GONE
            return _Loss(found, Code.UNAVAILABLE if is_gone else Code.ABORTED)
        gone = lost(self._channel, error) if error else _ended(self._channel, "it ended the session")
        return _Loss(gone, Code.UNAVAILABLE)

    def _resume(self, loss: _Loss) -> None:
        """Begin a session anew, with this worker or a spare one, and compile the programs there.

        Raises:
            WorkerError: there is none in time, or the last sessions were lost at this same place.
        """
        assert self._resuming
        assert self._journal
        since = time.monotonic()
        self._is_away = True
        # From here on, commands go to the journal only, and no thread waits for room in the outbox.
        self._cut()
        self._resumption = None
        self._call.cancel()
        self._channel.close()
        # A thread that had begun a snapshot has queued all of it when this lock is free.
        with self._sending:
            self._journal.give_up()
            for number in self._reading:
                self._requests.pop(number, None)
            self._reading.clear()
        self._count_loss(loss)
        meetings, outbox = self._reattach(since + self._resuming.wait_s, loss)
        if not self._attached.done():
            self._attached.set_result(None)
        for request in list(self._requests.values()):
            request.restart()
        try:
            # A program that is being sent is there as a whole when this lock is free.
            with self._sending:
                programs = self._journal.compilations(meetings)
        except LookupError as error:
            raise self._not_resumed(str(error)) from None
        self._resumption = _Resumption(outbox, meetings, frozenset(programs), set(programs), since)
        for command, size in itertools.chain.from_iterable(programs.values()):
            outbox.put(command, size, may_wait=False)
        if not programs:
            self._go_on()

    def _count_loss(self, loss: _Loss) -> None:
        """Raise the loss if nothing was answered since the last one, and that several times."""
        with self._changed:
            is_idle = not self._in_flight and not self._requests
        is_fruitless = self._answered == self._answered_before and not is_idle
        self._fruitless = self._fruitless + 1 if is_fruitless else 0
        self._answered_before = self._answered
        if self._fruitless >= MAX_FRUITLESS:
            raise WorkerLostError(
                f"{loss.error.what}; that was the {MAX_FRUITLESS}th time at the same place of this program",
                where=self._channel.address,
                fix="See the worker's log: what this program runs there seems to end the worker.",
            )

    def _reattach(self, deadline: float, loss: _Loss) -> tuple[int, Outbox]:
        """Attach to the worker that has the job now.

        Returns:
            `Snapshot.meetings` of the snapshot to which all replicas go back, and the session's outbox.

        Raises:
            WorkerError: there is none at the deadline; the error of the last attempt.
        """
        assert self._resuming
        why = loss.error
        addresses = itertools.cycle((self._assignment.address, *self._resuming.spares))
        address, port = next(addresses), 0
        while (left := deadline - time.monotonic()) > 0 and not self._is_closing:
            outbox = self._begin(address, port)
            # The worker may wait for the other replicas, and a connection may hang.
            timer = threading.Timer(left, self._call.cancel)
            timer.daemon = True
            timer.start()
            port = 0
            try:
                for (answer, _), *_ in self._call:
                    if answer.WhichOneof("kind") != "moved":
                        return answer.attached.snapshot, outbox
                    port = answer.moved.port
            except grpc.RpcError as error:
                why = self._channel.explain(error)
            finally:
                timer.cancel()
            outbox.cut()
            self._channel.close()
            if not port:
                address = next(addresses)
                time.sleep(RETRY_S)
        raise WorkerLostError(
            f"{loss.error.what}; no worker has taken the job again within {self._resuming.wait_s:g} s: "
            f"{why.what}",
            where=f"{env.POLYXLA_XRT_RESUME}={self._resuming.wait_s:g}",
            fix="Restart the worker sooner, or allow more time. The job can resume from a checkpoint.",
        )

    def _go_on(self) -> None:
        """Send the journal's commands, now that its programs are compiled, and then those of the program."""
        resumption = self._resumption
        assert resumption
        assert self._journal
        with self._sending:
            # Programs that are new since the others were sent again have waited for this session.
            for number, program in self._journal.compilations(resumption.meetings).items():
                for command, size in () if number in resumption.programs else program:
                    resumption.outbox.put(command, size, may_wait=False)
            arrays, commands = self._journal.replay(resumption.meetings, self._requests.__contains__)
            for command, size in commands:
                # They are in memory already, so the limit of the outbox would save nothing.
                resumption.outbox.put(command, size, may_wait=False)
            self._outbox, self._is_away, self._resumption = resumption.outbox, False, None
        if self.process_index == 0:
            seconds = time.monotonic() - resumption.since
            say(
                f"resumed on {self._channel.where} after {seconds:.1f} s, with {arrays} arrays of a snapshot "
                f"and {len(commands)} commands since"
            )

    def _not_resumed(self, why: str) -> WorkerLostError:
        return WorkerLostError(
            f"{self._channel.where} has the job again, but cannot go on with it: {why}",
            where=env.POLYXLA_XRT_RESUME,
            fix="Start the job again; it can resume from a checkpoint.",
        )

    def _handle(self, answer: pb.Answer, data: memoryview | None) -> None:
        match answer.WhichOneof("kind"):
            case "executed":
                self._handle_execution(answer.executed)
            case "part":
                self._handle_part(answer.part, data)
            case "attached":
                self._attached.set_result(None)

    def _handle_execution(self, answer: pb.Executed) -> None:
        with self._changed:
            execution = self._in_flight.pop(answer.sequence, None)
            if not self._in_flight:
                self._idle_since = time.monotonic()
                self._changed.notify_all()
        # An execution that was sent again may have been answered before.
        if execution is None:
            return
        self._answered += 1
        # The callbacks below may queue the next execution, which needs this room.
        self._room.release()
        # This is outside of the lock: callbacks of the future run here, and may call this engine.
        if answer.HasField("failure"):
            execution.done.set_exception(_error(answer.failure))
        else:
            execution.done.set_result(None)

    def _handle_part(self, part: pb.Part, data: memoryview | None) -> None:
        resumption, has_failed = self._resumption, part.HasField("failure")
        request = self._requests.get(part.request)
        # Nobody waits for a program that is compiled again.
        if request is None:
            if has_failed and resumption and part.request in resumption.compiling:
                raise self._not_resumed(f"it does not compile a program: {part.failure.message}")
        elif request.add(part, data):
            del self._requests[part.request]
            self._reading.discard(part.request)
            self._answered += 1
            if has_failed and self._journal:
                self._journal.drop_program(part.request)
        if resumption and part.ends:
            resumption.compiling.discard(part.request)
            if not resumption.compiling:
                self._go_on()

    def _lose(self, code: int, error: WorkerError) -> None:
        """Fail every future: there will be no more answers. Runs on the reader thread.

        The order matters. `on_lost` comes first: it must know the cause before the program fails of it.
        `_error` is set before the outbox is cut, because `_send` raises it when `put` fails. The semaphore is
        released last: threads that wait for room then fail in `_send` as well.
        """
        self._on_lost(error, code)
        self._error = PjrtError(code, str(error))
        self._outbox.cut()
        if self._journal:
            self._journal.give_up()
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
        """Compile on the worker, which does so once for all replicas.

        Raises:
            PjrtError: it does not compile; or the job can go on after the loss of its worker, and the program
                gives other results each time.
        """
        if self._journal:
            _refuse_changing(hlo_module)

        def compilation(number: int) -> _Commands:
            messages = [
                pb.Compile(request=number, hlo=bytes(chunk), ends=ends) for chunk, ends in chunks(hlo_module)
            ]
            messages[0].options = options
            return [(pb.Command(compile=message), len(message.hlo)) for message in messages]

        message = pb.Program.FromString(bytes(self._wait(self._ask(compilation))))
        return Executable(
            name=message.name,
            outputs=tuple(ArrayType(result.dtype, tuple(result.dims)) for result in message.results),
            num_replicas=message.replicas,
            optimized_hlo=message.optimized_hlo,
            code_size_bytes=message.code_size_bytes,
            fingerprint=message.fingerprint,
            num_partitions=message.partitions,
            native={
                "program": _Program(message.program, self._dropped),
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
        is_meeting = self._wait_before_meeting(executable)
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
            program=executable.native["program"].number,
            cores=[self._cores[device.index] for device in devices],
            arguments=[_number(argument) for row in rows for argument in row],
            first_result=first,
            keep=sorted(keep),
        )
        donated = executable.native["donated"] - keep
        makes, takes = NO_ARRAYS, []
        if self._journal:
            makes = {_number(result): self._live(result) for row in outputs for result in row}
            takes = [_number(row[number]) for row in rows for number in donated]
        try:
            with self._sending:
                self._put(pb.Command(execute=request), 8 * len(request.arguments), makes, takes)
                if self._journal and is_meeting:
                    self._journal.meet()
                self._take_snapshot_if_due(has_met=is_meeting)
        except PjrtError:
            with self._changed:
                # `_lose` may have taken it out already.
                self._in_flight.pop(sequence, None)
            # Otherwise, calls that fail would use up the room, and the next one would wait for ever.
            self._room.release()
            raise
        for row in rows:
            # Only an execution that was sent takes its arguments: after a failure to send, they stay valid.
            for number in donated:
                row[number].give_up("was donated to a program")
        return outputs

    def _wait_before_meeting(self, executable: Executable) -> bool:
        """Return whether a program is counted for snapshots, and wait until it may be sent if it is."""
        if self._journal is None:
            return False
        # Where other processes take part in a program, they must agree on the place of a snapshot.
        is_alone = self._assignment.process_count == 1
        devices = executable.num_replicas * executable.num_partitions
        if not is_alone and (devices <= len(self._cores) or not executable.native["collectives"]):
            return False
        self._journal.wait_before_meeting()
        return True

    def _live(self, buffer: Buffer) -> LiveArray:
        return LiveArray(buffer.type, self._cores[buffer.device.index])

    def _take_snapshot_if_due(self, *, has_met: bool) -> None:
        """Begin to read the arrays of a snapshot, if this is its place; `_sending` is held.

        Args:
            has_met: whether the last command was a program in which replicas meet.
        """
        if not self._journal or self._is_away or not self._journal.is_due(has_met=has_met):
            return
        snapshot, missing = self._journal.begin()
        # What is not answered yet would not be sent again once the snapshot is whole.
        with self._changed:
            before: list[Future[Any]] = [execution.done for execution in self._in_flight.values()]
        before += [request.done for request in list(self._requests.values())]
        reads: dict[int, Future[memoryview]] = {}
        for array, live in missing.items():
            number = self._new_numbers(1)
            into = memoryview(np.empty(array_bytes(width(live.type.dtype), live.type.dims), np.uint8).data)
            request = self._requests[number] = PendingAnswer(into)
            self._reading.add(number)
            reads[array] = request.done
            self._queue(pb.Command(download=pb.Download(request=number, array=array)), 0)

        def keep(_: BaseException | None) -> None:
            assert self._journal
            # An array that its program failed to compute cannot be read, nor can a lost worker's.
            if any(read.exception() for read in reads.values()):
                self._journal.give_up(snapshot)
                return
            for array, read in reads.items():
                live = missing[array]
                snapshot.arrays[array] = list(_uploads(array, live.type, live.core, read.result()))
            self._journal.finish(snapshot)

        when_all_are_done([*before, *reads.values()], keep)

    def _new_numbers(self, count: int) -> int:
        """Reserve `count` consecutive numbers and return the first."""
        with self._counting:
            first, self._next = self._next, self._next + count
        return first

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Queue the array's bytes; blocks only while the outbox is full."""
        number, core = self._new_numbers(1), self._cores[device.index]
        # The journal sends the data again, when the caller has long changed it.
        kept = memoryview(bytes(data)) if self._journal else data
        with self._sending:
            for command, size in _uploads(number, type_, core, kept):
                self._put(command, size, {number: LiveArray(type_, core)})
            self._take_snapshot_if_due(has_met=False)
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
        copied = RemoteBuffer(buffer.type, device, CompletedFuture(), number=number)
        live = self._live(copied)
        request = pb.Copy(array=number, source=_number(buffer), core=live.core)
        with self._sending:
            self._put(pb.Command(copy=request), 0, {number: live})
        return copied

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
                with self._sending:
                    if command := self._releases():
                        self._queue(command, 0)

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


def _uploads(number: int, type_: ArrayType, core: int, data: memoryview) -> Iterator[Sized]:
    """Yield the commands that upload an array."""
    announced: pb.ArrayType | None = pb.ArrayType(dtype=type_.dtype, dims=type_.dims)
    for chunk, ends in chunks(data):
        head = pb.Upload(array=number, type=announced, core=core, ends=ends)
        yield bulk_encoding.upload(head, chunk), len(chunk)
        # The worker knows the type from the first chunk.
        announced = None


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
