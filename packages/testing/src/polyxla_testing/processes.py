"""Processes in tests: a fresh Python, and waits for processes and files. Replicas may import it too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

WAIT_S = 60.0
"""Longest wait for a condition, in seconds."""
POLL_S = 0.01
"""How often a condition is checked, in seconds."""


def printed_by(code: str) -> str:
    """Return what Python code prints in a fresh process, which has imported nothing of this one's."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    return done.stdout


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Block until `condition` holds.

    Args:
        condition: returns whether it holds; called every `POLL_S`.
        what: what is waited for, named in the error.
        timeout_s: the longest wait, in seconds.

    Raises:
        AssertionError: it does not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(POLL_S)


def kill_group_when(condition: Callable[[], bool], what: str, group: int, timeout_s: float = WAIT_S) -> None:
    """Block until `condition` holds, and kill the processes of a group before it changes.

    They are stopped while the condition is checked. If they ran between a check and the signal, they could
    pass the moment, since this process may have to wait for a core.

    Args:
        condition: returns whether it holds.
        what: what is waited for, named in the error.
        group: the id of the process group.
        timeout_s: the longest wait, in seconds.

    Raises:
        AssertionError: it does not hold in time; the processes run on.
    """

    def is_held() -> bool:
        if not condition():
            return False
        os.killpg(group, signal.SIGSTOP)
        # A call to the system that has begun is finished first.
        time.sleep(POLL_S)
        if condition():
            return True
        os.killpg(group, signal.SIGCONT)
        return False

    wait_until(is_held, what, timeout_s)
    os.killpg(group, signal.SIGKILL)


def wait_for_files(*paths: Path) -> None:
    """Block until every file exists."""
    wait_until(lambda: all(path.exists() for path in paths), f"files {', '.join(map(str, paths))}")


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return not is_in_state("Z", pid)
    except (ProcessLookupError, FileNotFoundError):
        # It may end between the two.
        return False


def is_in_state(state: str, pid: int) -> bool:
    """Return whether a process is in a state of ``/proc``, by its letter: ``T`` stopped, ``Z`` zombie."""
    return f"\nState:\t{state}" in Path(f"/proc/{pid}/status").read_text()


def wait_for_end_of(pids: Iterable[int]) -> None:
    """Block until none of the processes runs."""
    remaining = list(pids)
    wait_until(lambda: not any(map(is_alive, remaining)), f"the end of processes {remaining}")
