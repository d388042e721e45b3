"""The struct layouts of the PJRT C API, declared by hand.

Names, order and types are facts of an ABI. `nox -s abi` compiles a C program against the header in the
tensorflow-cpu wheel, and compares every size and offset with these declarations. hatch_build.py generates the
C library's header from this module, which therefore imports nothing but the standard library.

Source: pjrt_c_api.h, API version 0.72, pjrt_c_api_profiler_extension.h and profiler_c_api.h, as in
tensorflow-cpu 2.20.0; torch_xla 2.9.0 accepts it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

MAJOR, MINOR = 0, 72
"""The API version that the bridge implements."""

_TYPES: dict[str, Any] = {
    "p": c_void_p,  # any pointer: opaque objects, arrays, callbacks
    "n": c_size_t,
    "i": c_int,  # enums too
    "q": c_int64,
    "b": c_bool,
}


def _fields(declaration: str) -> list[tuple[str, Any]]:
    pairs = (word.split(":") for word in declaration.split())
    return [(name, _TYPES[code]) for name, code in pairs]


def _struct(name: str, declaration: str) -> type[Structure]:
    # Every struct begins with its size, which tells a library of another version which fields the caller has.
    header = [("struct_size", c_size_t), ("extension_start", c_void_p)]
    return type(name, (Structure,), {"_fields_": [*header, *_fields(declaration)]})


class _Value(ctypes.Union):
    _fields_ = (
        ("string_value", c_char_p),
        ("int64_value", c_int64),
        ("int64_array_value", c_void_p),
        ("float_value", c_float),
        ("bool_value", c_bool),
    )


class NamedValue(Structure):
    """``PJRT_NamedValue``: one attribute."""

    _anonymous_ = ("value",)
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("name", c_char_p),
        ("name_size", c_size_t),
        ("type", c_int),
        ("value", _Value),
        ("value_size", c_size_t),
    )


class NamedValueType:
    """``PJRT_NamedValue_Type``."""

    STRING, INT64, INT64_LIST, FLOAT, BOOL = range(5)


class Tiled(Structure):
    """``PJRT_Buffer_MemoryLayout_Tiled``."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        *_fields("minor_to_major:p minor_to_major_size:n tile_dims:p tile_dim_sizes:p num_tiles:n"),
    )


class _Layout(ctypes.Union):
    _fields_ = (("tiled", Tiled),)


TILED, STRIDES = range(2)
"""``PJRT_Buffer_MemoryLayout_Type``."""


class MemoryLayout(Structure):
    """``PJRT_Buffer_MemoryLayout``; its other form, strides, has its numbers where this one has the order."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("layout", _Layout),
        ("type", c_int),
    )


Program = _struct("Program", "code:p code_size:n format:p format_size:n")
"""``PJRT_Program``."""

ExecuteOptions = _struct(
    "ExecuteOptions",
    "send_callbacks:p recv_callbacks:p num_send_ops:n num_recv_ops:n launch_id:i "
    "non_donatable_input_indices:p num_non_donatable_input_indices:n context:p",
)
"""``PJRT_ExecuteOptions``."""

# Versions only append fields, so each struct inherits those of the version before. The keys are the minor
# versions that made it longer.
_EXECUTE_OPTIONS: dict[int, type[Structure]] = {0: ExecuteOptions}
for _minor, _added in ((76, "call_location:p"), (78, "num_tasks:n task_ids:p incarnation_ids:p")):
    _longest = [*_EXECUTE_OPTIONS.values()][-1]
    _EXECUTE_OPTIONS[_minor] = type("ExecuteOptions", (_longest,), {"_fields_": _fields(_added)})


def execute_options(minor: int) -> type[Structure]:
    """Return ``PJRT_ExecuteOptions`` as a plugin of API version 0.`minor` reads it: it refuses a shorter one.

    Source: xla/pjrt/c/CHANGELOG.md. Version 0.97 appended ``multi_slice_config`` and still accepts the struct
    without it: the plugin of lammps-jax-pjrt-cpu 0.11.2, 0.115, asks for 112 bytes.
    """
    return _EXECUTE_OPTIONS[max(since for since in _EXECUTE_OPTIONS if since <= minor)]


ApiVersion = _struct("ApiVersion", "major_version:i minor_version:i")
"""``PJRT_Api_Version``."""

DEVICE_STATS = (
    "peak_bytes_in_use",
    "num_allocs",
    "largest_alloc_size",
    "bytes_limit",
    "bytes_reserved",
    "peak_bytes_reserved",
    "bytes_reservable_limit",
    "largest_free_block_bytes",
    "pool_bytes",
    "peak_pool_bytes",
)
"""The memory counters of a device that may be left out."""

FUNCTIONS: dict[str, str] = {
    "Error_Destroy": "error:p",
    "Error_Message": "error:p message:p message_size:n",
    "Error_GetCode": "error:p code:i",
    "Plugin_Initialize": "",
    "Plugin_Attributes": "attributes:p num_attributes:n",
    "Event_Destroy": "event:p",
    "Event_IsReady": "event:p is_ready:b",
    "Event_Error": "event:p",
    "Event_Await": "event:p",
    "Event_OnReady": "event:p callback:p user_arg:p",
    "Client_Create": "create_options:p num_options:n kv_get_callback:p kv_get_user_arg:p kv_put_callback:p "
    "kv_put_user_arg:p client:p kv_try_get_callback:p kv_try_get_user_arg:p",
    "Client_Destroy": "client:p",
    "Client_PlatformName": "client:p platform_name:p platform_name_size:n",
    "Client_ProcessIndex": "client:p process_index:i",
    "Client_PlatformVersion": "client:p platform_version:p platform_version_size:n",
    "Client_Devices": "client:p devices:p num_devices:n",
    "Client_AddressableDevices": "client:p addressable_devices:p num_addressable_devices:n",
    "Client_LookupDevice": "client:p id:i device:p",
    "Client_LookupAddressableDevice": "client:p local_hardware_id:i addressable_device:p",
    "Client_AddressableMemories": "client:p addressable_memories:p num_addressable_memories:n",
    "Client_Compile": "client:p program:p compile_options:p compile_options_size:n executable:p",
    "Client_DefaultDeviceAssignment": "client:p num_replicas:i num_partitions:i "
    "default_assignment_size:n default_assignment:p",
    "Client_BufferFromHostBuffer": "client:p data:p type:i dims:p num_dims:n byte_strides:p "
    "num_byte_strides:n host_buffer_semantics:i device:p memory:p device_layout:p "
    "done_with_host_buffer:p buffer:p",
    "DeviceDescription_Id": "device_description:p id:i",
    "DeviceDescription_ProcessIndex": "device_description:p process_index:i",
    "DeviceDescription_Attributes": "device_description:p num_attributes:n attributes:p",
    "DeviceDescription_Kind": "device_description:p device_kind:p device_kind_size:n",
    "DeviceDescription_DebugString": "device_description:p debug_string:p debug_string_size:n",
    "DeviceDescription_ToString": "device_description:p to_string:p to_string_size:n",
    "Device_GetDescription": "device:p device_description:p",
    "Device_IsAddressable": "device:p is_addressable:b",
    "Device_LocalHardwareId": "device:p local_hardware_id:i",
    "Device_AddressableMemories": "device:p memories:p num_memories:n",
    "Device_DefaultMemory": "device:p memory:p",
    "Device_MemoryStats": "device:p bytes_in_use:q "
    + " ".join(f"{name}:q {name}_is_set:b" for name in DEVICE_STATS),
    "Memory_Id": "memory:p id:i",
    "Memory_Kind": "memory:p kind:p kind_size:n",
    "Memory_DebugString": "memory:p debug_string:p debug_string_size:n",
    "Memory_ToString": "memory:p to_string:p to_string_size:n",
    "Memory_AddressableByDevices": "memory:p devices:p num_devices:n",
    "Executable_Destroy": "executable:p",
    "Executable_Name": "executable:p executable_name:p executable_name_size:n",
    "Executable_NumReplicas": "executable:p num_replicas:n",
    "Executable_NumPartitions": "executable:p num_partitions:n",
    "Executable_NumOutputs": "executable:p num_outputs:n",
    "Executable_SizeOfGeneratedCodeInBytes": "executable:p size_in_bytes:q",
    "Executable_GetCostAnalysis": "executable:p num_properties:n properties:p",
    "Executable_OutputMemoryKinds": "executable:p num_outputs:n memory_kinds:p memory_kind_sizes:p",
    "Executable_OptimizedProgram": "executable:p program:p",
    "Executable_Serialize": "executable:p serialized_bytes:p serialized_bytes_size:n "
    "serialized_executable:p serialized_executable_deleter:p",
    "LoadedExecutable_Destroy": "executable:p",
    "LoadedExecutable_GetExecutable": "loaded_executable:p executable:p",
    "LoadedExecutable_AddressableDevices": "executable:p addressable_devices:p num_addressable_devices:n",
    "LoadedExecutable_Delete": "executable:p",
    "LoadedExecutable_IsDeleted": "executable:p is_deleted:b",
    "LoadedExecutable_Execute": "executable:p options:p argument_lists:p num_devices:n num_args:n "
    "output_lists:p device_complete_events:p execute_device:p",
    "Executable_DeserializeAndLoad": "client:p serialized_executable:p serialized_executable_size:n "
    "loaded_executable:p overridden_serialized_compile_options:p "
    "overridden_serialized_compile_options_size:n",
    "LoadedExecutable_Fingerprint": "executable:p executable_fingerprint:p executable_fingerprint_size:n",
    "Buffer_Destroy": "buffer:p",
    "Buffer_ElementType": "buffer:p type:i",
    "Buffer_Dimensions": "buffer:p dims:p num_dims:n",
    "Buffer_UnpaddedDimensions": "buffer:p unpadded_dims:p num_dims:n",
    "Buffer_DynamicDimensionIndices": "buffer:p dynamic_dim_indices:p num_dynamic_dims:n",
    "Buffer_GetMemoryLayout": "buffer:p",  # and a MemoryLayout by value, added below
    "Buffer_OnDeviceSizeInBytes": "buffer:p on_device_size_in_bytes:n",
    "Buffer_Device": "buffer:p device:p",
    "Buffer_Memory": "buffer:p memory:p",
    "Buffer_Delete": "buffer:p",
    "Buffer_IsDeleted": "buffer:p is_deleted:b",
    "Buffer_CopyToDevice": "buffer:p dst_device:p dst_buffer:p",
    "Buffer_ToHostBuffer": "src:p host_layout:p dst:p dst_size:n event:p",
    "Buffer_IsOnCpu": "buffer:p is_on_cpu:b",
    "Buffer_ReadyEvent": "buffer:p event:p",
    "Buffer_UnsafePointer": "buffer:p buffer_pointer:n",
    "Buffer_IncreaseExternalReferenceCount": "buffer:p",
    "Buffer_DecreaseExternalReferenceCount": "buffer:p",
    "Buffer_OpaqueDeviceMemoryDataPointer": "buffer:p device_memory_ptr:p",
    "CopyToDeviceStream_Destroy": "stream:p",
    "CopyToDeviceStream_AddChunk": "stream:p chunk:p transfer_complete:p",
    "CopyToDeviceStream_TotalBytes": "stream:p total_bytes:q",
    "CopyToDeviceStream_GranuleSize": "stream:p granule_size_in_bytes:q",
    "CopyToDeviceStream_CurrentBytes": "stream:p current_bytes:q",
    "TopologyDescription_Create": "topology_name:p topology_name_size:n create_options:p num_options:n "
    "topology:p",
    "TopologyDescription_Destroy": "topology:p",
    "TopologyDescription_PlatformName": "topology:p platform_name:p platform_name_size:n",
    "TopologyDescription_PlatformVersion": "topology:p platform_version:p platform_version_size:n",
    "TopologyDescription_GetDeviceDescriptions": "topology:p descriptions:p num_descriptions:n",
    "TopologyDescription_Serialize": "topology:p serialized_bytes:p serialized_bytes_size:n "
    "serialized_topology:p serialized_topology_deleter:p",
    "TopologyDescription_Attributes": "topology:p attributes:p num_attributes:n",
    "Compile": "topology:p program:p compile_options:p compile_options_size:n client:p executable:p",
    "Executable_OutputElementTypes": "executable:p output_types:p num_output_types:n",
    "Executable_OutputDimensions": "executable:p num_outputs:n dims:p dim_sizes:p",
    "Buffer_CopyToMemory": "buffer:p dst_memory:p dst_buffer:p",
    "Client_CreateViewOfDeviceBuffer": "client:p device_buffer_ptr:p dims:p num_dims:n element_type:i "
    "layout:p device:p on_delete_callback:p on_delete_callback_arg:p stream:n buffer:p memory:p",
    "Executable_Fingerprint": "executable:p executable_fingerprint:p executable_fingerprint_size:n",
    "Client_TopologyDescription": "client:p topology:p",
    "Executable_GetCompiledMemoryStats": "executable:p generated_code_size_in_bytes:q "
    "argument_size_in_bytes:q output_size_in_bytes:q alias_size_in_bytes:q temp_size_in_bytes:q "
    "host_generated_code_size_in_bytes:q host_argument_size_in_bytes:q host_output_size_in_bytes:q "
    "host_alias_size_in_bytes:q host_temp_size_in_bytes:q peak_memory_in_bytes:q",
    "Memory_Kind_Id": "memory:p kind_id:i",
    "ExecuteContext_Create": "context:p",
    "ExecuteContext_Destroy": "context:p",
    "Buffer_CopyRawToHost": "buffer:p dst:p offset:q transfer_size:q event:p",
    "AsyncHostToDeviceTransferManager_Destroy": "transfer_manager:p",
    "AsyncHostToDeviceTransferManager_TransferData": "transfer_manager:p buffer_index:i data:p offset:q "
    "transfer_size:q is_last_transfer:b done_with_h2d_transfer:p",
    "Client_CreateBuffersForAsyncHostToDevice": "client:p shape_specs:p num_shape_specs:n "
    "device_layouts:p num_device_layouts:n memory:p transfer_manager:p",
    "AsyncHostToDeviceTransferManager_RetrieveBuffer": "transfer_manager:p buffer_index:i buffer_out:p",
    "AsyncHostToDeviceTransferManager_Device": "transfer_manager:p device_out:p",
    "AsyncHostToDeviceTransferManager_BufferCount": "transfer_manager:p buffer_count:n",
    "AsyncHostToDeviceTransferManager_BufferSize": "transfer_manager:p buffer_index:i buffer_size:n",
    "AsyncHostToDeviceTransferManager_SetBufferError": "transfer_manager:p buffer_index:i error_code:i "
    "error_message:p error_message_size:n",
    "AsyncHostToDeviceTransferManager_AddMetadata": "transfer_manager:p transfer_metadata:p num_metadata:n",
    "Client_DmaMap": "client:p data:p size:n",
    "Client_DmaUnmap": "client:p data:p",
    "Client_CreateUninitializedBuffer": "client:p shape_dims:p shape_num_dims:n shape_element_type:i "
    "shape_layout:p device:p memory:p buffer:p",
}
"""Every function of the table, in order, with the fields of its argument struct after the common header."""

ARGS: dict[str, type[Structure]] = {
    name: _struct(f"{name}_Args", declaration) for name, declaration in FUNCTIONS.items()
}
"""Argument structs by function name."""

# A declaration has no letter for a struct by value. `CALLBACKS` are made from `ARGS`, so this comes before.
ARGS["Buffer_GetMemoryLayout"] = type(
    "Buffer_GetMemoryLayout_Args",
    (Structure,),
    {
        "_fields_": [
            ("struct_size", c_size_t),
            ("extension_start", c_void_p),
            ("buffer", c_void_p),
            ("layout", MemoryLayout),
        ]
    },
)

RETURNS_NOTHING = frozenset({"Error_Destroy", "Error_Message"})
"""The two functions that cannot fail."""

CALLBACKS: dict[str, Any] = {
    name: ctypes.CFUNCTYPE(None if name in RETURNS_NOTHING else c_void_p, POINTER(args))
    for name, args in ARGS.items()
}
"""The C type of each function that the bridge implements."""


class Api(Structure):
    """``PJRT_Api``: the table itself."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("pjrt_api_version", ApiVersion),
        *((name, c_void_p) for name in FUNCTIONS),
    )


LATER = (
    "Client_UpdateGlobalProcessInfo",
    "TopologyDescription_Deserialize",
    "Client_CreateAliasBuffer",
    "Client_FulfillAliasBuffer",
    "LoadedExecutable_GetDeviceAssignment",
    "Client_CreateErrorBuffer",
    "AsyncHostToDeviceTransferManager_TransferLiteral",
    "Buffer_CopyRawToHostFuture",
    "Device_PoisonExecution",
    "Device_CreateAsyncTrackingEvent",
    "AsyncTrackingEvent_Destroy",
    "Executable_GetCompileOptions",
    "Buffer_DonateWithControlDependency",
    "Event_Create",
    "Event_Set",
    "Device_GetAttributes",
    "Client_Load",
    "LoadedExecutable_AddressableDeviceLogicalIds",
    "Buffer_Bitcast",
    "Error_ForEachPayload",
    "TopologyDescription_Fingerprint",
    "Executable_ParameterMemoryKinds",
    "Device_ClearMemoryStats",
)
"""The functions that later versions append to the table, in order, up to the last one that is looked up in a
table of any version.

Source: pjrt_c_api.h, API version 0.106; torch_tpu 0.2.0 compares no version before it looks up
``Client_Load`` and ``Device_ClearMemoryStats``.
"""

CALLBACKS["Device_ClearMemoryStats"] = ctypes.CFUNCTYPE(
    c_void_p, POINTER(_struct("Device_ClearMemoryStats_Args", "device:p"))
)

LaterMemoryStats: type[Structure] = type(
    "LaterMemoryStats",
    (ARGS["Device_MemoryStats"],),
    {"_fields_": _fields("peak_allocated_bytes:q peak_allocated_bytes_is_set:b")},
)
"""``PJRT_Device_MemoryStats_Args`` with the counter that later versions append."""


class LaterApi(Api):
    """`Api` with the functions of `LATER`: a null pointer says that one does not exist."""

    _fields_ = tuple((name, c_void_p) for name in LATER)


EXTENSION_TYPE_PROFILER = 1
"""``PJRT_Extension_Type_Profiler``."""
EXTENSION_TYPE_FFI = 5
"""``PJRT_Extension_Type_FFI``."""
EXTENSION_TYPE_HOST_MEMORY_ALLOCATOR = 23
"""``PJRT_Extension_Type_HostMemoryAllocator``. Source: the extension of this size of libtpu 0.0.52."""


def _plain(name: str, *fields: tuple[str, Any]) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": fields})


ExtensionBase = _plain("ExtensionBase", *_fields("struct_size:n type:i next:p"))

ProfilerExtension = _plain(
    "ProfilerExtension", ("base", ExtensionBase), *_fields("profiler_api:p traceme_context_id:q")
)
ProfilerApi = _plain(
    "ProfilerApi",
    *_fields(
        "struct_size:n priv:p error_destroy:p error_message:p error_get_code:p create:p destroy:p "
        "start:p stop:p collect_data:p"
    ),
)
ProfilerCreate = _plain("ProfilerCreate", *_fields("struct_size:n options:p options_size:n profiler:p"))
ProfilerCollectData = _plain(
    "ProfilerCollectData", *_fields("struct_size:n profiler:p buffer:p buffer_size_in_bytes:n")
)
PROFILER: dict[str, type[Structure]] = {
    "PJRT_Extension_Base": ExtensionBase,
    "PJRT_Profiler_Extension": ProfilerExtension,
    "PLUGIN_Profiler_Api": ProfilerApi,
    "PLUGIN_Profiler_Create_Args": ProfilerCreate,
    "PLUGIN_Profiler_CollectData_Args": ProfilerCollectData,
}
"""The structs of the profiler extension, by their names in C."""

FfiExtension = _plain(
    "FfiExtension", ("base", ExtensionBase), *_fields("type_register:p user_data_add:p register_handler:p")
)
RegisterHandler = _plain(
    "RegisterHandler",
    *_fields("struct_size:n target_name:p target_name_size:n handler:p platform_name:p"),
    *_fields("platform_name_size:n traits:i"),
)
"""The extension for functions that programs call, and the arguments of its ``register_handler``.

Source: pjrt_c_api_ffi_extension.h of XLA.
"""

HOST_MEMORY: dict[str, type[Structure]] = {
    "PJRT_Extension_Base": ExtensionBase,
    "PJRT_HostMemoryAllocator_Extension": _plain(
        "HostMemoryAllocatorExtension", ("base", ExtensionBase), *_fields("allocate:p")
    ),
    "PJRT_HostMemoryAllocator_Allocate_Args": _struct(
        "HostMemoryAllocator_Allocate_Args", "client:p size:n numa_node:i ptr:p deleter:p deleter_arg:p"
    ),
}
"""The structs of the extension for the host's memory, by their names in C.

Source: host_memory_allocator_extension.h of XLA, version 0.
"""

EXTENSION_TYPE_CROSS_HOST_TRANSFERS = 12
"""``PJRT_Extension_Type_CrossHostTransfers``."""
CrossHostTransfersExtension = _plain(
    "CrossHostTransfersExtension",
    ("base", ExtensionBase),
    *_fields("make_receive_buffers:p copy_to_remote_device:p receive_buffers:p send_buffers:p"),
)
MakeCrossHostReceiveBuffers = _struct(
    "MakeCrossHostReceiveBuffers_Args",
    "client:p num_shapes:n shape_num_dims:p num_dims:p element_types:p layouts:p device:p user_arg:p "
    "notifier:p buffers:p num_buffers:n",
)
CopyToRemoteDevice = _struct(
    "CopyToRemoteDevice_Args",
    "buffer:p event:p serialized_descriptor:p serialized_descriptor_size:p user_arg:p on_done:p "
    "descriptor_destructor:p",
)
"""Its event is null where the table has no ``Event_Create``: the caller waits for the descriptor itself."""
ReceiveNotifier = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p)
SendCallback = ctypes.CFUNCTYPE(None, c_void_p, c_bool, c_void_p)
DescriptorDestructor = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
"""The extension for arrays that processes send to each other, its structs and callbacks.

Source: pjrt_c_api_cross_host_transfers_extension.h of XLA, version 6; libxla_base.so of torch_tpu 0.2.0
passes 72 bytes to ``CopyToRemoteDevice``.
"""

EXTENSION_TYPE_TPU_TOPOLOGY = 16
"""``PJRT_Extension_Type_TpuTopology``. Source: the extension of this size of libtpu 0.0.52."""
TpuTopologyExtension = _plain(
    "TpuTopologyExtension",
    ("base", ExtensionBase),
    *_fields(
        "subslice:p is_subslice_topology:p subslice_device_id_from_full_device_id:p replace_host_bounds:p "
        "is_enhanced_barrier_enabled:p has_limited_ici_connectivity:p is_reachable_over_limited_ici:p "
        "process_count:p chips_per_process:p core_count_per_chip:p chip_count:p core_count:p "
        "logical_device_count_per_process:p logical_device_count:p logical_device_count_per_chip:p "
        "core_count_per_process:p process_ids:p logical_device_ids_on_process:p "
        "proc_id_and_idx_on_proc_for_chip:p proc_id_and_idx_on_proc_for_logi_device:p "
        "process_coord_from_id:p chip_id_from_coord:p logical_device_id_from_chip_coord_and_idx:p "
        "chip_coord_and_idx_for_logi_device:p chips_per_process_bounds:p chip_bounds:p process_bounds:p "
        "get_routing_strategy:p get_slice_config:p get_slice_configs:p get_default_platform_config:p later:p"
    ),
)
TPU_TOPOLOGY_FUNCTIONS = tuple(name for name, *_ in TpuTopologyExtension._fields_[1:])
"""The extension for a TPU's topology, and its functions, the last of which is not in the header.

Source: pjrt_c_api_tpu_topology_extension.h of XLA, version 1, and the extension's size in libtpu 0.0.52.
"""


def _about_topology(name: str, declaration: str) -> type[Structure]:
    return _plain(name, *_fields(f"struct_size:n topology:p {declaration}"))


TpuCount = _about_topology("TpuCount", "count:i")
TpuProcessIds = _about_topology("TpuProcessIds", "most:i ids:p count:n")
TpuDevicesOfProcess = _about_topology("TpuDevicesOfProcess", "process:i most:i ids:p count:n")
TpuPlace = _about_topology("TpuPlace", "asked:i process:i index:i")
TpuChipAt = _about_topology("TpuChipAt", "coordinates:p count:n chip:i")
TpuDeviceAt = _about_topology("TpuDeviceAt", "coordinates:p count:n index:i device:i")
TpuChipOfDevice = _about_topology("TpuChipOfDevice", "device:i most:n coordinates:p count:n index:i")
TpuBounds = _about_topology("TpuBounds", "most:n bounds:p count:n")
"""Arguments of these functions; of those that answer yes or no, only the lowest byte of `TpuCount.count`."""

OnReady = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
"""The callback of `Event_OnReady`: called with an error (or null) and ``user_arg``."""

Deleter = ctypes.CFUNCTYPE(None, c_void_p)
"""The deleter of serialised programs: called with the object to free."""

DTYPES = (
    "invalid",
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "complex64",
    "complex128",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e4m3b11fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "int4",
    "uint4",
    "token",
    "int2",
    "uint2",
    "float8_e4m3",
    "float8_e3m4",
    "float8_e8m0fnu",
    "float4_e2m1fn",
)
"""numpy's (and ml_dtypes') names in the order of ``PJRT_Buffer_Type``."""


class HostBuffer:
    """``PJRT_HostBufferSemantics``, as far as the bridge uses it."""

    IMMUTABLE_ONLY_DURING_CALL = 0


class Code:
    """``PJRT_Error_Code``, as far as the bridge uses it."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


_WIDTHS = {"invalid": 0, "token": 0, "bool": 1, "bfloat16": 2, "complex64": 8, "complex128": 16}
_WITHIN_A_BYTE = ("int4", "uint4", "int2", "uint2", "float4_e2m1fn")


def width(dtype: str) -> int:
    """Return the size of an element on the host in bytes: 1 if it is smaller than a byte, 0 for a token."""
    if dtype in _WIDTHS or dtype in _WITHIN_A_BYTE:
        return _WIDTHS.get(dtype, 1)
    # The other names have the kind, the number of bits and, for some, a format: "uint16", "float8_e5m2".
    digits = dtype.removeprefix("u").removeprefix("int").removeprefix("float").partition("_")[0]
    return int(digits) // 8


class Record(Structure):
    """An entry of the queue between buffers.c and Python: a new buffer, or a deleted one. Not part of PJRT.

    Attributes:
        buffer: handle of the buffer.
        is_deleted: whether the buffer was deleted; otherwise it is new.
        data: bytes of a new buffer; Python frees them.
        size: number of bytes.
        place: handle of the device of a new buffer.
        type: index of its dtype in `DTYPES`.
        dims: size of each dimension.
        num_dims: number of dimensions.
    """

    _fields_ = tuple(_fields("buffer:p is_deleted:b data:p size:n place:p type:i dims:p num_dims:n"))
