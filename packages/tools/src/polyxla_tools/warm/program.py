"""Turning a fresh fork of the warm process into the process that a client asked for."""

from __future__ import annotations

import fcntl
import importlib
import io
import multiprocessing.process
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyxla.plugin import (
    end_process,
    end_with_parent,
    env,
    find_runtime,
    fork_server,
    load_runtime,
    say_once,
    script,
)
from polyxla_tools.warm.facts import take_state

_FREE_DESCRIPTOR = 512
"""From here on, descriptors are free."""


def become_program(request: Mapping[str, Any], descriptors: Sequence[int], path: Sequence[str]) -> None:
    """Run the program of a request as ``python -m polyxla.cli.script`` would, and end with it.

    Args:
        request: what the client sent.
        descriptors: those that came with it.
        path: entries of `sys.path` that every program has.
    """
    # The warm process passes on signals and reports the end. A program without it could not be ended.
    end_with_parent()
    _take(request, descriptors)
    command = request["command"]
    # Change the lists in place, because other modules have imported them.
    sys.orig_argv[:] = command
    sys.argv[:] = [str(script.__file__), *command[3:]]
    by_imports = [entry for entry in sys.path if entry not in path]
    sys.path[:] = [*([] if sys.flags.safe_path else [str(Path.cwd())]), *path, *by_imports]
    try:
        script.main()
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    end_process(code)


def _exit_code(error: SystemExit) -> int:
    """Return the exit code of a program that raises `error`; print its text, as Python does."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def become_fork_server(
    request: Mapping[str, Any],
    descriptors: Sequence[int],
    adapt: Callable[[dict[str, str]], dict[str, str]],
) -> None:
    """Serve the socket that is the last descriptor, as `polyxla.launcher.fork_server` does."""
    *others, control = descriptors
    number = fcntl.fcntl(control, fcntl.F_DUPFD_CLOEXEC, _first_free())
    os.close(control)
    _take(request, others)
    fork_server.leave_interrupts()
    fork_server.serve(socket.socket(fileno=number), adapt)


def _take(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    # Signals to the client's group must reach the program by the client only, once.
    os.setpgid(0, 0)
    _place(descriptors, request["descriptors"])
    take_state(request["state"])
    _open_standard_streams()
    env.replace_environ(request["environ"])
    # Renew what Python and NumPy drew or noted at import. Python's `random` reseeds itself after a fork.
    process: Any = multiprocessing.process
    process.current_process().authkey = os.urandom(32)
    process.ORIGINAL_DIR = str(Path.cwd())
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    importlib.invalidate_caches()
    # The warm process has no terminal: what it printed once must be printed again.
    say_once.cache_clear()
    load_runtime(find_runtime(request["runtime"], "default")).hook.polyxla_forked()


def _first_free() -> int:
    limit = os.sysconf("SC_OPEN_MAX")
    return min(_FREE_DESCRIPTOR, limit // 2)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give received descriptors the numbers that they have in the client."""
    # Move them away first: a number that the client uses may belong to another received descriptor.
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _first_free()) for descriptor in descriptors]
    for descriptor in [*descriptors, *({0, 1, 2} - set(numbers))]:
        os.close(descriptor)
    for descriptor, number in zip(aside, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _open_standard_streams() -> None:
    """Make `sys.stdin` and the others anew: their buffering depends on what they are."""
    sys.stdin = sys.__stdin__ = _stream(0, "<stdin>", sys.__stdin__)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "<stdout>", sys.__stdout__)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "<stderr>", sys.__stderr__)  # type: ignore[misc]


def _stream(number: int, name: str, like: Any) -> Any:
    """Return a standard stream as Python makes it, with the encoding of `like`; None if it is closed.

    Source: create_stdio of Python's Python/pylifecycle.c.
    """
    try:
        os.fstat(number)
    except OSError:
        return None
    is_unbuffered = like.write_through
    mode = "rb" if number == 0 else "wb"
    # closefd=False: closing `sys.stdout` must not free descriptor 1 for another file.
    binary: Any = open(number, mode, buffering=0 if is_unbuffered and number else -1, closefd=False)  # noqa: SIM115
    raw = getattr(binary, "raw", binary)
    raw.name = name
    text = io.TextIOWrapper(
        binary,
        encoding=like.encoding,
        errors=like.errors,
        newline=None if number == 0 else "\n",
        line_buffering=not is_unbuffered and (number == 2 or raw.isatty()),
        write_through=is_unbuffered,
    )
    text.mode = "r" if number == 0 else "w"  # type: ignore[misc]
    return text
