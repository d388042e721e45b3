"""Filling ``PJRT_Api`` with Python functions, and taking them out again before Python ends."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

from polyxla_bridge import abi, calls_buffer, calls_client, calls_executable
from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.state import CALLS, Bridge, Call

_log = logging.getLogger("polyxla.bridge")
_IMPLEMENTED = (calls_buffer, calls_client, calls_executable)
"""Imported because their functions register themselves in `CALLS`."""


class Table:
    """The function table of one bridge.

    Args:
        bridge: what the functions work on.
        nothing: the address of a C function that takes a pointer and returns null.
    """

    def __init__(self, bridge: Bridge, nothing: int) -> None:
        self._nothing = nothing
        self._functions = {name: abi.CALLBACKS[name](_guarded(bridge, name)) for name in abi.FUNCTIONS}
        self.api = abi.Api(struct_size=ctypes.sizeof(abi.Api))
        self.api.pjrt_api_version = abi.ApiVersion(
            struct_size=ctypes.sizeof(abi.ApiVersion), major_version=abi.MAJOR, minor_version=abi.MINOR
        )
        for name, function in self._functions.items():
            setattr(self.api, name, ctypes.cast(function, ctypes.c_void_p).value)

    def silence(self) -> None:
        """Put a C function that does nothing in every place.

        torch_xla's own objects are destroyed after Python is gone, and destroying calls the table.
        """
        for name in self._functions:
            setattr(self.api, name, self._nothing)


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

    def entry_without_result(args: Any) -> None:
        try:
            function(bridge, args.contents)
        except BaseException:
            _log.exception("PJRT_%s failed", name)

    return entry_without_result if name in abi.RETURNS_NOTHING else entry


def _unimplemented(name: str) -> Call:
    def refuse(bridge: Bridge, args: Any) -> None:
        raise PjrtError(Code.UNIMPLEMENTED, f"PJRT_{name} is not implemented by polyxla-bridge")

    return refuse
