"""The client's side of a fork: pass signals on to it, and end as it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import sys
from typing import NoReturn

from polyxla.plugin import Exit, Process, say
from polyxla_tools.warm import messages

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


class WarmProcess(Process):
    """A fork of a warm process, whose end the warm process reports."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._end: Exit | None = None

    def ended(self) -> Exit | None:
        """Return the end that was reported; never blocks."""
        if self._end is None and select.select([self._connection], [], [], 0)[0]:
            message = _receive(self._connection)
            self._end = Exit(message["exit"], message["peak_bytes"]) if message else _LOST
        return self._end


def follow(connection: socket.socket) -> NoReturn:
    """Pass on signals to a program until it ends, then end this process in the same way."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGIO})
    # A message then comes as a signal, too: one call waits for everything, and says who sent a signal.
    signal.signal(signal.SIGIO, lambda *_: None)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    while not select.select([connection], [], [], 0)[0]:
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
    # If it has ended, so has the program, which is noticed next.
    with contextlib.suppress(OSError):
        messages.send(connection, signal=number, is_for_group=is_for_group or is_stop)
    if is_stop:
        os.kill(os.getpid(), signal.SIGSTOP)


def _end_as(code: int) -> NoReturn:
    if code < 0:
        # The program has written its core dump, if any.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _receive(connection: socket.socket) -> messages.Message | None:
    try:
        return messages.receive(connection)
    except OSError:
        return None
