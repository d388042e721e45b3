"""The fork server's own side: import, fork, report how each process ends, end with the last.

Between the import and the forks nothing runs that starts a thread, since only the forking thread lives
on in a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from polyxla import child


def main() -> None:
    """Serve the pipes whose descriptors are the second argument: control first, then one for each process."""
    control, *ends = [Connection(number) for number in json.loads(sys.argv[2])]
    # A terminal's Ctrl-C goes to every process; the parent ends what is to be ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in json.loads(sys.argv[3]):
        importlib.import_module(name)
    pids = []
    for end in ends:
        pid = os.fork()
        if pid == 0:
            _be_child(end, [control, *ends])
            return
        pids.append(pid)
    # A pipe must close with its process.
    for end in ends:
        end.close()
    _report(control, pids)


def _be_child(mine: Connection, inherited: Sequence[Connection]) -> None:
    for end in inherited:
        if end is not mine:
            end.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    child.serve(mine)


def _report(control: Connection, pids: list[int]) -> None:
    living = {pid: index for index, pid in enumerate(pids)}
    # A parent that is gone needs no report; its children end by themselves.
    with contextlib.suppress(OSError):
        control.send(pids)
        while living:
            pid, status, usage = os.wait4(-1, 0)
            control.send((living.pop(pid), os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024))
