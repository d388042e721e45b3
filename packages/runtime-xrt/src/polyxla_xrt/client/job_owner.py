"""Who a job belongs to, for those who wait for its cores."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from dataclasses import dataclass

_COMMAND_CHARS = 200


@dataclass(frozen=True)
class Holder:
    """The process that a job belongs to.

    Attributes:
        host: where it runs.
        pid: its number there.
        user: whose it is.
        command: what it runs.
    """

    host: str
    pid: int
    user: str
    command: str

    @classmethod
    def own(cls) -> Holder:
        """Return this process."""
        command = " ".join(sys.argv)[:_COMMAND_CHARS] or "python"
        return cls(socket.gethostname(), os.getpid(), _user(), command)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # In a container there may be a number without a name.
        return str(os.getuid())
