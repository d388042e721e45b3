"""What the core asks for prepared processes: `polyxla.launcher.start_methods.PreparedProcesses`. Light."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from polyxla import UsageError
from polyxla.plugin import Exit, Process, env, is_stopped, say, script
from polyxla_tools.warm.facts import own_state, surroundings
from polyxla_tools.warm.sockets import (
    Message,
    find_sockets,
    peer_user,
    reachable,
    receive,
    send,
    send_descriptors,
)

ANSWER_S = 5.0
"""Longest wait for each answer of a warm process, in seconds; then the start is cold."""
FORWARDED = frozenset(
    [
        signal.SIGALRM,
        signal.SIGCONT,
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGTSTP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
    ]
)
"""The signals that a program receives through its client."""
_SI_KERNEL = 0x80
"""How a terminal's signals are marked; it sends them to every process of the group.

Source: Linux's include/uapi/asm-generic/siginfo.h.
"""
_LOST = Exit(-signal.SIGKILL, 0)
"""The end of a fork whose warm process has ended, which ends its forks as well."""


def run_program(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run the program in a fork of a warm process and end as it ends; return if none fits."""
    first = _program_directory(command[3:])
    # Python puts the program's directory first in the path, unless `-P` or PYTHONSAFEPATH forbids it.
    own_path = [] if sys.flags.safe_path else [first]
    if found := _fork("program", environ, command=list(command), own_path=own_path):
        follow(found[0])


def fork_server(
    control: socket.socket, environ: Mapping[str, str], preload: Sequence[str]
) -> WarmProcess | None:
    """Return a fork of a warm process that serves `control`; None if none fits."""
    found = _fork("fork_server", environ, control.fileno(), preload=list(preload), own_path=_path())
    return WarmProcess(*found) if found else None


def misfits(environ: Mapping[str, str], preload: Sequence[str]) -> list[str | None]:
    """Return, for each warm process, why it would not fit to `environ`; None if it fits."""
    request = _request("check", environ, preload=list(preload), own_path=[])
    return [answer.get("refused", answer.get("problem")) for answer in ask_all(**request)]


def ask_all(kind: str, **more: Any) -> list[Message]:
    """Return the answers of all warm processes to a request; of those that give none, pid and problem."""
    answers = []
    for path in find_sockets(env.snapshot()):
        answer = None
        if connection := _connect(path):
            with connection:
                answer = ask(connection, {"kind": kind, **more})
        # A process that ends at this moment has removed its socket, and is not listed.
        if answer or path.exists():
            answers.append(answer or {"pid": _pid(path), "problem": _silence(path)})
    return answers


def ask(connection: socket.socket, request: Message) -> Message | None:
    """Send a request and return the answer; None if there is none in time."""
    try:
        send(connection, **request)
        return receive(connection)
    except OSError:
        return None


def _path() -> list[str]:
    # Python ignores entries that are no strings, such as a Path.
    return [entry for entry in sys.path if isinstance(entry, str)]


def _request(kind: str, environ: Mapping[str, str], **more: Any) -> Message:
    return {
        "kind": kind,
        "environ": dict(environ),
        "surroundings": surroundings(),
        "state": own_state(),
        "path": _path(),
        "preload": [],
        "descriptors": _inheritable(),
        **more,
    }


def _fork(
    kind: str, environ: Mapping[str, str], *descriptors: int, **more: Any
) -> tuple[socket.socket, int] | None:
    """Return the connection to a warm process and the process id of its fork; None to start cold."""
    try:
        found = find_sockets(environ)
    except UsageError as error:
        say(f"{error} This start is cold.")
        return None
    if not found:
        return None
    request = _request(kind, environ, **more)
    reasons = []
    for path in found:
        connection = _connect(path)
        answer = connection and ask(connection, request)
        if not connection or not answer:
            # `_connect` has removed the socket of a process that was killed.
            reasons += [_silence(path)] if path.exists() else []
        elif answer["refused"]:
            renews = "; it renews itself" if answer["is_stale"] else ""
            reasons.append(f"{answer['refused']}{renews}")
        elif started := _start(connection, [*request["descriptors"], *descriptors]):
            return connection, started
        if connection:
            connection.close()
    # Several warm processes may refuse; the newest one's reason is the most useful.
    if reasons and not _is_cold_program():
        say(f"warm: {reasons[0]}; this start is cold")
    return None


def _start(connection: socket.socket, descriptors: list[int]) -> int | None:
    with contextlib.suppress(OSError):
        send_descriptors(connection, descriptors)
        if answer := receive(connection):
            pid: int = answer["pid"]
            return pid
    return None


def _is_cold_program() -> bool:
    """Return whether ``polyxla run`` has already reported, before this process, that the start is cold."""
    # Options of Python may come before it.
    return script.__name__ in sys.orig_argv


def _pid(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _silence(path: Path) -> str:
    """Describe why a warm process does not answer, and what to do."""
    pid = _pid(path)
    if is_stopped(pid):
        return f"process {pid} is stopped (kill -CONT {pid} continues it, kill -KILL {pid} ends it)"
    return f"process {pid} did not answer (kill -KILL {pid} ends it, and its jobs)"


def _connect(path: Path) -> socket.socket | None:
    # The kernel accepts connections for a stopped process, which never answers.
    if is_stopped(_pid(path)):
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_S)
    try:
        with reachable(path) as name:
            connection.connect(name)
        # Check again, beside the directory: the environment that is sent next may contain secrets.
        if peer_user(connection) == os.getuid():
            return connection
    except ConnectionRefusedError:
        # Its process was killed, which leaves the socket's file behind.
        path.unlink(missing_ok=True)
    except OSError:
        pass
    connection.close()
    return None


def _program_directory(program: Sequence[str]) -> str:
    """Return what the program will have first in `sys.path`."""
    if program[0] == "-m":
        return str(env.working_directory())
    path = Path(program[0]).resolve()
    return str(path if path.is_dir() else path.parent)


def _inheritable() -> list[int]:
    """Return the descriptors that a program would inherit, such as those of a shell's redirections."""
    numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    found = []
    for number in numbers:
        # The descriptor with which the directory was listed is closed by now.
        with contextlib.suppress(OSError):
            if os.get_inheritable(number):
                found.append(number)
    return found


class WarmProcess(Process):
    """A fork of a warm process, whose end the warm process reports."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._end: Exit | None = None

    def ended(self) -> Exit | None:
        """Return the end that was reported; never blocks."""
        if self._end is None and _has_message(self._connection):
            message = _receive(self._connection)
            self._end = Exit(message["exit"], message["peak_bytes"]) if message else _LOST
            self._connection.close()
        return self._end


def _has_message(connection: socket.socket) -> bool:
    # Not `select`, which takes descriptors below 1024 only, and a program may have more files open.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def follow(connection: socket.socket) -> NoReturn:
    """Pass on signals to a program until it ends, then end this process in the same way."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGIO})
    # A message then arrives as a signal, so that one call waits for both and reports who sent a signal.
    signal.signal(signal.SIGIO, lambda *_: None)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    while not _has_message(connection):
        received = signal.sigwaitinfo({*FORWARDED, signal.SIGIO})
        if received.si_signo != signal.SIGIO:
            _pass_on(connection, received.si_signo, received.si_code == _SI_KERNEL)
    message = _receive(connection)
    if message is None:
        say("error: the warm process has ended, and the program with it")
        sys.exit(1)
    _end_as(message["exit"])


def _pass_on(connection: socket.socket, number: int, is_for_group: bool) -> None:
    # A program in a process group that no shell knows is not stopped by SIGTSTP.
    is_stop = number == signal.SIGTSTP
    number = signal.SIGSTOP if is_stop else number
    # If the warm process has ended, so has the program: the caller's loop notices it.
    with contextlib.suppress(OSError):
        send(connection, signal=number, is_for_group=is_for_group or is_stop)
    if is_stop:
        # A shell sees its job stopped only if this process stops as well.
        os.kill(os.getpid(), signal.SIGSTOP)


def _end_as(code: int) -> NoReturn:
    if code < 0:
        # The program has written its core dump: this process must not write a second one.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _receive(connection: socket.socket) -> Message | None:
    try:
        return receive(connection)
    except OSError:
        return None
