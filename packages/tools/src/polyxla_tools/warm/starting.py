"""Starting a warm process, and waiting until it is ready."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from polyxla import PolyxlaError
from polyxla.plugin import env

READY_TIMEOUT_S = 300.0
"""Longest wait for a new warm process, which imports all modules, in seconds."""
_MAIN = "from polyxla_tools.warm.server import main; main()"


class NotReadyError(PolyxlaError):
    """The warm process could not be prepared."""


@dataclass(frozen=True)
class Options:
    """What a warm process is to prepare. It is sent as JSON.

    Attributes:
        runtime: the runtime's name.
        modules: names of the modules to import, beside the plugins.
        idle_s: time without a running job after which it ends, in seconds.
        ready: descriptor to which it writes that it is ready, or why not; -1 for none.
    """

    runtime: str
    modules: tuple[str, ...]
    idle_s: float
    ready: int = -1


def spawn(options: Options, environ: Mapping[str, str], directory: str) -> subprocess.Popen[bytes]:
    """Start a warm process in a session of its own, without a terminal."""
    command = [sys.executable, "-c", _MAIN, json.dumps(asdict(options))]
    nothing = subprocess.DEVNULL
    passed = [options.ready] if options.ready >= 0 else []
    return subprocess.Popen(
        command,
        env=dict(environ),
        cwd=directory,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        pass_fds=passed,
        start_new_session=True,
    )


def start(options: Options, environ: Mapping[str, str]) -> int:
    """Start a warm process and wait until it is ready; return its process id.

    Raises:
        NotReadyError: it cannot be prepared, or took longer than `READY_TIMEOUT_S`.
    """
    ours, theirs = os.pipe()
    try:
        options = Options(options.runtime, options.modules, options.idle_s, theirs)
        process = spawn(options, environ, str(env.working_directory()))
    finally:
        os.close(theirs)
    with os.fdopen(ours, encoding="utf-8") as ready, _killed_unless_ready(process):
        if not select.select([ready], [], [], READY_TIMEOUT_S)[0]:
            raise NotReadyError(f"the warm process was not ready within {READY_TIMEOUT_S:g} s")
        answer: dict[str, Any] = json.loads(ready.read() or "{}")
        if "pid" in answer:
            # It outlives this process, which must not warn that it has not waited for it.
            process.returncode = 0
            return process.pid
        problem = answer.get("problem", f"it ended while it imported {', '.join(options.modules)}")
        raise NotReadyError(f"no warm process could be prepared: {problem}")


@contextlib.contextmanager
def _killed_unless_ready(process: subprocess.Popen[bytes]) -> Any:
    try:
        yield
    except BaseException:
        process.kill()
        process.wait()
        raise
