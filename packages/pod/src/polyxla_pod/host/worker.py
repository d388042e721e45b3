"""A worker of runtime xrt that serves this host's command, and the file with its token."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from polyxla_pod.host.command_group import KILLED_WITHIN_S, end_with_parent
from polyxla_pod.tpu_nodes import TOKEN_FILE

END_S = 1.0
"""Time between SIGTERM and SIGKILL, in seconds: after the command, a worker has nothing to finish."""


class Worker:
    """A running worker.

    The token is in memory that only this process's user can open, by a name that is gone with this process.
    No command line has it, and no file is left, however this process ends.

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
        os.write(self._token, token.encode())
        self.token_file = f"/proc/{os.getpid()}/fd/{self._token}"
        self._process = subprocess.Popen(
            [part.replace(TOKEN_FILE, self.token_file) for part in command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # If this process is killed, nothing else could end the worker.
            preexec_fn=end_with_parent,  # noqa: PLW1509  it takes no lock
        )
        assert self._process.stdout
        self.pid, self.output = self._process.pid, self._process.stdout.fileno()
        self._kill_at_s: float | None = None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self, now_s: float) -> bool:
        """Ask the worker to end, and kill it `END_S` after the first call; return whether it has ended."""
        if self.poll() is not None:
            return True
        if self._kill_at_s is None:
            self._kill_at_s = now_s + END_S
            self._process.terminate()
        elif now_s > self._kill_at_s:
            self.kill()
        return False

    def kill(self) -> None:
        """End the worker and its processes with SIGKILL. Blocks for at most `KILLED_WITHIN_S`."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            # A process in the kernel, such as at a disk that does not answer, dies later.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_WITHIN_S)
