"""Filling ``PJRT_Api`` with functions, and taking Python's out again before Python ends."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

from polyxla_bridge import native
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.table import abi, calls_buffer, calls_client, calls_executable
from polyxla_bridge.table.abi import Code
from polyxla_bridge.table.handles import CALLS, Bridge, Call

_log = logging.getLogger("polyxla.bridge")
_IMPLEMENTED = (calls_buffer, calls_client, calls_executable)
"""Imported because their functions register themselves in `CALLS`."""


class Table:
    """The function table of one bridge: C's functions, and Python's where C has none.

    Args:
        bridge: what Python's functions work on.
    """

    def __init__(self, bridge: Bridge) -> None:
        self.api = abi.Api(struct_size=ctypes.sizeof(abi.Api), extension_start=native.PROFILER)
        self.api.pjrt_api_version = abi.ApiVersion(
            struct_size=ctypes.sizeof(abi.ApiVersion), major_version=abi.MAJOR, minor_version=abi.MINOR
        )
        self._of_python: dict[str, Any] = {}
        for name in abi.FUNCTIONS:
            where = native.address(f"PJRT_{name}")
            if where is None:
                self._of_python[name] = abi.CALLBACKS[name](_guarded(bridge, name))
                where = ctypes.cast(self._of_python[name], ctypes.c_void_p).value
            setattr(self.api, name, where)
        # For ever: C++ looks into the table when Python has let go of everything.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def silence(self) -> None:
        """Put a C function that does nothing in place of each of Python's.

        torch_xla's own objects are destroyed after Python is gone, and destroying calls the table.
        """
        for name in self._of_python:
            setattr(self.api, name, native.address("polyxla_nothing"))


def _guarded(bridge: Bridge, name: str) -> Any:
    function = CALLS.get(name, _unimplemented(name))

    def entry(args: Any) -> int | None:
        try:
            function(bridge, args.contents)
        except BaseException as error:
            # No exception may cross into C: ctypes would print it and hand back garbage.
            _log.debug("PJRT_%s failed", name, exc_info=True)
            return bridge.error(error)
        return None

    return entry


def _unimplemented(name: str) -> Call:
    def refuse(bridge: Bridge, args: Any) -> None:
        raise PjrtError(Code.UNIMPLEMENTED, f"PJRT_{name} is not implemented by polyxla-bridge")

    return refuse
