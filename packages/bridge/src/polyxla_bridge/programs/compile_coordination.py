"""What the job's processes tell each other, through the key-value store of jaxlib's distributed runtime."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from polyxla_bridge.errors import PjrtError, as_pjrt_error

CHUNK_BYTES = 64 << 20
"""Largest value that is sent at once; a protocol buffer ends at 2 GiB."""
PATIENCE_S = 30.0
"""How long a process that compiles for others may give no sign of life, in seconds."""
_POLL_S = 1.0
_SIGNS = "polyxla/signs/"


@dataclass(frozen=True)
class Published:
    """A program that one process has made for all.

    Attributes:
        data: the serialised program.
        is_hit: whether it had been kept by an earlier job.
    """

    data: bytes
    is_hit: bool


class Board:
    """Claims, compiled programs and signs of life.

    Args:
        link: jaxlib's connection; its store forgets nothing before the job ends.
        process: this process's number.
    """

    def __init__(self, link: Any, process: int) -> None:
        self._link = link
        self._process = process
        self._count = 0

    def claim(self, fingerprint: str) -> bool:
        """Take a program to compile; return whether nobody else had."""
        try:
            self._link.key_value_set(_key(fingerprint, "claim"), str(self._process))
        except Exception as error:
            if str(error).startswith("ALREADY_EXISTS"):
                return False
            raise
        return True

    def publish(self, fingerprint: str, program: Published) -> None:
        """Give a program to whoever waits for it."""
        data = program.data
        parts = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        for number, part in enumerate(parts):
            self._link.key_value_set_bytes(_key(fingerprint, str(number)), part, allow_overwrite=True)
        self._end(fingerprint, {"parts": len(parts), "is_hit": program.is_hit})

    def fail(self, fingerprint: str, error: BaseException) -> None:
        """Tell whoever waits for a program why there is none."""
        why = as_pjrt_error(error)
        self._end(fingerprint, {"code": why.code, "message": why.message})

    def _end(self, fingerprint: str, end: dict[str, Any]) -> None:
        self._link.key_value_set(_key(fingerprint, "end"), json.dumps(end), allow_overwrite=True)

    def wait(self, fingerprint: str) -> Published | None:
        """Return the program that another process compiles; None if that one gives no more sign of life.

        Raises:
            PjrtError: it could not be compiled.
        """
        compiling = self._link.key_value_try_get(_key(fingerprint, "claim"))
        sign, seen = None, time.monotonic()
        while (end := self._get(_key(fingerprint, "end"), _POLL_S)) is None:
            now = time.monotonic()
            if (latest := self.signs().get(compiling)) != sign:
                sign, seen = latest, now
            if now - seen > PATIENCE_S:
                return None
        if "message" in end:
            raise PjrtError(end["code"], end["message"])
        keys = [_key(fingerprint, str(number)) for number in range(end["parts"])]
        data = b"".join(self._link.key_value_try_get_bytes(key) for key in keys)
        return Published(data, end["is_hit"])

    def _get(self, key: str, timeout_s: float) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._link.blocking_key_value_get(key, int(timeout_s * 1000)))
        except Exception as error:
            if str(error).startswith("DEADLINE_EXCEEDED"):
                return None
            raise
        return found

    def sign(self) -> None:
        """Show the others that this process is at work, though nothing comes of it yet."""
        self._count += 1
        self._link.key_value_set(f"{_SIGNS}{self._process}", str(self._count), allow_overwrite=True)

    def signs(self) -> dict[str, str]:
        """Return each process's last sign; one that changes is one that works."""
        return {key.rpartition("/")[2]: value for key, value in self._link.key_value_dir_get(_SIGNS)}


def _key(fingerprint: str, name: str) -> str:
    return f"polyxla/programs/{fingerprint}/{name}"
