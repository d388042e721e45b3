"""What a worker has not answered yet: executions, and requests whose answers arrive in chunks."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from polyxla_bridge.abi import Code
from polyxla_bridge.engine.engine import DeviceActivity
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import Executable
from polyxla_xrt.proto import worker_pb2 as pb

MAX_IN_FLIGHT = 64
"""Maximum executions in flight: hides latency, bounds memory."""


@dataclass(frozen=True)
class _Execution:
    """An execution in flight."""

    done: Future[None]
    program: str
    collectives: tuple[str, ...]
    since: float


class Executions:
    """At most `MAX_IN_FLIGHT` executions, by their numbers in the session. Thread-safe.

    Attributes:
        holdups: how many times an execution has waited because so many others were in flight.
    """

    def __init__(self) -> None:
        self.holdups = 0
        self._sequences = itertools.count(1)
        self._room = threading.Semaphore(MAX_IN_FLIGHT)
        # Guards the two below, and wakes `finish`.
        self._changed = threading.Condition()
        self._in_flight: dict[int, _Execution] = {}
        self._idle_since = time.monotonic()

    def begin(self, executable: Executable, done: Future[None]) -> int:
        """Wait for room; return the number of an execution, whose answer completes `done`."""
        if not self._room.acquire(blocking=False):
            self.holdups += 1
            self._room.acquire()
        number = next(self._sequences)
        collectives = executable.native["collectives"]
        with self._changed:
            self._in_flight[number] = _Execution(done, executable.name, collectives, time.monotonic())
        return number

    def drop(self, number: int) -> None:
        """Forget an execution that could not be sent."""
        with self._changed:
            # `fail` may have taken it out already.
            self._in_flight.pop(number, None)
        # Otherwise, calls that fail would use up the room, and the next one would wait for ever.
        self._room.release()

    def end(self, number: int, error: PjrtError | None) -> bool:
        """Complete an execution; return whether it was in flight. Callbacks of its future run here."""
        with self._changed:
            execution = self._in_flight.pop(number, None)
            if not self._in_flight:
                self._idle_since = time.monotonic()
                self._changed.notify_all()
        if execution is None:
            return False
        # The callbacks may begin the next execution, which needs this room, and this lock.
        self._room.release()
        if error:
            execution.done.set_exception(error)
        else:
            execution.done.set_result(None)
        return True

    def fail(self, error: PjrtError) -> None:
        """Fail every execution, and let those that wait for room go on. Callbacks of the futures run here."""
        with self._changed:
            in_flight, self._in_flight = list(self._in_flight.values()), {}
            self._changed.notify_all()
        # The callbacks may need this lock.
        for execution in in_flight:
            execution.done.set_exception(error)
        for _ in range(MAX_IN_FLIGHT):
            self._room.release()

    def pending(self) -> list[Future[None]]:
        """Return the futures of the executions in flight."""
        with self._changed:
            return [execution.done for execution in self._in_flight.values()]

    def activity(self, device: int) -> DeviceActivity:
        """Return the oldest execution in flight and since when it is, or since when there is none."""
        with self._changed:
            # A dictionary keeps the order of entry, so the first execution is the oldest.
            oldest = next(iter(self._in_flight.values()), None)
        if oldest is None:
            return DeviceActivity(device, None, (), time.monotonic() - self._idle_since)
        return DeviceActivity(device, oldest.program, oldest.collectives, time.monotonic() - oldest.since)

    def finish(self, timeout_s: float) -> bool:
        """Wait until no execution is in flight; return whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)


class PendingAnswer:
    """An answer that has not arrived completely. Only the reader thread calls its methods.

    Args:
        into: memory of the answer's size that gets it; None if the size is unknown.

    Attributes:
        done: gets the whole answer, or the error.
    """

    def __init__(self, into: memoryview | None = None) -> None:
        self.done: Future[memoryview] = Future()
        self._into = into
        self._parts: list[memoryview] = []
        self._filled = 0

    def add(self, part: pb.Part, data: memoryview | None = None) -> bool:
        """Add a chunk; return whether it was the last.

        Args:
            part: the chunk.
            data: its data; None if `part` has it.
        """
        if part.HasField("failure"):
            self.done.set_exception(PjrtError(part.failure.code, part.failure.message))
            return True
        self._keep(memoryview(part.data) if data is None else data)
        if part.ends:
            self._complete()
        return part.ends

    def _keep(self, data: memoryview) -> None:
        start, self._filled = self._filled, self._filled + len(data)
        if self._into is None:
            self._parts.append(data)
        elif self._filled <= len(self._into):
            # Excess data is dropped here; `_complete` compares the sizes and reports it.
            # numpy releases the GIL while it copies, so that other threads can run.
            np.frombuffer(self._into, np.uint8)[start : self._filled] = np.frombuffer(data, np.uint8)

    def _complete(self) -> None:
        if self._into is None:
            # An answer of one chunk is not copied.
            content = self._parts[0] if len(self._parts) == 1 else memoryview(b"".join(self._parts))
            self.done.set_result(content)
        elif self._filled == len(self._into):
            self.done.set_result(self._into)
        else:
            self.done.set_exception(
                PjrtError(
                    Code.INTERNAL,
                    f"the worker sent {self._filled} bytes of an array of {len(self._into)} bytes",
                )
            )

    def restart(self) -> None:
        """Forget the chunks that came: another session sends the answer from its beginning."""
        self._parts.clear()
        self._filled = 0

    def fail(self, error: PjrtError) -> None:
        """Set the error, unless the answer is complete."""
        if not self.done.done():
            self.done.set_exception(error)
