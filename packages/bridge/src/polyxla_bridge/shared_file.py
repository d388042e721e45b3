"""A file in memory that the processes of a job share."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Self

Address = tuple[int, int, str]
"""Where processes of the same machine and user find a file: its owner's process, the owner's descriptor, and
the token at the end of the file."""
_TOKEN_BYTES = 16


class SharedFile:
    """A file without a path. The kernel frees it with the last process that uses it, however they end.

    Args:
        descriptor: of the file; the object closes it.
        size: of the content in bytes, without the token.
        token: by which others recognise the file.
    """

    def __init__(self, descriptor: int, size: int, token: str) -> None:
        self.descriptor = descriptor
        self.size = size
        self._token = token

    @classmethod
    def make(cls, name: str, size: int) -> Self:
        """Make a file of zeros.

        Args:
            name: what tools such as ``lsof`` show.
            size: in bytes.
        """
        descriptor, token = os.memfd_create(name), secrets.token_bytes(_TOKEN_BYTES)
        os.pwrite(descriptor, token, size)
        return cls(descriptor, size, token.hex())

    @classmethod
    def open(cls, address: Address, size: int) -> Self | None:
        """Open another process's file; None if it is on another machine, or another user's."""
        process, number, token = address
        # On another machine, a process may have the same number, with another file or none.
        with suppress(OSError, ValueError):
            descriptor = os.open(Path(f"/proc/{int(process)}/fd/{int(number)}"), os.O_RDWR | os.O_CLOEXEC)
            if os.pread(descriptor, _TOKEN_BYTES, size).hex() == token:
                return cls(descriptor, size, token)
            os.close(descriptor)
        return None

    @property
    def address(self) -> Address:
        """For `open`, as long as this process has the file open."""
        return os.getpid(), self.descriptor, self._token

    def close(self) -> None:
        """Close the file; what has it mapped keeps it."""
        os.close(self.descriptor)
