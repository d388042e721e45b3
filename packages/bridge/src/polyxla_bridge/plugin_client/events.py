"""Events: when something that a plugin does is done."""

from __future__ import annotations

from polyxla_bridge.plugin_client.plugin import Plugin


class Event:
    """An event of a plugin, which owns the object in C. One thread at a time may use it.

    Args:
        plugin: that made it.
        handle: the PJRT_Event.
    """

    __slots__ = ("_handle", "_plugin")

    def __init__(self, plugin: Plugin, handle: int) -> None:
        self._plugin = plugin
        self._handle = handle

    @property
    def is_ready(self) -> bool:
        """Whether it has happened, or failed."""
        ready: bool = self._plugin.call("Event_IsReady", event=self._handle).is_ready
        return ready

    def wait(self) -> None:
        """Wait without the GIL until it has happened. Call it once.

        Raises:
            PjrtError: it failed.
        """
        try:
            self._plugin.call("Event_Await", event=self._handle)
        finally:
            self.drop()

    def drop(self) -> None:
        """Release it without waiting."""
        self._plugin.call("Event_Destroy", event=self._handle)
