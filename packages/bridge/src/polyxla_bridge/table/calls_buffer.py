"""PJRT functions for buffers that need the engine; the others are in native/buffers.c."""

from __future__ import annotations

import math
from typing import Any

from polyxla_bridge import abi
from polyxla_bridge.abi import Code
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.table.handles import ArrayTypes, Bridge, call, host_memory


@call("Buffer_CopyToDevice")
def buffer_copy_to_device(bridge: Bridge, args: Any) -> None:
    args.dst_buffer = _copy(bridge, args.buffer, args.dst_device)


@call("Buffer_CopyToMemory")
def buffer_copy_to_memory(bridge: Bridge, args: Any) -> None:
    args.dst_buffer = _copy(bridge, args.buffer, args.dst_memory)


def _copy(bridge: Bridge, buffer: int, place: int) -> int:
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
    if not args.dst:
        args.dst_size = length
        return
    if args.dst_size < length:
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"the array has {length} bytes, which do not fit into a buffer of {args.dst_size}",
        )
    args.event = bridge.event(bridge.engine.to_host(buffer, host_memory(args.dst, length)))
