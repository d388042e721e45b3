"""A record of the programs that a process is asked to compile and execute, in a directory of files."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from polyxla_bridge.programs.executable import ArrayType

HLO, OPTIONS, LOG = ".hlo", ".options", ".log"
"""Suffixes of a program, a serialised HloModuleProto as the framework has sent it; of its compile options, a
serialised CompileOptionsProto; and of a process's log, one JSON object per line."""


class ProgramRecorder:
    """Writes programs, and a log that reports when each was compiled and executed.

    A program and its options are stored under their fingerprint, once for all processes of the job. A line of
    the log has ``compiled``, a program's fingerprint, and ``stack``, the calls that led to the compilation
    (innermost first: file and line). If another thread than the main one compiles, ``main`` has the calls in
    which the main thread is: TorchTPU compiles in threads of its own.

    Or a line has ``executed``, a program's fingerprint, ``device``, and ``in_use``, the bytes of all arrays
    of the device just before, the program's arguments included. If that is more than at the program's earlier
    executions there, ``arrays`` lists them: dtype, dimensions, and how many there are.

    Args:
        directory: where the files go; it is made if it does not exist.
        process: index of this process, which names its log.
    """

    def __init__(self, directory: Path, process: int) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._log = (directory / f"{process}{LOG}").open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        self._most: dict[tuple[str, int], int] = {}

    def compiled(self, fingerprint: str, hlo: bytes, options: bytes) -> None:
        """Record a program that the calling thread is about to compile."""
        for suffix, data in ((HLO, hlo), (OPTIONS, options)):
            # Another process may write the same file, or read it. A file appears complete when it is renamed.
            temporary = self._directory / f".{threading.get_native_id()}{suffix}"
            temporary.write_bytes(data)
            temporary.replace(self._directory / f"{fingerprint}{suffix}")
        line = {"compiled": fingerprint, "stack": list(_stack(sys._getframe()))}
        if threading.current_thread() is not threading.main_thread():
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            line["main"] = list(_stack(main))
        self._write(line)

    def executed(
        self, fingerprint: str, device: int, in_use: int, arrays: Callable[[], Iterable[ArrayType]]
    ) -> None:
        """Record an execution on one device.

        Args:
            fingerprint: the program's.
            device: index of the device.
            in_use: bytes of all its arrays.
            arrays: lists them.
        """
        line: dict[str, Any] = {"executed": fingerprint, "device": device, "in_use": in_use}
        # The list is for the program's peak, which only an execution with more memory in use can be.
        if in_use > self._most.get((fingerprint, device), -1):
            self._most[fingerprint, device] = in_use
            counts = Counter(arrays())
            line["arrays"] = [[type_.dtype, type_.dims, count] for type_, count in counts.items()]
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._log.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _stack(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
