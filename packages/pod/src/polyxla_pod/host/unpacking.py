"""``--sync`` on a host: tar, which is fed as fast as it takes the data and never waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from pathlib import Path

from polyxla_pod.host.processes import end_with_parent

SAID_BYTES = 4096
"""How much of what tar says is kept: on a full disk, it says the same of each file."""
_READ_BYTES = 1 << 16


class Unpacking:
    """A tar file that is unpacked while its parts arrive. No method blocks, whatever tar does.

    Args:
        directory: where the files go; it is made if it is missing.

    Attributes:
        input: file descriptor of tar's input: `feed` when it takes data and `has_rest`.
        errors: file descriptor of what tar says: `listen` when there is something.
        is_complete: whether the last part has arrived.

    Raises:
        OSError: the directory cannot be made, or tar cannot be started.
    """

    def __init__(self, directory: Path) -> None:
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
        """Read what tar says; return whether it may say more."""
        data = os.read(self.errors, _READ_BYTES)
        self._said = (self._said + data)[:SAID_BYTES]
        return bool(data)

    def poll(self) -> int | None:
        """Return tar's exit code; None while it runs."""
        return self._process.poll()

    @property
    def reason(self) -> str:
        """What tar said first, in one line."""
        lines = self._said.decode(errors="replace").strip().splitlines()
        return lines[0] if lines else "tar gave no reason"

    def kill(self) -> None:
        """End tar with SIGKILL, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
