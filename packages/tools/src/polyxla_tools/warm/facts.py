"""The state that a process inherits: some of it is compared before a fork, the rest is given to the fork."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyxla.plugin import env

LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
"""Names of the resource limits of this kernel."""
_OF_ONE_PROCESS = (
    *("Name", "Umask", "State", "Tgid", "Ngid", "Pid", "PPid", "TracerPid", "FDSize", "NStgid", "NSpid"),
    *("NSpgid", "NSsid", "Kthread", "Vm", "Rss", "Hugetlb", "CoreDumping", "untag_mask", "Threads"),
    *("Sig", "Shd", "voluntary", "nonvoluntary"),
)
"""Prefixes of the fields of ``/proc/PID/status`` that differ between processes or that `take_state` gives.

All others are inherited, most likely even those that a later kernel adds.
"""
_FILES = {
    "control group": "cgroup",
    "personality": "personality",
    "adjustment of the out-of-memory score": "oom_score_adj",
    "timer slack": "timerslack_ns",
    "filter of core dumps": "coredump_filter",
    "login user": "loginuid",
    "security label": "attr/current",
}
_PRCTL = {
    "securebits": 27,
    "machine-check policy": 34,
    "I/O flusher flag": 58,
    "memory-write-execute flag": 66,
}
"""Numbers of the calls that return an inherited attribute. Source: ``linux/prctl.h``."""
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
"""Numbers of system calls that the C library does not wrap. Source: the tables of Linux's ``arch/``."""
_NODES = 1024
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def surroundings() -> dict[str, Any]:
    """Return what a fork inherits and cannot change, or what libraries read when they are loaded."""
    return {
        "interpreter with its flags": [sys.executable, sys.prefix, sys.version, list(sys.flags), *_options()],
        "user and groups": [os.getresuid(), os.getresgid(), sorted(os.getgroups())],
        "CPUs": sorted(os.sched_getaffinity(0)),
        "namespaces": {path.name: str(path.readlink()) for path in sorted(Path("/proc/self/ns").iterdir())},
        "root directory": str(Path("/proc/self/root").readlink()),
        "stack limit": resource.getrlimit(resource.RLIMIT_STACK)[0],
        "scheduling policy": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "autogroup's priority": autogroup_priority(_read("autogroup")),
        **{name: _read(file) for name, file in _FILES.items()},
        **_status(),
        **_by_calls(),
    }


def _options() -> list[Any]:
    """Return the options of Python that are not among its flags: those of -W, -X and -u."""
    is_unbuffered = sys.__stdout__ is not None and sys.__stdout__.write_through
    return [sys.warnoptions, sys._xoptions, is_unbuffered]  # noqa: SLF001


def _read(file: str) -> str | None:
    try:
        return Path("/proc/self", file).read_text()
    except OSError:
        return None


def autogroup_priority(text: str | None) -> str:
    """Return the nice value of a session's share of the CPU.

    Args:
        text: content of ``/proc/PID/autogroup``. It is empty for a process outside of any session's group, as
            in some containers, although its children in new sessions have one; None without the file.
    """
    return (text or "").partition("nice")[2].strip() or "0"


def _status() -> dict[str, str]:
    """Return what is inherited of ``/proc/self/status``: capabilities, no_new_privs, seccomp and others."""
    fields = (line.partition(":") for line in (_read("status") or "").splitlines())
    return {
        f"{name} of /proc/self/status": value.strip()
        for name, _, value in fields
        if not name.startswith(_OF_ONE_PROCESS)
    }


def _by_calls() -> dict[str, Any]:
    # Python has no functions for these.
    libc, machine = ctypes.CDLL(None), platform.machine()
    found: dict[str, Any] = {name: libc.prctl(number, 0, 0, 0, 0) for name, number in _PRCTL.items()}
    if number := _IOPRIO_GET.get(machine):
        found["I/O priority"] = libc.syscall(number, 1, 0)
    if number := _GET_MEMPOLICY.get(machine):
        mode, nodes = ctypes.c_int(-1), (ctypes.c_ubyte * (_NODES // 8))()
        libc.syscall(number, ctypes.byref(mode), nodes, ctypes.c_ulong(_NODES), None, ctypes.c_ulong(0))
        found["NUMA memory policy"] = [mode.value, bytes(nodes).hex()]
    return found


def own_state() -> dict[str, Any]:
    """Return what `take_state` gives to a fork: directory, limits, priority, signals."""
    return {
        "directory": str(env.working_directory()),
        "umask": _umask(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "ignored": [number for number in _signals() if signal.getsignal(number) is signal.SIG_IGN],
        # Blocking no further signal returns the mask unchanged.
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def unreachable(state: Mapping[str, Any]) -> str | None:
    """Describe what this process may not give to a fork; None if it may give all of `state`."""
    # A process may lower its hard limits and raise its niceness, but never the reverse.
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
    for number in _signals():
        handler = signal.SIG_IGN if number in state["ignored"] else signal.SIG_DFL
        # Python starts with its own handler of SIGINT, unless the signal is ignored.
        usual = (
            signal.default_int_handler if number == signal.SIGINT and handler is signal.SIG_DFL else handler
        )
        signal.signal(number, usual)
    # Last, so that a pending signal that the mask lets through finds the program's handler.
    signal.pthread_sigmask(signal.SIG_SETMASK, state["blocked"])


def _signals() -> list[signal.Signals]:
    fixed = {signal.SIGKILL, signal.SIGSTOP, *_IGNORED_BY_PYTHON}
    return [number for number in signal.Signals if number not in fixed]


def _umask() -> int:
    # `os.umask` can only be read by setting it, which other threads would notice.
    for line in (_read("status") or "").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    # Not all sandboxes list it.
    os.umask(mask := os.umask(0o077))
    return mask
