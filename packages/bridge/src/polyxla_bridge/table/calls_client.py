"""PJRT functions for the client, its devices, their memories, and the buffers that need the engine.

The other functions for buffers are in native/buffers.c. The topology of a client, all devices of the job as a
compiler sees them, has the client's handle. There is no other topology: only clients compile, and
`TopologyDescription_Create` is not implemented.
"""

from __future__ import annotations

import ctypes
import json
import math
import platform
from typing import Any

from polyxla_bridge import abi
from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType
from polyxla_bridge.table.handles import ArrayTypes, Bridge, address, call, host_memory, read_array, text

MEMORY_KIND = "device"
"""Kind of a device's only memory."""


@call("Plugin_Initialize")
def plugin_initialize(bridge: Bridge, args: Any) -> None:
    pass


@call("Plugin_Attributes")
@call("TopologyDescription_Attributes")
def no_attributes(bridge: Bridge, args: Any) -> None:
    args.attributes, args.num_attributes = None, 0


@call("Client_Create")
def client_create(bridge: Bridge, args: Any) -> None:
    # torch_xla and JAX each create a client; the second gets a handle of its own for the same engine.
    bridge.start()
    args.client = bridge.handles.new(bridge)
    bridge.clients.add(args.client)


@call("Client_Destroy")
def client_destroy(bridge: Bridge, args: Any) -> None:
    bridge.handles.drop(args.client)
    bridge.clients.discard(args.client)
    # torch_xla and JAX may share the devices, each with a client of its own.
    if not bridge.clients:
        bridge.close()


@call("Client_PlatformName")
@call("TopologyDescription_PlatformName")
def client_platform_name(bridge: Bridge, args: Any) -> None:
    args.platform_name, args.platform_name_size = text(bridge.engine.platform)


@call("Client_ProcessIndex")
def client_process_index(bridge: Bridge, args: Any) -> None:
    args.process_index = bridge.engine.process_index


@call("Client_PlatformVersion")
@call("TopologyDescription_PlatformVersion")
def client_platform_version(bridge: Bridge, args: Any) -> None:
    version = f"polyxla-bridge on {type(bridge.engine).__name__}, Python {platform.python_version()}"
    args.platform_version, args.platform_version_size = text(version)


@call("Client_Devices")
def client_devices(bridge: Bridge, args: Any) -> None:
    args.devices, args.num_devices = address(bridge.device_array), len(bridge.devices)


@call("Client_AddressableDevices")
def client_addressable_devices(bridge: Bridge, args: Any) -> None:
    args.addressable_devices = address(bridge.local_array)
    args.num_addressable_devices = len(bridge.local)


@call("Client_LookupDevice")
def client_lookup_device(bridge: Bridge, args: Any) -> None:
    if not 0 <= args.id < len(bridge.devices):
        raise PjrtError(
            Code.NOT_FOUND, f"device {args.id} does not exist; this job has {len(bridge.devices)}"
        )
    args.device = bridge.devices[args.id].handle


@call("Client_LookupAddressableDevice")
def client_lookup_addressable_device(bridge: Bridge, args: Any) -> None:
    if not 0 <= args.local_hardware_id < len(bridge.local):
        raise PjrtError(
            Code.NOT_FOUND,
            f"device {args.local_hardware_id} does not exist; this process has {len(bridge.local)}",
        )
    args.addressable_device = bridge.local[args.local_hardware_id].handle


@call("Client_AddressableMemories")
def client_addressable_memories(bridge: Bridge, args: Any) -> None:
    # Each device has one memory, and both have one handle.
    args.addressable_memories = address(bridge.local_array)
    args.num_addressable_memories = len(bridge.local)


@call("Client_DefaultDeviceAssignment")
def client_default_device_assignment(bridge: Bridge, args: Any) -> None:
    # Replica i runs on device i: the engine numbers its devices by torch_xla's ordinals.
    count = args.default_assignment_size
    (ctypes.c_int * count).from_address(args.default_assignment)[:] = range(count)


@call("Client_TopologyDescription")
def client_topology_description(bridge: Bridge, args: Any) -> None:
    args.topology = args.client


@call("TopologyDescription_Destroy")
def topology_destroy(bridge: Bridge, args: Any) -> None:
    # The topology has the client's handle, which `Client_Destroy` releases.
    pass


@call("TopologyDescription_GetDeviceDescriptions")
def topology_device_descriptions(bridge: Bridge, args: Any) -> None:
    # A device and its description have the same handle.
    args.descriptions, args.num_descriptions = address(bridge.device_array), len(bridge.devices)


@call("TopologyDescription_Serialize")
def topology_serialize(bridge: Bridge, args: Any) -> None:
    # TorchTPU asks for these bytes when it compiles a Pallas kernel, and nobody reads them back. They are
    # equal in all processes of the job, and differ where a device does.
    devices = [(device.index, device.kind, device.place) for device in bridge.engine.devices]
    data = json.dumps({"platform": bridge.engine.platform, "devices": devices}).encode()
    args.serialized_bytes_size = len(data)
    args.serialized_bytes, args.serialized_topology, args.serialized_topology_deleter = (
        bridge.handles.new_bytes(data)
    )


@call("DeviceDescription_Id")
def description_id(bridge: Bridge, args: Any) -> None:
    args.id = bridge.handles[args.device_description].device.index


@call("DeviceDescription_ProcessIndex")
def description_process_index(bridge: Bridge, args: Any) -> None:
    args.process_index = bridge.handles[args.device_description].device.process_index


@call("DeviceDescription_Attributes")
def description_attributes(bridge: Bridge, args: Any) -> None:
    attributes = bridge.handles[args.device_description].attributes
    args.attributes, args.num_attributes = address(attributes), len(attributes)


@call("DeviceDescription_Kind")
def description_kind(bridge: Bridge, args: Any) -> None:
    args.device_kind, args.device_kind_size = text(bridge.handles[args.device_description].device.kind)


@call("DeviceDescription_DebugString")
def description_debug_string(bridge: Bridge, args: Any) -> None:
    args.debug_string, args.debug_string_size = text(_name(bridge, args.device_description))


@call("DeviceDescription_ToString")
def description_to_string(bridge: Bridge, args: Any) -> None:
    args.to_string, args.to_string_size = text(_name(bridge, args.device_description))


def _name(bridge: Bridge, handle: int) -> str:
    return f"{bridge.engine.platform}:{bridge.handles[handle].device.index}"


@call("Device_GetDescription")
def device_get_description(bridge: Bridge, args: Any) -> None:
    args.device_description = args.device


@call("Device_LocalHardwareId")
def device_local_hardware_id(bridge: Bridge, args: Any) -> None:
    # TorchTPU makes storages on the device of this number, and counts this process's own devices.
    handle = bridge.handles[args.device]
    args.local_hardware_id = bridge.local.index(handle) if handle in bridge.local else -1


@call("Device_AddressableMemories")
def device_addressable_memories(bridge: Bridge, args: Any) -> None:
    args.memories, args.num_memories = address(bridge.handles[args.device].itself), 1


@call("Device_MemoryStats")
def device_memory_stats(bridge: Bridge, args: Any) -> None:
    stats = bridge.engine.memory_stats(bridge.handles[args.device].device)
    # Set both to 0: XLA reads an unset counter as -1, and TorchTPU adds that to the bytes in use.
    stats = {**stats, "bytes_reserved": 0, "peak_bytes_reserved": 0}
    counters: tuple[str, ...] = abi.DEVICE_STATS
    # A caller of a later API, such as torch_tpu 0.2.0, reads one counter more; its struct is larger.
    if args.struct_size > ctypes.sizeof(abi.ARGS["Device_MemoryStats"]):
        args = abi.LaterMemoryStats.from_address(address(args))
        counters = (*counters, "peak_allocated_bytes")
        stats["peak_allocated_bytes"] = stats["peak_bytes_in_use"]
    args.bytes_in_use = stats["bytes_in_use"]
    # Write every flag, because the caller does not clear its struct.
    for name in counters:
        setattr(args, name, stats.get(name, 0))
        setattr(args, f"{name}_is_set", name in stats)


@call("Device_ClearMemoryStats")
def device_clear_memory_stats(bridge: Bridge, args: Any) -> None:
    bridge.engine.reset_memory_peak(bridge.handles[args.device].device)


@call("Memory_Id")
def memory_id(bridge: Bridge, args: Any) -> None:
    args.id = bridge.handles[args.memory].device.index


@call("Memory_Kind")
def memory_kind(bridge: Bridge, args: Any) -> None:
    args.kind, args.kind_size = text(MEMORY_KIND)


@call("Memory_Kind_Id")
def memory_kind_id(bridge: Bridge, args: Any) -> None:
    args.kind_id = 0


@call("Memory_DebugString")
def memory_debug_string(bridge: Bridge, args: Any) -> None:
    args.debug_string, args.debug_string_size = text(f"memory of {_name(bridge, args.memory)}")


@call("Memory_ToString")
def memory_to_string(bridge: Bridge, args: Any) -> None:
    args.to_string, args.to_string_size = text(f"memory of {_name(bridge, args.memory)}")


@call("Memory_AddressableByDevices")
def memory_addressable_by_devices(bridge: Bridge, args: Any) -> None:
    args.devices, args.num_devices = address(bridge.handles[args.memory].itself), 1


@call("Buffer_CopyToDevice")
def buffer_copy_to_device(bridge: Bridge, args: Any) -> None:
    args.dst_buffer = _copy(bridge, args.buffer, args.dst_device)


@call("Buffer_CopyToMemory")
def buffer_copy_to_memory(bridge: Bridge, args: Any) -> None:
    args.dst_buffer = _copy(bridge, args.buffer, args.dst_memory)


def _copy(bridge: Bridge, buffer: int, place: int) -> int:
    # A buffer that was just uploaded may still be in C's queue, where the engine does not know it.
    bridge.drain()
    copy = bridge.engine.copy(bridge.buffer(buffer), bridge.handles[place].device)
    handle: int = bridge.make_buffers(place, [copy], ArrayTypes([copy.type]))[0]
    return handle


@call("Buffer_UnsafePointer")
def buffer_unsafe_pointer(bridge: Bridge, args: Any) -> None:
    bridge.drain()
    args.buffer_pointer = bridge.engine.address(bridge.buffer(args.buffer))


@call("Buffer_ToHostBuffer")
def buffer_to_host_buffer(bridge: Bridge, args: Any) -> None:
    bridge.drain()
    buffer = bridge.buffer(args.src)
    length = math.prod(buffer.type.dims) * abi.width(buffer.type.dtype)
    # A caller without memory asks for the size; it then calls again.
    if not args.dst:
        args.dst_size = length
        return
    if args.dst_size < length:
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"the array has {length} bytes, which do not fit into a buffer of {args.dst_size}",
        )
    if length and args.host_layout and not _is_row_major(args.host_layout, buffer.type):
        raise PjrtError(
            Code.UNIMPLEMENTED,
            f"{buffer.type} can only be read in row-major order: transpose the array first",
        )
    args.event = bridge.event(bridge.engine.to_host(buffer, host_memory(args.dst, length)))


def _is_row_major(layout: int, type_: ArrayType) -> bool:
    found = abi.MemoryLayout.from_address(layout)
    tiled = found.layout.tiled
    numbers = read_array(tiled.minor_to_major, tiled.minor_to_major_size, ctypes.c_int64)
    # A dimension of size 1 has no effect.
    dimensions = [number for number, size in enumerate(type_.dims) if size != 1]
    if found.type == abi.STRIDES:
        width = abi.width(type_.dtype)
        return [numbers[i] for i in dimensions] == [
            width * math.prod(type_.dims[i + 1 :]) for i in dimensions
        ]
    order = [number for number in numbers if number in dimensions]
    return order == dimensions[::-1] and not tiled.num_tiles
