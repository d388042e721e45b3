"""The client of a plugin: its devices, and the objects that must be destroyed before it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyxla_bridge import abi
from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.plugin_client.plugin import (
    NamedValues,
    Option,
    Plugin,
    read_array,
    read_text,
    read_values,
)

DESTRUCTORS = {
    "Executable_Destroy": "executable",
    "LoadedExecutable_Destroy": "executable",
    "Buffer_Destroy": "buffer",
}
"""The functions that destroy a client's objects, and the name of their argument."""


@dataclass(frozen=True)
class PluginDevice:
    """A device of a client.

    Attributes:
        handle: the PJRT_Device.
        id: its number in the plugin, which device assignments use.
        process_index: the process that drives it.
        is_local: whether that is this process.
        kind: such as ``TPU v4``.
        attributes: of its description; on a TPU ``coords`` and ``core_on_chip``.
    """

    handle: int
    id: int
    process_index: int
    is_local: bool
    kind: str
    attributes: Mapping[str, Any]


class PluginClient:
    """A client. Any thread may use it.

    Args:
        plugin: that makes the client.
        options: the plugin's own options for a client.

    Attributes:
        plugin: that made the client.
        platform: such as ``cpu`` or ``tpu``.
        platform_version: the plugin's version in its own words.
        devices: all devices, by id; a share's in its own order.

    Raises:
        PjrtError: the plugin refuses an option, or finds no devices.
    """

    def __init__(self, plugin: Plugin, options: Mapping[str, Option]) -> None:
        self.plugin = plugin
        self.handle = _create(plugin, options)
        self._own_nothing()
        self._is_share = False
        name = plugin.call("Client_PlatformName", client=self.handle)
        self.platform = read_text(name.platform_name, name.platform_name_size)
        version = plugin.call("Client_PlatformVersion", client=self.handle)
        self.platform_version = read_text(version.platform_version, version.platform_version_size)
        found = plugin.call("Client_Devices", client=self.handle)
        every = [self._device(handle) for handle in read_array(found.devices, found.num_devices)]
        self.devices = tuple(sorted(every, key=lambda device: device.id))

    def _own_nothing(self) -> None:
        # The handles of the objects to destroy before the client, by destructor, in the order of `close`.
        self._alive: dict[str, set[int]] = {name: set() for name in DESTRUCTORS}
        self._is_closed = False
        self._lock = threading.Lock()

    def share(self, count: int | None = None) -> PluginClient:
        """Return some devices as a client whose end destroys its own objects only.

        A program compiled by the share is for these devices. Close all shares before this client.

        Args:
            count: number of its devices, the first of this process; None for those of all processes, ordered
                by process: each process then has consecutive ones, wherever its devices are.
        """
        # The copy has the same handle in the plugin, and gets objects, devices and a lock of its own.
        share = copy.copy(self)
        share._become_share(count)  # noqa: SLF001  (of the same class)
        return share

    def _become_share(self, count: int | None) -> None:
        self._own_nothing()
        self._is_share = True
        if count is None:
            self.devices = tuple(sorted(self.devices, key=lambda device: (device.process_index, device.id)))
        else:
            self.devices = tuple(device for device in self.devices if device.is_local)[:count]

    def _device(self, handle: int) -> PluginDevice:
        call = self.plugin.call
        description = call("Device_GetDescription", device=handle).device_description
        kind = call("DeviceDescription_Kind", device_description=description)
        attributes = call("DeviceDescription_Attributes", device_description=description)
        return PluginDevice(
            handle,
            call("DeviceDescription_Id", device_description=description).id,
            call("DeviceDescription_ProcessIndex", device_description=description).process_index,
            call("Device_IsAddressable", device=handle).is_addressable,
            read_text(kind.device_kind, kind.device_kind_size),
            read_values(attributes.attributes, attributes.num_attributes),
        )

    @property
    def process_index(self) -> int:
        """Index of this process among those that have the client's devices."""
        index: int = self.plugin.call("Client_ProcessIndex", client=self.handle).process_index
        return index

    def memory_stats(self, device: PluginDevice) -> dict[str, int] | None:
        """Return a device's memory counters under PJRT's names; None if the plugin has none.

        Raises:
            PjrtError: the plugin has some, and cannot read them.
        """
        try:
            found = self.plugin.call("Device_MemoryStats", device=device.handle)
        except PjrtError as error:
            # The plugin lacks the function, or its client counts no memory, such as XLA's CPU client.
            if error.code == Code.UNIMPLEMENTED:
                return None
            raise
        known = {name: getattr(found, name) for name in abi.DEVICE_STATS if getattr(found, f"{name}_is_set")}
        return {"bytes_in_use": found.bytes_in_use, **known}

    def own(self, destroy: str, handle: int) -> None:
        """Keep an object's handle, to destroy the object before the client.

        Args:
            destroy: name of the function that destroys it.
            handle: the object's.
        """
        self._alive[destroy].add(handle)

    def destroy(self, destroy: str, handle: int) -> None:
        """Destroy an object, unless `close` has."""
        # The garbage collector may call this anywhere, so it takes no lock: a set's `remove` is atomic.
        try:
            self._alive[destroy].remove(handle)
        except KeyError:
            return
        self.plugin.call(destroy, **{DESTRUCTORS[destroy]: handle})

    @property
    def live_buffers(self) -> int:
        """Number of buffers that exist."""
        return len(self._alive["Buffer_Destroy"])

    def check_open(self) -> None:
        """Check that the client exists.

        Raises:
            PjrtError: it was closed.
        """
        if self._is_closed:
            raise PjrtError(Code.FAILED_PRECONDITION, f"the client of {self.plugin.path} was closed")

    def close(self) -> None:
        """Destroy the programs, then the buffers, then the client, unless it is a share of another.

        A second call does nothing.

        Nothing may run, and no other thread may use the client.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        # The garbage collector may destroy objects at the same time, so the sets are not iterated.
        for destroy, handles in self._alive.items():
            while handles:
                self.destroy(destroy, next(iter(handles)))
        if not self._is_share and self.plugin.has("Client_Destroy"):
            self.plugin.call("Client_Destroy", client=self.handle)


def _create(plugin: Plugin, options: Mapping[str, Option]) -> int:
    values = NamedValues(options)
    try:
        made = plugin.call("Client_Create", create_options=values.address, num_options=values.count)
    except PjrtError as error:
        given = f" with the options {dict(options)}" if options else ""
        raise PjrtError(
            error.code, f"the plugin {plugin.path} found no devices that it can use{given}: {error.message}"
        ) from error
    handle: int = made.client
    return handle
