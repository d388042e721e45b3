"""Handles of processes, with which the launching process signals them and observes their end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

POLL_S = 0.01
"""How often to poll whether a process has ended, in seconds."""


def signal_name(number: int) -> str:
    """Return a signal's name; real-time signals, which have none, by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_stopped(pid: int) -> bool:
    """Return whether a process stands still, as after SIGSTOP or Ctrl-Z, or in a debugger."""
    try:
        return _stat(pid)[0] in "Tt"
    except OSError:
        return False


def is_ending(pid: int) -> bool:
    """Return whether a process has been killed or exits, and has not given back all its memory.

    Source: PF_EXITING in include/linux/sched.h, and the fields of stat and status in proc(5).
    """
    try:
        flags = int(_stat(pid)[6])
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    pending = re.findall(r"^S(?:ig|hd)Pnd:\t(\w+)$", status, re.MULTILINE)
    return bool(flags & 4) or any(int(mask, 16) >> signal.SIGKILL - 1 & 1 for mask in pending)


def _stat(pid: int) -> list[str]:
    """Return the fields of a process's ``/proc/PID/stat``, from its state on."""
    # The program's name precedes the state, in parentheses, and may contain blanks.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        code: its exit code; the negative number of the signal that ended it; None if it is unknown, because
            the program ignores SIGCHLD, or reaps the children of others.
        peak_bytes: its peak memory, shared pages included.
        server: process id of its fork server, if this is the end of that, which took it along.
    """

    code: int | None
    peak_bytes: int
    server: int | None = None

    def __str__(self) -> str:
        if self.server is not None:
            return f"ended with its fork server (pid {self.server}), which {replace(self, server=None)}"
        if self.code is None:
            return "ended with an unknown exit code, since the program ignores SIGCHLD or reaps all children,"
        if self.code >= 0:
            return f"exited with code {self.code}"
        how = f"was ended by {signal_name(-self.code)}"
        if self.code != -signal.SIGKILL:
            return how
        return (
            f"{how} (often the kernel, when memory runs out; its peak was {self.peak_bytes / 2**20:,.0f} MiB)"
        )


class Process(ABC):
    """A process that this one can signal, and whose end it observes.

    Attributes:
        pid: its process id; 0 until its fork server has forked it.
    """

    pid: int

    @abstractmethod
    def ended(self) -> Exit | None:
        """Return how it ended, or None while it is alive; never blocks."""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal if it is still alive."""
        # Reap first: the number of a reaped process may belong to another process by now.
        if self.ended() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, deadline: float) -> Exit | None:
        """Wait for its end until `time.monotonic()` reaches `deadline`; None if it is still alive then."""
        # wait4 has no time limit, and a handler of SIGCHLD would take the place of the user's.
        while (end := self.ended()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return end


class OwnProcess(Process):
    """A child of this process."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._popen = popen
        self._end: Exit | None = None

    def ended(self) -> Exit | None:
        """Poll with wait4, which also returns the peak memory."""
        if self._end is None:
            # The kernel tells exit code and memory once.
            try:
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._end = Exit(None, 0)
            else:
                if pid:
                    self._end = Exit(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
            if self._end and self._popen:
                # Popen would otherwise wait for the child, which has been reaped.
                self._popen.returncode = self._end.code or 0
        return self._end
