"""What a process has from its surroundings: compared before a fork, or given to the fork."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
"""Names of the resource limits of this kernel."""
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def surroundings() -> dict[str, Any]:
    """Return what a fork cannot change, or what libraries read when they are loaded."""
    return {
        "interpreter with its flags": [sys.executable, sys.prefix, sys.version, list(sys.flags)],
        "user and groups": [os.getresuid(), os.getresgid(), sorted(os.getgroups())],
        "CPUs": sorted(os.sched_getaffinity(0)),
        "control group": Path("/proc/self/cgroup").read_text(),
        "namespaces": [str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES],
        "root directory": str(Path("/proc/self/root").readlink()),
        "stack limit": resource.getrlimit(resource.RLIMIT_STACK)[0],
    }


def own_state() -> dict[str, Any]:
    """Return what `take_state` gives to a fork: directory, limits, priority, signals."""
    return {
        "directory": str(Path.cwd()),
        "umask": _umask(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "ignored": [one for one in _signals() if signal.getsignal(one) is signal.SIG_IGN],
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def unreachable(state: Mapping[str, Any]) -> str | None:
    """Describe what this process may not give to a fork; None if it may give all of `state`."""
    for name, (_, hard) in state["limits"].items():
        own = resource.getrlimit(getattr(resource, name))[1]
        if own != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or hard > own):
            return f"its hard limit {name} is lower"
    if state["priority"] < os.getpriority(os.PRIO_PROCESS, 0):
        return "its priority is lower"
    return None


def take_state(state: Mapping[str, Any]) -> None:
    """Give this process, a fresh fork, the `state` of another."""
    os.chdir(state["directory"])
    os.umask(state["umask"])
    for name, limits in state["limits"].items():
        resource.setrlimit(getattr(resource, name), tuple(limits))
    os.setpriority(os.PRIO_PROCESS, 0, state["priority"])
    for one in _signals():
        handler = signal.SIG_IGN if one in state["ignored"] else signal.SIG_DFL
        # As Python does when it starts.
        usual = signal.default_int_handler if one == signal.SIGINT and handler is signal.SIG_DFL else handler
        signal.signal(one, usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, state["blocked"])


def _signals() -> list[signal.Signals]:
    fixed = {signal.SIGKILL, signal.SIGSTOP, *_IGNORED_BY_PYTHON}
    return [one for one in signal.Signals if one not in fixed]


def _umask() -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("Umask:")), 8)
