"""The process that owns a job, as it is shown to users whose jobs wait for its cores."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from dataclasses import dataclass

_MAX_COMMAND_CHARS = 200


@dataclass(frozen=True)
class JobOwner:
    """The process that owns a job.

    Attributes:
        host: the name of its host.
        pid: its process id there.
        user: the user that runs it.
        command: its command line.
    """

    host: str
    pid: int
    user: str
    command: str

    @classmethod
    def current(cls) -> JobOwner:
        """Return the current process as an owner."""
        # The worker refuses texts that are too long, because they appear in the errors of other jobs.
        command = _encodable(" ".join(sys.argv))[:_MAX_COMMAND_CHARS] or "python"
        return cls(_encodable(socket.gethostname()), os.getpid(), _encodable(_user()), command)


def _encodable(text: str) -> str:
    """Return a text with escapes for bytes that are not UTF-8, which messages cannot have."""
    return text.encode(errors="backslashreplace").decode()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # In a container a user id may have no name.
        return str(os.getuid())
