"""The actor on a node: starts a program there, and passes its standard streams on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyxla_pod.ray import env

READ_BYTES = 1 << 20
"""Most bytes of one message."""
OUT_OF_REACH = ("setsid", "--fork", "--wait")
"""Makes the program a grandchild in a session of its own, and exits with its code. Source: ``man setsid``.

Ray kills an actor together with its process group and its children, but the program has to end its command.
"""
_TAIL_BYTES = 4096


@dataclass(frozen=True)
class Ending:
    """How the program ended.

    Attributes:
        code: its exit code, negative for a signal.
        said: the end of what it printed on standard error.
        outcome: what `polyxla_pod.ray.call` wrote; empty without a call, or if it wrote nothing.
    """

    code: int
    said: str
    outcome: bytes


class NodeActor:
    """Runs one program. Everything happens in the actor's event loop.

    The program is `polyxla_pod.host`, which ends the command when its input closes: also when this process
    is killed.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._said = b""
        self._reading: asyncio.Task[None] | None = None
        self._files: dict[str, int] = {}

    async def start(self, program: Sequence[str], call: bytes | None) -> None:
        """Start the program in the environment of the node's Ray, with this process's Python first in PATH.

        Args:
            program: the program and its arguments.
            call: a pickled call for `polyxla_pod.ray.call`; None without one.

        Raises:
            OSError: the program does not exist.
        """
        environ = node_environment()
        # This process may run in a virtual environment that Ray has made for the job.
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
        if call is not None:
            environ |= self._make_files(call)
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *OUT_OF_REACH, *program, env=environ, stdin=pipe, stdout=pipe, stderr=pipe
        )
        self._reading = asyncio.create_task(self._read_errors())

    async def read(self) -> bytes:
        """Wait for output of the program and return it; empty once it has closed its output."""
        assert self._process
        assert self._process.stdout
        return await self._process.stdout.read(READ_BYTES)

    async def write(self, data: bytes) -> None:
        """Pass data to the program's input; one that has ended ignores it."""
        assert self._process
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def close(self) -> None:
        """Close the program's input."""
        assert self._process
        assert self._process.stdin
        self._process.stdin.close()

    async def finish(self) -> Ending:
        """Wait for the program's end."""
        assert self._process
        assert self._reading
        code = await self._process.wait()
        await self._reading
        return Ending(code, self._said.decode(errors="replace"), self._outcome())

    async def _read_errors(self) -> None:
        assert self._process
        assert self._process.stderr
        while data := await self._process.stderr.read(READ_BYTES):
            # Keep reading, or the program would block on a full pipe.
            self._said = (self._said + data)[-_TAIL_BYTES:]

    def _make_files(self, call: bytes) -> dict[str, str]:
        """Make the files of the call; return the variables that name them.

        They are in memory and disappear with this process, even when it is killed.
        """
        # The program opens the files by paths in /proc, because it inherits no descriptors.
        for name in (env.POLYXLA_RAY_CALL, env.POLYXLA_RAY_OUTCOME):
            self._files[name] = os.memfd_create(name)
        with open(self._files[env.POLYXLA_RAY_CALL], "wb", closefd=False) as file:
            # Ray has added the driver's directory and the runtime environment's packages to the path here.
            pickle.dump((sys.path, call), file)
        return {name: f"/proc/{os.getpid()}/fd/{number}" for name, number in self._files.items()}

    def _outcome(self) -> bytes:
        number = self._files.get(env.POLYXLA_RAY_OUTCOME)
        return b"" if number is None else os.pread(number, os.fstat(number).st_size, 0)


def node_environment() -> dict[str, str]:
    """Return the environment in which Ray started this process.

    Since then Ray has limited OpenMP to one thread and chosen chips here, which the command does by itself.
    """
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}
