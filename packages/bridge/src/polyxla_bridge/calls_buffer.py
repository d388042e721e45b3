"""The functions of the table about buffers."""

from __future__ import annotations

import ctypes
import math
from concurrent.futures import Future
from typing import Any

from polyxla_bridge import abi
from polyxla_bridge.abi import Code
from polyxla_bridge.engine import ArrayType, Buffer
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.state import Bridge, address, array, call, completed, read_array

_WIDTHS = {"bool": 1, "bfloat16": 2, "complex64": 8, "complex128": 16}
_HALF_BYTE = ("int4", "uint4", "int2", "uint2", "float4_e2m1fn")


class Held:
    """A buffer as torch_xla holds it: with its sizes where C can read them."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.dims = array(list(buffer.type.dims), ctypes.c_int64)
        order = list(reversed(range(len(buffer.type.dims))))
        self.minor_to_major = array(order, ctypes.c_int64)


def size_bytes(type_: ArrayType) -> int:
    """Return the bytes of a dense array on the host; types of less than a byte have a byte each there."""
    return math.prod(type_.dims) * _width(type_.dtype)


def _width(dtype: str) -> int:
    if dtype in _WIDTHS or dtype in _HALF_BYTE:
        return _WIDTHS.get(dtype, 1)
    digits = dtype.removeprefix("u").removeprefix("int").removeprefix("float").partition("_")[0]
    return int(digits) // 8


@call("Client_BufferFromHostBuffer")
def buffer_from_host_buffer(bridge: Bridge, args: Any) -> None:
    type_ = ArrayType(_dtype(args.type), tuple(read_array(args.dims, args.num_dims, ctypes.c_int64)))
    _check_dense(type_, read_array(args.byte_strides, args.num_byte_strides, ctypes.c_int64))
    place = bridge.handles[args.device or args.memory]
    length = size_bytes(type_)
    data = (ctypes.c_char * length).from_address(args.data) if length else b""
    buffer = bridge.engine.from_host(place.device, type_, memoryview(data).cast("B"))
    args.done_with_host_buffer = bridge.event(completed())
    args.buffer = bridge.handles.new(Held(buffer))


def _dtype(number: int) -> str:
    dtype = abi.DTYPES[number] if 0 < number < len(abi.DTYPES) else "invalid"
    if dtype in ("invalid", "token"):
        raise PjrtError(
            Code.INVALID_ARGUMENT, f"arrays of type {dtype} ({number}) cannot be copied to a device"
        )
    return dtype


def _check_dense(type_: ArrayType, strides: list[int]) -> None:
    dense: list[int] = []
    step = _width(type_.dtype)
    for size in reversed(type_.dims):
        dense.insert(0, step)
        step *= size
    # The stride of a dimension of one element says nothing.
    wrong = [i for i, size in enumerate(type_.dims) if size > 1 and strides and strides[i] != dense[i]]
    if wrong and step:
        raise PjrtError(
            Code.UNIMPLEMENTED,
            f"byte strides {strides} of {type_}: only dense row-major arrays can be copied",
        )


@call("Buffer_Destroy")
def buffer_destroy(bridge: Bridge, args: Any) -> None:
    held = bridge.handles[args.buffer]
    bridge.handles.drop(args.buffer)
    bridge.engine.delete(held.buffer)


@call("Buffer_Delete")
def buffer_delete(bridge: Bridge, args: Any) -> None:
    bridge.engine.delete(bridge.handles[args.buffer].buffer)


@call("Buffer_IsDeleted")
def buffer_is_deleted(bridge: Bridge, args: Any) -> None:
    args.is_deleted = bridge.handles[args.buffer].buffer.is_deleted


@call("Buffer_ElementType")
def buffer_element_type(bridge: Bridge, args: Any) -> None:
    args.type = abi.DTYPES.index(bridge.handles[args.buffer].buffer.type.dtype)


@call("Buffer_Dimensions")
def buffer_dimensions(bridge: Bridge, args: Any) -> None:
    held = bridge.handles[args.buffer]
    args.dims, args.num_dims = address(held.dims), len(held.buffer.type.dims)


@call("Buffer_UnpaddedDimensions")
def buffer_unpadded_dimensions(bridge: Bridge, args: Any) -> None:
    held = bridge.handles[args.buffer]
    args.unpadded_dims, args.num_dims = address(held.dims), len(held.buffer.type.dims)


@call("Buffer_DynamicDimensionIndices")
def buffer_dynamic_dimension_indices(bridge: Bridge, args: Any) -> None:
    args.dynamic_dim_indices, args.num_dynamic_dims = None, 0


@call("Buffer_GetMemoryLayout")
def buffer_get_memory_layout(bridge: Bridge, args: Any) -> None:
    held = bridge.handles[args.buffer]
    tiled = args.layout.layout.tiled
    tiled.struct_size = ctypes.sizeof(abi.Tiled)
    tiled.minor_to_major, tiled.minor_to_major_size = address(held.minor_to_major), len(held.buffer.type.dims)
    tiled.tile_dims, tiled.tile_dim_sizes, tiled.num_tiles = None, None, 0
    args.layout.type = 0


@call("Buffer_OnDeviceSizeInBytes")
def buffer_on_device_size(bridge: Bridge, args: Any) -> None:
    args.on_device_size_in_bytes = size_bytes(bridge.handles[args.buffer].buffer.type)


@call("Buffer_Device")
def buffer_device(bridge: Bridge, args: Any) -> None:
    args.device = bridge.devices[bridge.handles[args.buffer].buffer.device.index].handle


@call("Buffer_Memory")
def buffer_memory(bridge: Bridge, args: Any) -> None:
    args.memory = bridge.devices[bridge.handles[args.buffer].buffer.device.index].memory


@call("Buffer_IsOnCpu")
def buffer_is_on_cpu(bridge: Bridge, args: Any) -> None:
    # True would let torch_xla read the memory itself, before it is computed.
    args.is_on_cpu = False


@call("Buffer_ReadyEvent")
def buffer_ready_event(bridge: Bridge, args: Any) -> None:
    args.event = bridge.event(bridge.handles[args.buffer].buffer.value)


@call("Buffer_CopyToDevice")
def buffer_copy_to_device(bridge: Bridge, args: Any) -> None:
    buffer = bridge.handles[args.buffer].buffer
    copy = bridge.engine.copy(buffer, bridge.handles[args.dst_device].device)
    args.dst_buffer = bridge.handles.new(Held(copy))


@call("Buffer_CopyToMemory")
def buffer_copy_to_memory(bridge: Bridge, args: Any) -> None:
    buffer = bridge.handles[args.buffer].buffer
    copy = bridge.engine.copy(buffer, bridge.handles[args.dst_memory].device)
    args.dst_buffer = bridge.handles.new(Held(copy))


@call("Buffer_ToHostBuffer")
def buffer_to_host_buffer(bridge: Bridge, args: Any) -> None:
    buffer = bridge.handles[args.src].buffer
    length = size_bytes(buffer.type)
    if not args.dst:
        args.dst_size = length
        return
    if args.dst_size < length:
        raise PjrtError(Code.INVALID_ARGUMENT, f"{length} bytes do not fit into {args.dst_size}")
    args.event = bridge.event(_read_into(bridge.engine.to_host(buffer), args.dst, length))


def _read_into(source: Future[memoryview], destination: int, length: int) -> Future[None]:
    done: Future[None] = Future()

    def write(read: Future[memoryview]) -> None:
        try:
            # A view of the target, so that nothing is copied twice.
            target = memoryview((ctypes.c_char * length).from_address(destination)).cast("B")
            target[:] = read.result()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    source.add_done_callback(write)
    return done
