"""The processes that a warm process has forked, each with the connection of its client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass

from polyxla_tools.warm import messages


@dataclass(frozen=True)
class Job:
    """A forked process.

    Attributes:
        connection: its client's; the end of the process is reported there.
        is_program: whether it is a program, which ends with its client; fork servers see that themselves.
    """

    connection: socket.socket
    is_program: bool


class Jobs:
    """The running jobs, by process id."""

    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self.served = 0

    def __len__(self) -> int:
        return len(self._running)

    def add(self, pid: int, job: Job) -> None:
        """Add a process that has been forked, and report its process id."""
        self._running[pid] = job
        self.served += 1
        _report(job, pid=pid)

    def has(self, connection: socket.socket) -> bool:
        """Return whether a running job has this connection."""
        return any(job.connection is connection for job in self._running.values())

    def connections(self) -> list[socket.socket]:
        """Return the connections on which clients may send signals, or end."""
        return [job.connection for job in self._running.values() if job.connection.fileno() >= 0]

    def read(self, connection: socket.socket) -> None:
        """Pass on a signal from a client, or end its program because the client has ended."""
        pid, job = next(item for item in self._running.items() if item[1].connection is connection)
        try:
            message = messages.receive(connection)
        except OSError:
            message = None
        number = (message or {}).get("signal")
        # The process may just have ended, or be another user's.
        with contextlib.suppress(OSError, OverflowError):
            if message and isinstance(number, int):
                (os.killpg if message.get("is_for_group") else os.kill)(pid, number)
                return
            connection.close()
            if job.is_program:
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Report the jobs that have ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                # Another child is the successor of this process.
                if job := self._running.pop(pid, None):
                    code = os.waitstatus_to_exitcode(status)
                    _report(job, exit=code, peak_bytes=usage.ru_maxrss * 1024)
                    job.connection.close()

    def forget(self) -> None:
        """Close all connections, in a fork, so that clients see when they close."""
        for job in self._running.values():
            job.connection.close()


def _report(job: Job, **values: int) -> None:
    # A client that is gone needs no report.
    with contextlib.suppress(OSError):
        messages.send(job.connection, **values)
