"""The processes on a host's TPU chips: which hold the chips, and which signals end a replica's.

The holders are found like lsof does, in the kernel's list of each process's open files. Nothing is opened or
locked, and nothing is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyxla.console import printable

PROC = Path("/proc")
"""Where Linux lists processes."""
DEV = Path("/dev")
"""Where Linux lists devices."""
LOCK_FILE = Path("/tmp/libtpu_lockfile")  # noqa: S108
"""What libtpu holds locked while a process uses the chips. The file itself stays behind and means nothing.

Source: libtpu's own message, which names it when the TPU is in use.
"""

_CHIP = re.compile(r"accel\d+|accel/accel\d+|vfio/\d+", re.ASCII)
"""A chip's file in ``/dev``: ``accel0``, or the number of its IOMMU group. Source: tpu-info, Ray."""
_COMMAND_LENGTH = 120
_IN_USE = ("already in use", "Couldn't open")
"""What libtpu's errors contain if another process has the chips. Source: libtpu 0.0.21."""


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
"""Source: ``linux/prctl.h``."""


@dataclass(frozen=True)
class Holder:
    """A process that has chips, or libtpu's lock file, open.

    Attributes:
        pid: its number.
        command: its command line, shortened.
        files: what it has open.
    """

    pid: int
    command: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}) has {', '.join(self.files)} open"


@contextmanager
def naming_holders(*, dev: Path = DEV, lock_file: Path = LOCK_FILE) -> Iterator[None]:
    """Add the processes that have the chips open to an error of a TPU that is in use.

    Processes with the parent of this one are left out: they are the other replicas of its job.
    """
    try:
        yield
    except RuntimeError as error:
        if any(text in str(error) for text in _IN_USE):
            parent = os.getppid()
            # The other replicas of this job have the same parent, and are not the reason.
            others = [parent, *_children(PROC / str(parent))]
            for holder in find_holders(but=others, dev=dev, lock_file=lock_file):
                error.add_note(str(holder))
        raise


def _children(process: Path) -> list[int]:
    try:
        return [int(pid) for pid in (process / "task" / process.name / "children").read_text().split()]
    except OSError:
        return []


def find_holders(
    *, but: Iterable[int] = (), proc: Path = PROC, dev: Path = DEV, lock_file: Path = LOCK_FILE
) -> tuple[Holder, ...]:
    """List the processes that have this host's chips open, by their numbers.

    Never raises: a process that ends during the search, or belongs to another user, is left out.

    Args:
        but: processes to leave out, such as the replicas of a job; the calling process always is.
        proc: where the kernel lists processes.
        dev: where the chips' files are.
        lock_file: libtpu's.
    """
    left_out = {os.getpid(), *but}
    pids = sorted(int(name) for name in _names(proc) if name.isdecimal())
    found = (
        Holder(pid, _command(proc / str(pid)), files)
        for pid in pids
        if pid not in left_out and (files := _open_files(proc / str(pid), dev, lock_file))
    )
    return tuple(found)


def _open_files(process: Path, dev: Path, lock_file: Path) -> tuple[str, ...]:
    links = {_target(process / "fd" / name) for name in _names(process / "fd")}
    return tuple(sorted(link for link in links if link == str(lock_file) or _is_chip(link, dev)))


def _is_chip(link: str, dev: Path) -> bool:
    return link.startswith(f"{dev}/") and _CHIP.fullmatch(link.removeprefix(f"{dev}/")) is not None


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    # Another user's process chooses its own command line, and could send control characters.
    command = printable(" ".join(words).strip()).replace("\n", "\\n") or "unknown command"
    return command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 3]}..."


def _names(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except OSError:
        return []


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends; also for the `preexec_fn` of a `Popen`.

    C++ code that hangs with the GIL held would live on, and keep its TPU chip.
    """
    # Loading a library between fork and exec could deadlock, so `_LIBC` is loaded with this module.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def sigterm_ends_quietly() -> Iterator[None]:
    """Keep libtpu, which starts in the context, from printing its stack at a SIGTERM of the launcher.

    libtpu 0.0.21 sets a handler of its own when it is initialized, in place of the default only. A
    handler in C ends the process even while the main thread is in C++.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    # Not Python's signal.signal: its handlers run only when the main thread is back in Python.
    before = libc.signal(signal.SIGTERM, ctypes.cast(libc["_exit"], ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGTERM, before)
