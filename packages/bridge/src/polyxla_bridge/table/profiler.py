"""The profiler extension of PJRT's function table: a framework's profile shows what the engine runs.

Without the extension, torch_xla warns in every process, and ends a process that takes a profile.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import c_char_p, c_void_p
from typing import Any

from polyxla_bridge import abi, native
from polyxla_bridge.table.handles import Bridge

_Call = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_log = logging.getLogger("polyxla.bridge")


class Profiler:
    """The extension. A process takes one profile at a time.

    Args:
        bridge: its engine is profiled, if it has started.
        next_extension: the address of the table's next extension.
    """

    def __init__(self, bridge: Bridge, next_extension: int | None = None) -> None:
        self._bridge = bridge
        self._profile = b""
        self._callbacks = {
            name: _Call(_guarded(function))
            for name, function in {
                "create": self._create,
                "start": self._start,
                "stop": self._stop,
                "collect_data": self._collect,
            }.items()
        }
        self._api = abi.ProfilerApi(struct_size=ctypes.sizeof(abi.ProfilerApi))
        for name in ("error_destroy", "error_message", "error_get_code", "destroy"):
            setattr(self._api, name, native.address("polyxla_nothing"))
        for name, callback in self._callbacks.items():
            setattr(self._api, name, ctypes.cast(callback, c_void_p).value)
        self._extension = abi.ProfilerExtension(profiler_api=ctypes.addressof(self._api))
        base = self._extension.base
        base.struct_size, base.type = ctypes.sizeof(abi.ProfilerExtension), abi.EXTENSION_TYPE_PROFILER
        base.next = next_extension

    @property
    def address(self) -> int:
        """The extension's address."""
        return ctypes.addressof(self._extension)

    def silence(self) -> None:
        """Replace each Python function by a C function that does nothing."""
        for name in self._callbacks:
            setattr(self._api, name, native.address("polyxla_nothing"))

    def _create(self, args: int) -> None:
        # Any object but null.
        abi.ProfilerCreate.from_address(args).profiler = self.address

    def _start(self, args: int) -> None:
        self._profile = b""
        if self._bridge.is_started:
            self._bridge.engine.start_profile()

    def _stop(self, args: int) -> None:
        if self._bridge.is_started:
            self._profile = self._bridge.engine.stop_profile()

    def _collect(self, args: int) -> None:
        """Answer with the profile, which stays in memory until the next one."""
        data = abi.ProfilerCollectData.from_address(args)
        data.buffer = ctypes.cast(c_char_p(self._profile), c_void_p).value
        data.buffer_size_in_bytes = len(self._profile)


def _guarded(function: Callable[[int], None]) -> Callable[[int], None]:
    def entry(args: Any) -> None:
        try:
            function(args)
        except Exception:
            # No exception may reach C, and no profile is worth the end of a training.
            _log.warning("the profile lacks the operations of the devices", exc_info=True)

    return entry
