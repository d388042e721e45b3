"""The child's side of `polyxla.processes`: receive one job, run it, answer once."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from polyxla.errors import PolyxlaError, UsageError

REPLICA_THREAD = "polyxla-replica"
"""How the name of a thread begins that is a replica."""
PARENT_GONE = 3
"""Exit code of a child whose parent went away."""


@dataclass(frozen=True)
class Returned:
    """The job's result."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The exception that ended the job, and its traceback as text."""

    error: BaseException
    traceback: str


class ReplicaFailedError(PolyxlaError):
    """A replica raised an exception that cannot travel between processes; its text is here."""


def main() -> None:
    """Serve one job over the pipe whose descriptor is the first argument, then end."""
    pipe = Connection(int(sys.argv[1]))
    sys.argv[:] = [""]
    pipe.send_bytes(b"hello")
    payload = pipe.recv_bytes()
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    answer = _work(payload)
    pipe.send_bytes(_packed(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(answer, Raised) and _holds_replicas():
        # They wait in a collective for the one that failed; nothing but the end of the process stops them.
        os._exit(1)


def _holds_replicas() -> bool:
    return any(thread.name.startswith(REPLICA_THREAD) for thread in threading.enumerate())


def _end_with_parent(pipe: Connection) -> None:
    """Do not outlive the parent: nobody would stop this process or take its result."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(PARENT_GONE)


def _work(payload: bytes) -> Returned | Raised:
    try:
        job, place = cloudpickle.loads(payload)
        return Returned(job.run(place))
    except BaseException as error:
        return Raised(error, traceback.format_exc())


def _packed(answer: Returned | Raised) -> bytes:
    try:
        packed = bytes(cloudpickle.dumps(answer))
        if isinstance(answer, Raised):
            # An exception class with its own __init__ often pickles but does not load again.
            cloudpickle.loads(packed)
    except Exception as error:
        return bytes(cloudpickle.dumps(_in_words(answer, error)))
    return packed


def _in_words(answer: Returned | Raised, error: Exception) -> Raised:
    if isinstance(answer, Raised):
        text = "".join(traceback.format_exception_only(answer.error)).strip()
        return Raised(ReplicaFailedError(text), answer.traceback)
    refusal = UsageError(
        f"the function's result ({type(answer.value).__name__}) cannot be sent back: {error}",
        where="launch",
        fix="Return numbers, strings, CPU tensors, or collections of them.",
    )
    return Raised(refusal, "")
