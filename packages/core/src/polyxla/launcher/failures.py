"""Reporting the death or the stall of a replica, on both sides of the pipe.

In a replica process, `report_stall`, `give_up`, `blame` and `defer_to_launcher` hand the failure to the
launching process. There, `lost`, `find_death` and `stalled` turn it into the error that `polyxla.launch`
raises, which ends all replicas. Nothing else reports the end of a replica.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from polyxla import presence
from polyxla.console import say
from polyxla.errors import DisagreementError, PolyxlaError, ReplicaLostError, StalledError
from polyxla.launcher.messages import Message, Raised, StallReport, pack
from polyxla.launcher.process_handle import Process, is_ending, is_stopped
from polyxla.presence import Position

INTERRUPT_GRACE_S = 3.0
"""Time for replicas to run their ``finally`` blocks after Ctrl-C, in seconds, before they are ended."""
TERMINATION_GRACE_S = 600.0
"""Time for replicas to save and end after a signal that the launching process passes on, in seconds.

What sends such a signal has a limit of its own, usually a shorter one, after which it kills all processes.
"""
SIGNAL_SPREAD_S = 0.5
"""Time in which a signal to a whole group or container reaches all of its processes, in seconds."""
STOP_GRACE_S = 5.0
"""Time for a process to end after SIGTERM, in seconds, before it is killed."""
POSITION_WAIT_S = 5.0
"""Longest wait, when replicas stall, until every process has reported its position, in seconds."""
DEATH_GRACE_S = 3.0
"""Time for the launching process to notice that a replica process has died, in seconds."""
DEATH_NOTICE_S = 0.2
"""How long an error waits for the notice of a death that may have caused it, in seconds."""
POSITION, INTERRUPT = "position", "interrupt"
"""What the launching process asks of a replica process; a number passes on that signal."""
PARENT_GONE = 3
"""Exit code of a replica process whose launching process went away."""
STALLED = 5
"""Exit code of a process whose replicas stall, if it has no launching process. The bridge uses the same."""
DISAGREE = "replicas disagree"
"""What the report of different collectives begins with. The bridge uses the same."""
UNEQUAL = (
    "All replicas must take part in each step: give them the same number of batches, as replica.loader does, "
    "and let none return early."
)
"""What to do about replicas that returned while others wait for them."""


# In a replica process


class ParentLink:
    """A replica process's end of the pipe; several threads write to it.

    Args:
        pipe: the process's end.
        interrupt: interrupts the replicas of this process, and returns whether they save first.
        take_signal: takes a signal that the launching process has received.
    """

    def __init__(
        self, pipe: Connection, interrupt: Callable[[], bool], take_signal: Callable[[int], None]
    ) -> None:
        self._pipe, self._interrupt, self._take_signal = pipe, interrupt, take_signal
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message, unless the launching process is gone."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            # A launching process that is gone is noticed by `listen`, which ends this process.
            self._pipe.send(message)

    def report(self, kind: str, content: str | StallReport) -> None:
        """Send where each replica of this process is, then a message of this kind."""
        # The positions come first: the launching process reads them before the message that it acts on.
        for position in presence.positions():
            self.send(Message("replica", position))
        self.send(Message(kind, content))

    def listen(self) -> None:
        """Answer each request. Ends this process when the launching process goes away.

        Runs in a thread of its own for as long as the process lives.
        """
        try:
            while True:
                request: str | int = self._pipe.recv()
                if isinstance(request, int):
                    _own.told_to_end = True
                    self._take_signal(request)
                elif request == INTERRUPT:
                    if self._interrupt():
                        self.send(Message("saves"))
                else:
                    self.report("position", _own.describe())
        except (EOFError, OSError):
            # Without a launching process, nothing would stop this one or take its result.
            os._exit(PARENT_GONE)


def connect(
    pipe: Connection, interrupt: Callable[[], bool], take_signal: Callable[[int], None]
) -> ParentLink:
    """Make `pipe` this process's link to its launching process, and answer requests on it.

    Args:
        pipe: this process's end.
        interrupt: called, in a thread, when the launching process passes on a Ctrl-C. Returns whether
            replicas save before they end, for which the launching process then waits longer.
        take_signal: called there with the number of any other signal that the launching process passes on.
    """
    # There is one link in a process: watchdogs in any thread report through it.
    link = _own.link = ParentLink(pipe, interrupt, take_signal)
    # A fork of the launching process inherits the replicas that ran inline there.
    presence.forget()
    presence.listen(lambda position: link.send(Message("replica", position)))
    threading.Thread(target=link.listen, name="polyxla-parent", daemon=True).start()
    return link


def has_parent() -> bool:
    """Return whether a launching process started this one for its replicas and waits for its answer."""
    return _own.link is not None


def told_to_end() -> bool:
    """Return whether the launching process has passed on a signal, after which replicas may save and end."""
    return _own.told_to_end


def describe_with(describe: Callable[[], str]) -> None:
    """Set the function that returns the position of this process's replicas, for the launching process."""
    _own.describe = describe


def report_stall(text: str, returned: Iterable[int] = ()) -> None:
    """Report that replicas of this process stall; the launching process asks all others and ends all.

    Without a launching process, prints `text` and ends this process with exit code `STALLED`. If others have
    returned, the error of `polyxla.launch` says so in one sentence.

    Args:
        text: what the replicas wait for, and where they are.
        returned: replicas known to have returned, on any host, if that is what the others wait for.
    """
    if _own.link is None:
        say(text)
        # Not sys.exit: this is a watchdog's thread, and the replicas hang in C++.
        os._exit(STALLED)
    _own.link.report("stalled", StallReport(text, tuple(returned)))


def give_up(error: PolyxlaError) -> NoReturn:
    """End this process for a reason outside its program, such as a lost device.

    The launching process raises `error` and ends the others; if, as `blame` knows, it only follows from
    another replica's end, that end is given the time to be reported. Without one, the error is printed.
    """
    if _own.link is None:
        say(f"error: {error}")
    else:
        if _own.cause_follows:
            defer_to_launcher()
        _own.link.send(Message("answer", pack(Raised(error, ""))))
    sys.stdout.flush()
    sys.stderr.flush()
    # The main thread may never return from C++, so Python's own exit would not come.
    os._exit(error.exit_code)


def blame(error: PolyxlaError, *, follows_another: bool = False) -> None:
    """Make `error` the answer of this process if its program raises from now on, which only follows from it.

    Called in any thread, before the program can notice the failure.

    Args:
        error: the cause, such as a lost device.
        follows_another: whether another replica's death or stall is behind it, which the launching process
            reports better: the answer is held back until it has ended this process.
    """
    _own.cause, _own.cause_follows = error, follows_another


def explain(answer: Raised) -> Raised:
    """Return the answer of a program that raised: with the error of `blame` in its place, if there is one."""
    if _own.cause is None:
        return answer
    if _own.cause_follows:
        defer_to_launcher()
    return Raised(_own.cause, answer.traceback)


def defer_to_launcher() -> None:
    """Wait until the launching process has noticed which replica process died and has ended this one.

    Called before an error that only follows from that death: the launching process names the process with
    its signal and its memory, and the first error that it receives is the one that the user sees.
    """
    time.sleep(DEATH_GRACE_S)


def stacks() -> str:
    """Return the Python stack of each thread of this process that is not the launcher's or a watchdog's."""
    # Threads that C++ started have frames only while they run Python, and no name.
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in sys._current_frames().items()
        if not names.get(number, "").startswith(("polyxla-parent", "polyxla-watch"))
    )


@dataclass
class _ReplicaState:
    """The state of this process, if it is a replica process."""

    link: ParentLink | None = None
    cause: PolyxlaError | None = None
    cause_follows: bool = False
    told_to_end: bool = False
    describe: Callable[[], str] = stacks


_own = _ReplicaState()


# In the launching process


@dataclass
class ReplicaProcess:
    """A replica process as the launching process sees it.

    Attributes:
        index: its number among the processes of the launch.
        process: the process.
        pipe: this end of the pipe to it.
        has_answered: whether its answer has arrived.
        replicas: its replicas by ordinal, as far as they have started, with their last known position.
        slice_id: its TPU slice; None if the job has one.
    """

    index: int
    process: Process
    pipe: Connection
    has_answered: bool = False
    replicas: dict[int, Position] = field(default_factory=dict)
    slice_id: int | None = None

    def __str__(self) -> str:
        replicas = f"{presence.named(self.replicas)}; " if self.replicas else ""
        pid = f"pid {self.process.pid}" if self.process.pid else "not forked yet"
        where = "" if self.slice_id is None else f" of slice {self.slice_id}"
        return f"process {self.index}{where} ({replicas}{pid})"

    def receive(self) -> Message | None:
        """Read one message; None if it was one about a replica, which `replicas` then holds.

        Raises:
            EOFError: the process has closed its end.
            OSError: the process is gone.
        """
        message: Message = self.pipe.recv()
        if message.kind != "replica":
            return message
        self.replicas[message.content.ordinal] = message.content
        return None


def lost(first: ReplicaProcess, processes: Sequence[ReplicaProcess]) -> ReplicaLostError:
    """Return the error for a process that ended without an answer.

    Args:
        first: the process whose pipe closed. Its end may follow from that of another one, which is the one
            to name.
        processes: all of the launch.
    """
    # The pipe closes while the process exits, a moment before its exit code can be read.
    end = first.process.wait(time.monotonic() + STOP_GRACE_S)
    if end is None:
        return ReplicaLostError(f"{first} closed its pipe and hangs")
    ends = [(process, process.process.ended()) for process in processes]
    # SIGKILL comes from outside, often from the kernel for lack of memory; other ends may follow from it.
    killed = [process for process, exit_ in ends if exit_ and exit_.code == -signal.SIGKILL]
    if killed and end.code != -signal.SIGKILL:
        first = killed[0]
    return ReplicaLostError(
        f"{first} {first.process.ended()} before it returned a result{_rest_of_slice(first, processes)}"
    )


def _rest_of_slice(first: ReplicaProcess, processes: Sequence[ReplicaProcess]) -> str:
    """Say that the whole TPU slice of a process is lost, if it is."""
    own = [process for process in processes if process.slice_id == first.slice_id]
    deadline = time.monotonic() + DEATH_NOTICE_S
    if first.slice_id is None or len(own) == 1 or not all(_was_killed(each, deadline) for each in own):
        return ""
    return f"; slice {first.slice_id} is lost: its {len(own)} processes here were killed"


def _was_killed(process: ReplicaProcess, deadline: float) -> bool:
    end = process.process.wait(deadline)
    # On a busy machine, a large process is seen to end long after it was killed.
    if end is None and process.process.pid and is_ending(process.process.pid):
        end = process.process.wait(time.monotonic() + STOP_GRACE_S)
    return end is not None and end.code == -signal.SIGKILL


def find_death(processes: Sequence[ReplicaProcess]) -> ReplicaLostError | None:
    """Return the error for the first process that ends without an answer; None if there is none.

    Called when a launch fails anyway: the message of a process that has one is discarded. Waits for
    `DEATH_NOTICE_S`, since the pipe of a killed process closes with the last of its threads; and for a
    process whose end has begun, for `STOP_GRACE_S`.

    Args:
        processes: all of the launch.
    """
    remaining = {process.pipe: process for process in processes if not process.has_answered}
    deadline = time.monotonic() + DEATH_NOTICE_S
    last = time.monotonic() + STOP_GRACE_S
    while remaining:
        ready: Any = multiprocessing.connection.wait(list(remaining), max(0.0, deadline - time.monotonic()))
        if not ready:
            pids = (process.process.pid for process in remaining.values())
            # On a busy machine, a large process is seen to end long after it was killed.
            if time.monotonic() > last or not any(pid and is_ending(pid) for pid in pids):
                return None
            deadline = time.monotonic() + DEATH_NOTICE_S
        for pipe in ready:
            process = remaining.pop(pipe)
            try:
                if process.receive() is None:
                    remaining[pipe] = process
            except (EOFError, OSError):
                return lost(process, processes)
    return None


def stalled(processes: Sequence[ReplicaProcess], first: ReplicaProcess, report: StallReport) -> PolyxlaError:
    """Return the error that ends all processes; print their positions, unless one sentence says it all.

    Args:
        processes: all of the launch.
        first: the one that reported the stall.
        report: what it reported.
    """
    others = [process for process in processes if process is not first and not process.has_answered]
    # All are asked before any answer is awaited, so that they share one deadline.
    for other in others:
        with contextlib.suppress(OSError):
            other.pipe.send(POSITION)
    deadline = time.monotonic() + POSITION_WAIT_S
    positions = {report.text: [f"{first} stalls"]}
    for other in others:
        positions.setdefault(_position(other, deadline), []).append(str(other))
    # Replicas that have returned on another host are known from the report only.
    known = {ordinal: Position(ordinal, has_returned=True) for ordinal in report.returned}
    for process in processes:
        known |= process.replicas
    what = report.text.partition("\n")[0]
    # The bridge reports both by the same way; the text tells a disagreement from a stall.
    if DISAGREE in what:
        lines = (f"replica {where.ordinal} is at {where.line}" for where in known.values() if where.line)
        return DisagreementError(f"{what[what.index(DISAGREE) :]} ({'; '.join(sorted(lines))})")
    # Replicas that returned early are the usual reason, and need no stacks to explain.
    if sentence := presence.unequal(known.values(), first.replicas):
        return StalledError(f"{sentence}. {UNEQUAL}")
    for text, names in positions.items():
        say(f"{', '.join(names)}:\n{text}")
    still = "".join(f". {other} {stopped(other)}" for other in others if is_stopped(other.process.pid))
    return StalledError(
        f"{first} waited too long for other replicas: {what}; the position of each process is printed above"
        f"{still}"
    )


def stopped(process: ReplicaProcess) -> str:
    """Say that a process is stopped, and how to continue it."""
    return f"was stopped, by a signal or a debugger (kill -CONT {process.process.pid} continues it)"


def _position(process: ReplicaProcess, deadline: float) -> str:
    # Its pipe may hold older messages, which come before the answer.
    try:
        while process.pipe.poll(max(0.0, deadline - time.monotonic())):
            message = process.receive()
            if message is not None and message.kind == "stalled":
                return str(message.content.text)
            if message is not None and message.kind == "position":
                return str(message.content)
    except (EOFError, OSError):
        return str(process.process.wait(deadline) or "its pipe is closed")
    return f"did not report its position within {POSITION_WAIT_S:g} s: its Python does not run"
