"""The processes that a host runs: the command with everything that it starts, a worker, and tar."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from polyxla.plugin import end_with_parent
from polyxla_pod.tpu_nodes import TOKEN_FILE

_PR_SET_CHILD_SUBREAPER = 36
"""Source: ``linux/prctl.h``."""
KILLED_WITHIN_S = 2.0
"""Longest wait for processes to disappear after SIGKILL, in seconds."""
WORKER_END_S = 1.0
"""Time between SIGTERM and SIGKILL, in seconds: after the command, a worker has nothing to finish."""
SAID_BYTES = 4096
"""How much of tar's errors is kept: on a full disk, it prints the same for each file."""
_READ_BYTES = 1 << 16


def adopt_orphans() -> None:
    """Make this process the parent of its descendants that lose theirs, so that it can end them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class CommandGroup:
    """A running command and its descendants.

    Descendants that leave the process group, such as a daemon, are found as orphans; the process that makes
    this object must have called `adopt_orphans`, and must have no threads that hold locks.

    Args:
        command: the program and its arguments.
        environ: its whole environment.
        directory: its working directory; None for this process's.
        beside: children of this process that do not belong to the command.

    Raises:
        OSError: the program or the directory does not exist or cannot be used.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        directory: str | None,
        beside: Collection[int] = (),
    ) -> None:
        self._beside = beside
        self._process = subprocess.Popen(
            list(command),
            env=dict(environ),
            cwd=directory,
            # The launcher's messages come by this process's input, which the command must not read.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # If this process is killed with SIGKILL, only the kernel can end the command.
            preexec_fn=end_with_parent,  # noqa: PLW1509  it takes no lock
        )
        assert self._process.stdout
        assert self._process.stderr
        self.streams = {"out": self._process.stdout.fileno(), "err": self._process.stderr.fileno()}

    def poll(self) -> int | None:
        """Return the command's exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes that are left."""
        # The kernel does not reuse the group's number before the command is reaped and the last member ends.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
        for pid in self._orphans():
            # A descendant such as sudo belongs to another user, and must not protect the others.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def is_alive(self) -> bool:
        """Return whether the command or a descendant runs."""
        return self.poll() is None or bool(self._orphans())

    def kill(self) -> None:
        """End all processes with SIGKILL. Blocks for at most `KILLED_WITHIN_S`."""
        deadline = time.monotonic() + KILLED_WITHIN_S
        # Repeat, because each process that dies may leave further orphans.
        while self.is_alive() and time.monotonic() < deadline:
            self.signal(signal.SIGKILL)
            time.sleep(0.01)

    def _orphans(self) -> list[int]:
        """Return the descendants that were adopted and run; reap those that have ended."""
        # The kernel lists children by thread; a child belongs to the thread that started it.
        tasks = Path("/proc/self/task")
        found = []
        for task in tasks.iterdir():
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (task / "children").read_text().split()]
        alive = []
        for pid in found:
            if pid != self._process.pid and pid not in self._beside:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG) == (0, 0):
                        alive.append(pid)
        return alive


class WorkerProcess:
    """A running worker.

    The token is in memory that only this user can open, by a name that disappears with this process. It is on
    no command line, and leaves no file behind, however this process ends.

    Args:
        command: the program and its arguments, with `TOKEN_FILE` where the file's name belongs.
        environ: its whole environment.
        token: what clients must send.

    Attributes:
        pid: its process id.
        token_file: the file with the token.
        output: file descriptor of what it prints, on both streams.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], token: str) -> None:
        self._token = os.memfd_create("polyxla-token")
        os.fchmod(self._token, 0o600)
        # Each reader opens it by name, and so has a position of its own in the file.
        os.write(self._token, token.encode())
        self.token_file = f"/proc/{os.getpid()}/fd/{self._token}"
        self._process = subprocess.Popen(
            [part.replace(TOKEN_FILE, self.token_file) for part in command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # If this process is killed with SIGKILL, only the kernel can end the worker.
            preexec_fn=end_with_parent,  # noqa: PLW1509  it takes no lock
        )
        assert self._process.stdout
        self.pid, self.output = self._process.pid, self._process.stdout.fileno()
        self._kill_at_s: float | None = None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self, now_s: float) -> bool:
        """Ask the worker to end, kill it after `WORKER_END_S`, and return whether it has ended."""
        if self.poll() is not None:
            return True
        if self._kill_at_s is None:
            self._kill_at_s = now_s + WORKER_END_S
            self._process.terminate()
        elif now_s > self._kill_at_s:
            self.kill()
        return False

    def kill(self) -> None:
        """End the worker and its processes with SIGKILL. Blocks for at most `KILLED_WITHIN_S`."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            # A process that waits in the kernel, such as for a disk that does not answer, dies later.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_WITHIN_S)


class Unpacking:
    """A tar file that is unpacked while its parts arrive. No method blocks, whatever tar does.

    Args:
        directory: where the files go; it is made if it is missing.

    Attributes:
        input: file descriptor of tar's input: call `feed` when it takes data and `has_rest`.
        errors: file descriptor of tar's errors: call `listen` when it has data.
        is_complete: whether the last part has arrived.

    Raises:
        OSError: the directory cannot be made, or tar cannot be started.
    """

    def __init__(self, directory: Path) -> None:
        # tar requires that the directory exists.
        directory.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            ["tar", "-xzf", "-", "-C", str(directory)],  # noqa: S607  found by the PATH of the host
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The group also contains the decompressor that tar starts.
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  it takes no lock
        )
        assert self._process.stdin
        assert self._process.stderr
        self.input, self.errors = self._process.stdin.fileno(), self._process.stderr.fileno()
        # A full disk or a slow one blocks tar, which then takes no data; heartbeats must go on.
        os.set_blocking(self.input, False)
        self._parts: deque[bytes] = deque()
        self.is_complete = False
        self._said = b""

    @property
    def has_rest(self) -> bool:
        """Whether tar has not yet taken all that has arrived."""
        return bool(self._parts)

    def add(self, data: bytes, *, is_last: bool) -> None:
        """Receive a part of the file."""
        self._parts.append(data)
        self.is_complete = is_last

    def feed(self) -> int:
        """Give tar what it takes now; return how many parts it has taken whole."""
        count = 0
        try:
            while self._parts:
                if rest := self._parts[0][os.write(self.input, self._parts[0]) :]:
                    self._parts[0] = rest
                else:
                    self._parts.popleft()
                    count += 1
        except BlockingIOError:
            return count
        except BrokenPipeError:
            # tar has ended, and its exit code explains why. Discard what still arrives.
            count += len(self._parts)
            self._parts.clear()
        return count

    def close(self) -> None:
        """End tar's input."""
        assert self._process.stdin
        # Nothing is buffered in this file object: `feed` writes to its descriptor.
        self._process.stdin.close()

    def listen(self) -> bool:
        """Read tar's errors; return whether more may follow."""
        data = os.read(self.errors, _READ_BYTES)
        self._said = (self._said + data)[:SAID_BYTES]
        return bool(data)

    def poll(self) -> int | None:
        """Return tar's exit code; None while it runs."""
        return self._process.poll()

    @property
    def reason(self) -> str:
        """The first line of tar's errors."""
        lines = self._said.decode(errors="replace").strip().splitlines()
        return lines[0] if lines else "tar gave no reason"

    def kill(self) -> None:
        """End tar with SIGKILL, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
