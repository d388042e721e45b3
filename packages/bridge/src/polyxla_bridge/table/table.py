"""``PJRT_Api``: filled before torch_xla opens the library, disabled before Python ends."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path
from typing import Any

from polyxla_bridge import abi, env, native
from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.table import calls_client, calls_executable
from polyxla_bridge.table.extensions import CrossHost, Profiler
from polyxla_bridge.table.handles import CALLS, Bridge, Call
from polyxla_bridge.table.tpu_topology import TpuTopology


class CallRecord:
    """Names of functions that were called, each once, in a file for each process.

    Functions in C are not recorded, because their threads must not wait for Python.

    Args:
        folder: where the files are; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[tuple[int, str]] = set()

    def add(self, name: str, is_missing: bool) -> None:
        """Record a call; `is_missing` says that the function was answered with "not implemented"."""
        # The process id is part of the key, because a fork inherits the set but writes a file of its own.
        process = os.getpid()
        if (process, name) not in self._known:
            self._known.add((process, name))
            with (self._folder / str(process)).open("a") as file:
                file.write(f"{name}{' missing' if is_missing else ''}\n")


def recorded(folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of the functions that were called, and of those that are missing."""
    lines = {line for file in folder.iterdir() for line in file.read_text().splitlines()}
    missing = {line.partition(" ")[0] for line in lines if line.endswith(" missing")}
    return {line for line in lines if not line.endswith(" missing")} | missing, missing


_log = logging.getLogger("polyxla.bridge")
_IMPLEMENTED = (calls_client, calls_executable)
"""Imported so that their functions register themselves in `CALLS`."""


class Table:
    """The function table of one bridge: functions in C if the library has them, else in Python.

    Args:
        bridge: passed to the Python functions.

    Attributes:
        holds_failures: whether a framework's thread whose call fails waits from now on for the end of the
            process. Set once no caller can act on the failure.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._topology = TpuTopology(bridge, native.address("polyxla_host_memory"))
        self._cross_host = CrossHost(bridge, self._topology.address)
        self._profiler = Profiler(bridge, self._cross_host.address)
        # The null pointers behind the table's end are for XLA's client in torch_tpu 0.2.0: it looks up
        # functions there without asking for the version, and would call whatever it found.
        self.api = abi.LaterApi(struct_size=ctypes.sizeof(abi.Api), extension_start=self._profiler.address)
        self.api.pjrt_api_version = abi.ApiVersion(
            struct_size=ctypes.sizeof(abi.ApiVersion), major_version=abi.MAJOR, minor_version=abi.MINOR
        )
        folder = env.own_environ().get(env.POLYXLA_BRIDGE_CALLS)
        record = CallRecord(Path(folder)) if folder else None
        self.holds_failures = False
        self._in_python: dict[str, Any] = {}
        for name, type_ in abi.CALLBACKS.items():
            address = native.address(f"PJRT_{name}")
            if address is None:
                self._in_python[name] = type_(self._guarded(bridge, name, record))
                address = ctypes.cast(self._in_python[name], ctypes.c_void_p).value
            setattr(self.api, name, address)
        # The table is never freed, because C++ calls it even after Python has freed all objects.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def silence(self) -> None:
        """Replace each Python function by a C function that does nothing.

        torch_xla destroys objects after Python has ended, and their destructors call the table.
        """
        for name in self._in_python:
            setattr(self.api, name, native.address("polyxla_nothing"))
        self._profiler.silence()
        self._cross_host.silence()
        self._topology.silence()

    def _guarded(self, bridge: Bridge, name: str, record: CallRecord | None) -> Any:
        function = CALLS.get(name, _unimplemented(name))

        def entry(args: Any) -> int | None:
            try:
                if record:
                    record.add(name, is_missing=name not in CALLS)
                function(bridge, args.contents)
            except BaseException as error:
                # No exception may reach C: ctypes would print it and return an undefined value.
                _log.debug("PJRT_%s failed", name, exc_info=True)
                # The engine was closed under the framework's threads, so their calls fail. A thread that
                # stops here cannot report such a failure before the process ends.
                if self.holds_failures and threading.get_ident() != threading.main_thread().ident:
                    threading.Event().wait()
                return bridge.error(error)
            return None

        return entry


def _unimplemented(name: str) -> Call:
    def refuse(bridge: Bridge, args: Any) -> None:
        raise PjrtError(Code.UNIMPLEMENTED, f"PJRT_{name} is not implemented by polyxla-bridge")

    return refuse
