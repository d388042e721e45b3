"""A session with a worker: a stream of commands, and one of answers.

With `POLYXLA_XRT_RESUME`, the loss of the connection or the worker does not end it: it begins anew on the
worker that the job has next, and sends the commands of its journal again.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import numpy as np

from polyxla import UsageError
from polyxla.plugin import say
from polyxla_bridge.abi import Code, width
from polyxla_bridge.engine.futures import when_all_are_done
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_xrt import env
from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.client.journal import NO_ARRAYS, Arrays, Command, Journal, Sized
from polyxla_xrt.client.lease import lost
from polyxla_xrt.client.probe import RETRY_S
from polyxla_xrt.client.unanswered import Executions, PendingAnswer
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.resuming import read_resuming
from polyxla_xrt.errors import WorkerError, WorkerLostError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.protocol import bulk_encoding
from polyxla_xrt.protocol.channels import chunks
from polyxla_xrt.protocol.outbox import Outbox
from polyxla_xrt.protocol.worker import PROTOCOL, array_bytes

ATTACH_S = 120.0
"""Longest wait for the worker to accept the session, in seconds: its engine may be starting."""
MAX_RELEASES = 1024
"""Maximum number of arrays that wait to be freed together."""
GOODBYE_S = 5.0
"""Longest wait for the end of the session, in seconds."""
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.NOT_FOUND)
MAX_FRUITLESS = 5
"""Number of times that sessions may be lost at one place; then what they run is taken for the cause."""
Commands: TypeAlias = Iterable[Sized]


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


class WorkerSession:
    """This process's connection to a worker.

    Threads: any thread may call the methods, which queue commands in `_outbox`. A thread of gRPC takes them
    from there and sends them (`_begin`). One reader thread handles all answers (`_read`) and completes the
    futures, so callbacks of these futures run on it and must not wait for another answer.

    Locks: `_sending` keeps the chunks of one message together; `_counting` guards the numbers of arrays and
    requests. Neither is held while waiting for an answer. `_sending` may be held while the outbox blocks for
    room (backpressure): the sender makes that room and needs none of these locks.

    Args:
        assignment: the worker, the job, and this process's cores.
        environ: the environment to connect with.
        on_lost: receives, once, the error and the status code if the worker is gone or has ended the job.

    Attributes:
        journal: the commands since a snapshot; None if the session ends with its worker.
        executions: those that the worker has not answered.
        waits: how many answers were asked for.
        dropped: numbers of programs that the worker may free. A finalizer may append one.

    Raises:
        WorkerError: the worker refuses this process.
        UsageError: a file that the environment names cannot be used.
    """

    def __init__(
        self, assignment: Assignment, environ: Mapping[str, str], on_lost: Callable[[WorkerError, int], None]
    ) -> None:
        self._assignment, self._environ, self._on_lost = assignment, environ, on_lost
        self._resuming = read_resuming(environ)
        self.journal = (
            Journal(self._resuming.every, is_alone=assignment.process_count == 1) if self._resuming else None
        )
        self.executions = Executions()
        self.waits = 0
        self.dropped: deque[int] = deque()
        # Arrays and requests share one counter, and the number of a compilation also names its program.
        self._next = 1
        self._counting = threading.Lock()
        self._sending = threading.Lock()
        self._requests: dict[int, PendingAnswer] = {}
        self._released: list[int] = []
        self._attached: Future[None] = Future()
        self._error: PjrtError | None = None
        self._is_closing = False
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
            self._wait_until_attached()
        except BaseException:
            # This covers Ctrl-C as well: the worker would regard an open stream as a process that drives the
            # cores. The outbox ends first, because gRPC's thread would wait for its commands for ever.
            self._is_closing = True
            self._outbox.cut()
            self._call.cancel()
            self._channel.close()
            raise

    def new_numbers(self, count: int = 1) -> int:
        """Reserve consecutive numbers for arrays or requests; return the first."""
        with self._counting:
            first, self._next = self._next, self._next + count
        return first

    def send(
        self, commands: Commands, makes: Arrays = NO_ARRAYS, takes: Iterable[int] = (), *, meets: bool = False
    ) -> None:
        """Queue commands without others in between; blocks only while the outbox is full.

        Args:
            commands: the chunks of a message.
            makes: the arrays that exist after it.
            takes: the arrays that do not.
            meets: whether it runs a program in which replicas meet.

        Raises:
            PjrtError: the worker is lost.
        """
        with self._sending:
            for command, size in commands:
                self._put(command, size, makes, takes)
            if self.journal and meets:
                self.journal.meet()
            self._take_snapshot_if_due(has_met=meets)

    def ask(self, commands: Callable[[int], Commands], into: memoryview | None = None) -> Future[memoryview]:
        """Send a request; return its answer, which fails if the worker goes away.

        Args:
            commands: returns the commands of the request with this number.
            into: memory of the answer's size that gets it.

        Raises:
            PjrtError: the worker is lost.
        """
        self.waits += 1
        number = self.new_numbers()
        # It is registered before it is sent, because the reader may get its answer at once.
        request = self._requests[number] = PendingAnswer(into)
        try:
            with self._sending:
                for command, size in commands(number):
                    self._put(command, size)
        except BaseException:
            # Nobody will answer it, and `close` waits for every request that is left.
            self._requests.pop(number, None)
            raise
        return request.done

    def execute(
        self,
        request: pb.Execute,
        executable: Executable,
        done: Future[None],
        makes: Arrays,
        takes: Iterable[int],
    ) -> None:
        """Queue an execution; blocks only while `MAX_IN_FLIGHT` executions are in flight.

        Args:
            request: what the worker receives; gets a sequence number.
            executable: the program.
            done: completes when the worker has answered.
            makes: the results.
            takes: the arguments that the program takes.

        Raises:
            PjrtError: the worker is lost.
        """
        meets = self._wait_before_meeting(executable)
        # It is registered before it is sent, because the reader may get its answer at once.
        request.sequence = self.executions.begin(executable, done)
        try:
            command = pb.Command(execute=request)
            self.send([(command, 8 * len(request.arguments))], makes, takes, meets=meets)
        except PjrtError:
            self.executions.drop(request.sequence)
            raise

    def release(self, number: int) -> None:
        """Free an array on the worker, together with others, after everything that is queued."""
        self._released.append(number)
        if len(self._released) >= MAX_RELEASES:
            # The outbox sends releases only when it is empty, and a busy outbox never is.
            with self._sending:
                if command := self._releases():
                    self._queue(command, 0)

    def close(self, timeout_s: float) -> None:
        """Wait for what was read, say goodbye, and wait until the worker has ended the session."""
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

    def _wait_until_attached(self) -> None:
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
            snapshot=self.journal.newest if self.journal else None,
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
        if self._is_away or (not self._released and not self.dropped):
            return None
        # The list is swapped as a whole, and the deque is popped, because other threads append to them
        # without a lock, and so do finalizers, which may run at any instruction.
        arrays, self._released = self._released, []
        programs = [self.dropped.popleft() for _ in range(len(self.dropped))]
        command = pb.Command(release=pb.Release(arrays=arrays, programs=programs))
        if self.journal:
            self.journal.add(command, 0, takes=arrays)
        return command

    def _put(self, command: Command, size: int, makes: Arrays = NO_ARRAYS, takes: Iterable[int] = ()) -> None:
        """Record a command, as `Journal.add` does, and queue it; `_sending` is held."""
        if self.journal and self._error is None:
            self.journal.add(command, size, makes, takes)
        self._queue(command, size)

    def _queue(self, command: Command, size: int) -> None:
        """Queue a command for the session, if there is one; `_sending` is held."""
        # While the worker is away, the journal keeps the command for the next session.
        if not self._outbox.put(command, size) and (self._error or not self._is_away):
            raise self._error or PjrtError(Code.UNAVAILABLE, "this process has left the worker")

    def _read(self) -> None:
        """Handle answers until the last session ends. Runs on the reader thread."""
        try:
            loss = self._read_sessions()
        except Exception as error:
            # Whatever it is: without this thread, no future would ever complete.
            if not self._attached.done():
                self._attached.set_exception(error)
            loss = _Loss(_failed(self._channel, error), Code.INTERNAL)
        if not self._attached.done():
            self._attached.set_exception(loss.error)
        # A process that has said goodbye must not fail because another process dies after it.
        elif not self._is_closing:
            self._lose(loss.code, loss.error)
        self._cut()

    def _read_sessions(self) -> _Loss:
        """Handle answers until the last session ends; return why it did."""
        loss = self._read_session()
        while self._resuming and loss.code == Code.UNAVAILABLE and not self._is_closing:
            try:
                self._resume(loss)
            except WorkerError as error:
                return _Loss(error, Code.UNAVAILABLE)
            loss = self._read_session()
        return loss

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
        assert self.journal
        since = time.monotonic()
        self._is_away = True
        # From here on, commands go to the journal only, and no thread waits for room in the outbox.
        self._cut()
        self._resumption = None
        self._call.cancel()
        self._channel.close()
        # A thread that had begun a snapshot has queued all of it when this lock is free.
        with self._sending:
            self.journal.give_up()
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
                programs = self.journal.compilations(meetings)
        except LookupError as error:
            raise self._not_resumed(str(error)) from None
        self._resumption = _Resumption(outbox, meetings, frozenset(programs), set(programs), since)
        for command, size in itertools.chain.from_iterable(programs.values()):
            outbox.put(command, size, may_wait=False)
        if not programs:
            self._go_on()

    def _count_loss(self, loss: _Loss) -> None:
        """Raise the loss if nothing was answered since the last one, and that several times."""
        is_idle = not self.executions.pending() and not self._requests
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
        why: WorkerError | UsageError = loss.error
        addresses = itertools.cycle((self._assignment.address, *self._resuming.spares))
        address, port = next(addresses), 0
        while (left := deadline - time.monotonic()) > 0 and not self._is_closing:
            try:
                outbox = self._begin(address, port)
            except UsageError as error:
                # A file of the credentials may be there again a moment later.
                why, address, port = error, next(addresses), 0
                self._channel.close()
                time.sleep(RETRY_S)
                continue
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
        assert self.journal
        with self._sending:
            # Programs that are new since the others were sent again have waited for this session.
            for number, program in self.journal.compilations(resumption.meetings).items():
                for command, size in () if number in resumption.programs else program:
                    resumption.outbox.put(command, size, may_wait=False)
            arrays, commands = self.journal.replay(resumption.meetings, self._requests.__contains__)
            for command, size in commands:
                # They are in memory already, so the limit of the outbox would save nothing.
                resumption.outbox.put(command, size, may_wait=False)
            self._outbox, self._is_away, self._resumption = resumption.outbox, False, None
        if self._assignment.process_index == 0:
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
        error = _error(answer.failure) if answer.HasField("failure") else None
        # An execution that was sent again may have been answered before.
        if self.executions.end(answer.sequence, error):
            self._answered += 1

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
            if has_failed and self.journal:
                self.journal.drop_program(part.request)
        if resumption and part.ends:
            resumption.compiling.discard(part.request)
            if not resumption.compiling:
                self._go_on()

    def _lose(self, code: int, error: WorkerError) -> None:
        """Fail every future: there will be no more answers. Runs on the reader thread.

        The order matters. `on_lost` comes first: it must know the cause before the program fails of it.
        `_error` is set before the outbox is cut, because `send` raises it when `put` fails. The executions
        come last: threads that waited for their end then fail in `send` as well.
        """
        self._on_lost(error, code)
        self._error = PjrtError(code, str(error))
        self._outbox.cut()
        if self.journal:
            self.journal.give_up()
        for request in list(self._requests.values()):
            request.fail(self._error)
        self.executions.fail(self._error)

    def _wait_before_meeting(self, executable: Executable) -> bool:
        """Return whether a program is counted for snapshots, and wait until it may be sent if it is."""
        if self.journal is None:
            return False
        # Where other processes take part in a program, they must agree on the place of a snapshot.
        is_alone = self._assignment.process_count == 1
        devices = executable.num_replicas * executable.num_partitions
        if not is_alone and (devices <= len(self._assignment.cores) or not executable.native["collectives"]):
            return False
        self.journal.wait_before_meeting()
        return True

    def _take_snapshot_if_due(self, *, has_met: bool) -> None:
        """Begin to read the arrays of a snapshot, if this is its place; `_sending` is held.

        Args:
            has_met: whether the last command was a program in which replicas meet.
        """
        if not self.journal or self._is_away or not self.journal.is_due(has_met=has_met):
            return
        snapshot, missing = self.journal.begin()
        # What is not answered yet would not be sent again once the snapshot is whole.
        before: list[Future[Any]] = [*self.executions.pending()]
        before += [request.done for request in list(self._requests.values())]
        reads: dict[int, Future[memoryview]] = {}
        for array, live in missing.items():
            number = self.new_numbers()
            into = memoryview(np.empty(array_bytes(width(live.type.dtype), live.type.dims), np.uint8).data)
            request = self._requests[number] = PendingAnswer(into)
            self._reading.add(number)
            reads[array] = request.done
            self._queue(pb.Command(download=pb.Download(request=number, array=array)), 0)

        def keep(_: BaseException | None) -> None:
            assert self.journal
            for array, read in reads.items():
                # An array that its program failed to compute cannot be read. A session that begins with this
                # snapshot lacks it, and what uses it fails there, too.
                if not read.exception():
                    live = missing[array]
                    snapshot.arrays[array] = list(uploads(array, live.type, live.core, read.result()))
            self.journal.finish(snapshot)

        when_all_are_done([*before, *reads.values()], keep)


def uploads(number: int, type_: ArrayType, core: int, data: memoryview) -> Iterator[Sized]:
    """Yield the commands that upload an array."""
    announced: pb.ArrayType | None = pb.ArrayType(dtype=type_.dtype, dims=type_.dims)
    for chunk, ends in chunks(data):
        head = pb.Upload(array=number, type=announced, core=core, ends=ends)
        yield bulk_encoding.upload(head, chunk), len(chunk)
        # The worker knows the type from the first chunk.
        announced = None


def _error(failure: pb.Failure) -> PjrtError:
    return PjrtError(failure.code, failure.message)


def _failed(channel: WorkerChannel, error: Exception) -> WorkerLostError:
    return WorkerLostError(
        f"the session with {channel.where} failed: {type(error).__name__}: {error}",
        where=channel.address,
        fix="Start the job again; it can resume from a checkpoint.",
    )


def _ended(channel: WorkerChannel, why: str) -> WorkerLostError:
    return WorkerLostError(
        f"{channel.where} ended the job: {why}",
        where=channel.address,
        fix="See the output of the other replicas, and the worker's log.",
    )
