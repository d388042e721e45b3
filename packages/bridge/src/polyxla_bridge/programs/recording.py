"""A record of the programs that a process is asked to compile and execute, in a directory of files."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

HLO, OPTIONS, LOG = ".hlo", ".options", ".log"
"""Suffixes of a program, a serialised HloModuleProto as the framework has sent it; of its compile options, a
serialised CompileOptionsProto; and of a process's log, one JSON object per line."""


class ProgramRecorder:
    """Writes programs, and a log that reports when each was compiled and executed.

    A program and its options are stored under their fingerprint, once for all processes of the job. A line of
    the log has ``compiled``, a program's fingerprint, and ``stack``, the calls that led to the compilation
    (innermost first: file and line); or it has ``executed``, a program's fingerprint, and ``device``.

    Args:
        directory: where the files go; it is made if it does not exist.
        process: index of this process, which names its log.
    """

    def __init__(self, directory: Path, process: int) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._log = (directory / f"{process}{LOG}").open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def compiled(self, fingerprint: str, hlo: bytes, options: bytes) -> None:
        """Record a program that the calling thread is about to compile."""
        for suffix, data in ((HLO, hlo), (OPTIONS, options)):
            # Another process may be writing the same file, or reading it.
            temporary = self._directory / f".{threading.get_native_id()}{suffix}"
            temporary.write_bytes(data)
            temporary.replace(self._directory / f"{fingerprint}{suffix}")
        self._write({"compiled": fingerprint, "stack": list(_stack())})

    def executed(self, fingerprint: str, device: int) -> None:
        """Record an execution on one device."""
        self._write({"executed": fingerprint, "device": device})

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._log.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _stack() -> Iterator[tuple[str, int]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
