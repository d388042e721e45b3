"""Arrays on a plugin's devices, their way to and from the host, and the events that tell when it is done."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

from polyxla_bridge import abi
from polyxla_bridge.abi import DTYPES, HostBuffer, MemoryLayout, Tiled
from polyxla_bridge.plugin_client.client import PluginClient, PluginDevice
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


class DeviceArray:
    """An array on a device, which is destroyed with this object. It may not be computed yet.

    Args:
        client: of the device.
        handle: the PJRT_Buffer.
        size: its size on the host, dense, in bytes.
    """

    __slots__ = ("__weakref__", "_client", "handle", "size")

    def __init__(self, client: PluginClient, handle: int, size: int) -> None:
        self._client = client
        self.handle = handle
        self.size = size
        client.own("Buffer_Destroy", handle)

    def __del__(self) -> None:
        self._client.destroy("Buffer_Destroy", self.handle)

    def on_device_size_in_bytes(self) -> int:
        """Return the size on the device, as far as it is known without asking."""
        return self.size

    def ready(self) -> Event:
        """Return the event of its computation."""
        found = self._client.plugin.call("Buffer_ReadyEvent", buffer=self.handle)
        return Event(self._client.plugin, found.event)

    def address(self) -> int:
        """Return where the bytes are in this process's memory, once they are computed."""
        found: int = self._client.plugin.call("Buffer_UnsafePointer", buffer=self.handle).buffer_pointer
        return found

    @property
    def is_on_cpu(self) -> bool:
        """Whether the bytes are in the host's memory."""
        found: bool = self._client.plugin.call("Buffer_IsOnCpu", buffer=self.handle).is_on_cpu
        return found

    def copy(self, device: PluginDevice) -> DeviceArray:
        """Start to copy to another device of the client."""
        made = self._client.plugin.call(
            "Buffer_CopyToDevice", buffer=self.handle, dst_device=device.handle
        ).dst_buffer
        return DeviceArray(self._client, made, self.size)

    def read(self, rank: int, into: memoryview | None = None) -> tuple[memoryview, Event]:
        """Start to read the array, dense and row-major.

        Later programs may reuse its memory: the read comes first.

        Args:
            rank: number of dimensions.
            into: memory of the array's size, which must stay until the event; None for new memory.

        Returns:
            The host's memory, and the event after which it has the bytes.
        """
        view = memoryview(bytearray(self.size)) if into is None else into
        # There are no bytes to copy, but the event still tells whether the program failed.
        if not self.size:
            return view, self.ready()
        layout = _row_major(rank)
        found = self._client.plugin.call(
            "Buffer_ToHostBuffer",
            src=self.handle,
            # Without a layout, the plugin may write the elements in the device's own order.
            host_layout=ctypes.addressof(layout),
            dst=_address(view),
            dst_size=self.size,
        )
        return view, Event(self._client.plugin, found.event)


@functools.cache
def _row_major(rank: int) -> Any:
    order = (ctypes.c_int64 * max(rank, 1))(*range(rank - 1, -1, -1))
    tiled = Tiled(
        struct_size=ctypes.sizeof(Tiled),
        minor_to_major=ctypes.addressof(order),
        minor_to_major_size=rank,
    )
    layout = MemoryLayout(struct_size=ctypes.sizeof(MemoryLayout), type=abi.TILED)
    layout.layout.tiled = tiled
    # The struct holds only the address of the numbers, which must live as long.
    layout.order = order
    return layout


def put(
    client: PluginClient, device: PluginDevice, dtype: str, dims: tuple[int, ...], data: memoryview
) -> DeviceArray:
    """Copy dense row-major bytes to a device; the caller may reuse `data` after the call."""
    sizes = (ctypes.c_int64 * max(len(dims), 1))(*dims)
    size = math.prod(dims) * abi.width(dtype)
    if data.readonly:
        # ctypes takes no address of read-only memory, so it is copied. The copy must live through the call.
        data = memoryview(bytearray(data))
    made = client.plugin.call(
        "Client_BufferFromHostBuffer",
        client=client.handle,
        data=_address(data),
        type=DTYPES.index(dtype),
        dims=ctypes.addressof(sizes),
        num_dims=len(dims),
        host_buffer_semantics=HostBuffer.IMMUTABLE_ONLY_DURING_CALL,
        device=device.handle,
    )
    # The plugin copied the bytes during the call, even if they have not reached the device yet.
    Event(client.plugin, made.done_with_host_buffer).drop()
    return DeviceArray(client, made.buffer, size)


def _address(data: memoryview) -> int:
    if not data.nbytes:
        # Empty memory has no address. The plugin gets a valid one, which it does not read.
        return ctypes.addressof(_NOTHING)
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


_NOTHING = ctypes.c_int64()
