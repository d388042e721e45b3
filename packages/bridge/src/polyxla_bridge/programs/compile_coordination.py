"""One compilation of each program per job: claims, results and heartbeats in a key-value store.

The store is that of jaxlib's distributed runtime; process 0 serves it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from polyxla_bridge.errors import PjrtError, as_pjrt_error

CHUNK_BYTES = 64 << 20
"""Largest value that is stored under one key, in bytes; a protocol buffer is limited to 2 GiB."""
HEARTBEAT_TIMEOUT_S = 30.0
"""Longest wait for the next heartbeat of a process that compiles for others, in seconds."""
_POLL_S = 1.0
_HEARTBEATS = "polyxla/heartbeats/"
_RETIRED = "polyxla/retired/"


@dataclass(frozen=True)
class Published:
    """A program that one process publishes for all.

    Attributes:
        data: the serialised program.
        is_hit: whether it came from the compilation cache.
    """

    data: bytes
    is_hit: bool


class CompileCoordinator:
    """Decides which process compiles a program, and distributes the result.

    The process that claims a program first compiles it, then stores either its chunks followed by an end
    record, or an end record with the error. The others poll for the end record.

    Args:
        link: jaxlib's connection to the store; keys live as long as the job.
        process: index of this process.
    """

    def __init__(self, link: Any, process: int) -> None:
        self._link = link
        self._process = process
        self._beats = 0

    def claim(self, fingerprint: str) -> bool:
        """Claim a program for this process to compile; return False if another process already has."""
        try:
            self._link.key_value_set(_key(fingerprint, "claim"), str(self._process))
        except Exception as error:
            if str(error).startswith("ALREADY_EXISTS"):
                return False
            raise
        return True

    def publish(self, fingerprint: str, program: Published) -> None:
        """Publish a claimed program to the processes that wait for it."""
        data = program.data
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._link.key_value_set_bytes(_key(fingerprint, str(number)), chunk, allow_overwrite=True)
        # Last, because a reader takes the chunks as complete once the end record exists.
        self._end(fingerprint, {"chunks": len(chunks), "is_hit": program.is_hit})

    def fail(self, fingerprint: str, error: BaseException) -> None:
        """Publish the error of a claimed program to the processes that wait for it."""
        failure = as_pjrt_error(error)
        self._end(fingerprint, {"code": failure.code, "message": failure.message})

    def _end(self, fingerprint: str, end: dict[str, Any]) -> None:
        self._link.key_value_set(_key(fingerprint, "end"), json.dumps(end), allow_overwrite=True)

    def wait(self, fingerprint: str) -> Published | None:
        """Wait for a program that another process compiles.

        Returns:
            The program; None if the heartbeat of the compiling process stopped.

        Raises:
            PjrtError: the program could not be compiled.
        """
        compiling = self._link.key_value_try_get(_key(fingerprint, "claim"))
        beat, seen = None, time.monotonic()
        while (end := self._get(_key(fingerprint, "end"), _POLL_S)) is None:
            now = time.monotonic()
            if (latest := self.heartbeats().get(compiling)) != beat:
                beat, seen = latest, now
            if now - seen > HEARTBEAT_TIMEOUT_S:
                return None
        if "message" in end:
            raise PjrtError(end["code"], end["message"])
        keys = [_key(fingerprint, str(number)) for number in range(end["chunks"])]
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

    def beat(self) -> None:
        """Publish a heartbeat: this process compiles or computes, so waiting for it is not a stall."""
        self._beats += 1
        self._link.key_value_set(f"{_HEARTBEATS}{self._process}", str(self._beats), allow_overwrite=True)

    def heartbeats(self) -> dict[str, str]:
        """Return the last heartbeat of each process, by its index; a process at work changes its own."""
        return {key.rpartition("/")[2]: value for key, value in self._link.key_value_dir_get(_HEARTBEATS)}

    def retire(self, replica: int) -> None:
        """Publish that a replica will run no more programs."""
        self._link.key_value_set(f"{_RETIRED}{replica}", "", allow_overwrite=True)

    def retired(self) -> frozenset[int]:
        """Return the replicas that will run no more programs."""
        return frozenset(int(key.rpartition("/")[2]) for key, _ in self._link.key_value_dir_get(_RETIRED))


def _key(fingerprint: str, name: str) -> str:
    return f"polyxla/programs/{fingerprint}/{name}"
