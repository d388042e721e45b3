"""PJRT functions for programs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from polyxla_bridge import abi, native
from polyxla_bridge.abi import Code
from polyxla_bridge.engine.engine import Buffer
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import compile_request, hlo
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_bridge.table.calls_client import MEMORY_KIND
from polyxla_bridge.table.handles import ArrayTypes, Bridge, address, array, call, read_array, text

READERS: dict[str, Callable[[bytes], bytes]] = {"hlo": bytes, "mlir": compile_request.to_hlo}
"""For each format, the function that turns a program into a serialised HloModuleProto. torch_xla sends
``hlo``, JAX and TorchTPU send ``mlir``."""


@call("Client_Compile")
def client_compile(bridge: Bridge, args: Any) -> None:
    program = abi.Program.from_address(args.program)
    format_ = ctypes.string_at(program.format, program.format_size).decode()
    if format_ not in READERS:
        known = " and ".join(map(repr, READERS))
        raise PjrtError(Code.UNIMPLEMENTED, f"programs in format {format_!r} are not supported, only {known}")
    code = READERS[format_](ctypes.string_at(program.code, program.code_size))
    options = ctypes.string_at(args.compile_options, args.compile_options_size)
    args.executable = bridge.handles.new(bridge.engine.compile(code, options))


@call("LoadedExecutable_GetExecutable")
def loaded_get_executable(bridge: Bridge, args: Any) -> None:
    # Both handles stand for one object, but the caller destroys each of them.
    args.executable = bridge.handles.new(bridge.handles[args.loaded_executable])


@call("LoadedExecutable_Destroy")
def loaded_destroy(bridge: Bridge, args: Any) -> None:
    bridge.handles.drop(args.executable)


@call("Executable_Destroy")
def executable_destroy(bridge: Bridge, args: Any) -> None:
    bridge.handles.drop(args.executable)


@call("LoadedExecutable_Delete")
def loaded_delete(bridge: Bridge, args: Any) -> None:
    # PJRT only forbids the caller to run the program again, so its memory is freed with the last handle.
    pass


@call("LoadedExecutable_IsDeleted")
def loaded_is_deleted(bridge: Bridge, args: Any) -> None:
    # `LoadedExecutable_Delete` does nothing, so a program with a handle always exists.
    args.is_deleted = False


@call("LoadedExecutable_AddressableDevices")
def loaded_addressable_devices(bridge: Bridge, args: Any) -> None:
    found = _members(bridge, bridge.handles[args.executable])
    args.addressable_devices, args.num_addressable_devices = address(found), len(found)


def _members(bridge: Bridge, executable: Executable) -> Any:
    """Return an array of the handles of this process's devices that run a program, in its own order."""
    if not executable.devices:
        return bridge.local_array
    # The executable keeps the array, because C reads it as long as the program exists.
    if "members" not in executable.native:
        local = {handle.device.index: handle.handle for handle in bridge.local}
        executable.native["members"] = array([local[index] for index in executable.devices if index in local])
    return executable.native["members"]


@call("LoadedExecutable_Fingerprint")
def loaded_fingerprint(bridge: Bridge, args: Any) -> None:
    args.executable_fingerprint, args.executable_fingerprint_size = text(
        bridge.handles[args.executable].fingerprint
    )


@call("Executable_Fingerprint")
def executable_fingerprint(bridge: Bridge, args: Any) -> None:
    loaded_fingerprint(bridge, args)


@call("Executable_Name")
def executable_name(bridge: Bridge, args: Any) -> None:
    args.executable_name, args.executable_name_size = text(bridge.handles[args.executable].name)


@call("Executable_NumReplicas")
def executable_num_replicas(bridge: Bridge, args: Any) -> None:
    args.num_replicas = bridge.handles[args.executable].num_replicas


@call("Executable_NumPartitions")
def executable_num_partitions(bridge: Bridge, args: Any) -> None:
    args.num_partitions = bridge.handles[args.executable].num_partitions


@call("Executable_NumOutputs")
def executable_num_outputs(bridge: Bridge, args: Any) -> None:
    args.num_outputs = len(bridge.handles[args.executable].outputs)


@call("Executable_SizeOfGeneratedCodeInBytes")
def executable_code_size(bridge: Bridge, args: Any) -> None:
    args.size_in_bytes = bridge.handles[args.executable].code_size_bytes


@call("Executable_OutputElementTypes")
def executable_output_element_types(bridge: Bridge, args: Any) -> None:
    outputs = _outputs(bridge.handles[args.executable])
    args.output_types, args.num_output_types = address(outputs.numbers), outputs.count


@call("Executable_OutputDimensions")
def executable_output_dimensions(bridge: Bridge, args: Any) -> None:
    outputs = _outputs(bridge.handles[args.executable])
    args.dims, args.dim_sizes, args.num_outputs = address(outputs.dims), address(outputs.ranks), outputs.count


@call("Executable_OutputMemoryKinds")
def executable_output_memory_kinds(bridge: Bridge, args: Any) -> None:
    outputs = _outputs(bridge.handles[args.executable])
    args.memory_kinds, args.memory_kind_sizes = address(outputs.kinds), address(outputs.kind_sizes)
    args.num_outputs = outputs.count


class _Outputs(ArrayTypes):
    """Types of a program's results in the form that C reads."""

    def __init__(self, types: Sequence[ArrayType]) -> None:
        super().__init__(types)
        where, length = text(MEMORY_KIND)
        self.kinds = array([where] * self.count)
        self.kind_sizes = array([length] * self.count, ctypes.c_size_t)


def _outputs(executable: Executable) -> _Outputs:
    # The executable keeps the arrays, because C reads them after the call.
    if "C" not in executable.native:
        executable.native["C"] = _Outputs(executable.outputs)
    outputs: _Outputs = executable.native["C"]
    return outputs


@call("Executable_OptimizedProgram")
def executable_optimized_program(bridge: Bridge, args: Any) -> None:
    program = abi.Program.from_address(args.program)
    code = hlo.with_config(bridge.handles[args.executable].optimized_hlo)
    program.format, program.format_size = text("hlo_with_config")
    # A caller without memory asks for the size; it then calls again.
    if not program.code:
        program.code_size = len(code)
        return
    ctypes.memmove(program.code, code, min(len(code), program.code_size))


@call("Executable_GetCostAnalysis")
def executable_get_cost_analysis(bridge: Bridge, args: Any) -> None:
    args.properties, args.num_properties = None, 0


@call("LoadedExecutable_Execute")
def loaded_execute(bridge: Bridge, args: Any) -> None:
    executable = bridge.handles[args.executable]
    places = _places(bridge, executable, args)
    # An argument that was just uploaded may still be in C's queue, where `bridge.buffer` does not find it.
    bridge.drain()
    rows = [
        read_array(row, args.num_args, ctypes.c_void_p)
        for row in read_array(args.argument_lists, len(places), ctypes.c_void_p)
    ]
    buffers = [[bridge.buffer(argument) for argument in row] for row in rows]
    if executable.num_partitions > 1:
        results = _partitioned(bridge, executable, places, buffers, _kept(args))
    else:
        device = bridge.handles[places[0]].device
        results = [bridge.engine.execute(executable, device, buffers[0], _kept(args))]
    # The engine marked the donated buffers when it queued the execution.
    for row, used in zip(rows, buffers, strict=True):
        _delete_donated(row, used)
    lists = read_array(args.output_lists, len(places), ctypes.c_void_p)
    # All results of a device complete together, so its first result tells when the device is done.
    events: list[Any] = [None] * len(places)
    if args.device_complete_events:
        events = [native.LOCKED.polyxla_event() for _ in places]
        (ctypes.c_void_p * len(places)).from_address(args.device_complete_events)[:] = events
    for place, outputs, where, done in zip(places, results, lists, events, strict=True):
        handles = bridge.make_buffers(place, outputs, _outputs(executable), done)
        ctypes.memmove(where, handles, len(outputs) * ctypes.sizeof(ctypes.c_void_p))


def _partitioned(
    bridge: Bridge,
    executable: Executable,
    places: Sequence[int],
    rows: list[list[Buffer]],
    keep: frozenset[int],
) -> list[list[Buffer]]:
    """Queue a partitioned program; its arguments and results are in the order of its own devices."""
    execute = bridge.engine.execute_partitioned
    if not executable.devices:
        return execute(executable, rows, keep)
    # The engine takes the devices by their indices. JAX orders those of a mesh by their coordinates.
    order = sorted(range(len(places)), key=lambda number: bridge.handles[places[number]].device.index)
    found = execute(executable, [rows[number] for number in order], keep)
    return [row for _, row in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _places(bridge: Bridge, executable: Executable, args: Any) -> list[int]:
    """Return the handles of the devices that one execution uses."""
    members = _members(bridge, executable)
    if executable.num_partitions > 1:
        places = list(members)
    elif len(executable.devices) == 1:
        places = [members[0]]
    else:
        places = [args.execute_device or members[0]]
        if places[0] not in members:
            raise PjrtError(
                Code.INVALID_ARGUMENT,
                f"{executable.name} was compiled for the devices {list(executable.devices)}, not for "
                f"{bridge.handles[places[0]].device.index}",
            )
    if args.num_devices != len(places):
        raise PjrtError(
            Code.UNIMPLEMENTED,
            f"one execution of {executable.name} on {args.num_devices} devices is not supported: it was "
            f"compiled for {executable.num_replicas} replicas of {executable.num_partitions} partitions, of "
            f"which this process executes {len(places)} at once",
        )
    return places


def _kept(args: Any) -> frozenset[int]:
    """Return which arguments must not be donated."""
    options = abi.ExecuteOptions.from_address(args.options)
    count = options.num_non_donatable_input_indices
    return frozenset(read_array(options.non_donatable_input_indices, count, ctypes.c_int64))


def _delete_donated(handles: Sequence[int], buffers: Sequence[Buffer]) -> None:
    """Mark the buffers that a program took for its results as deleted in C, which torch_xla asks."""
    for handle, buffer in zip(handles, buffers, strict=True):
        if buffer.is_deleted:
            native.LOCKED.polyxla_delete(handle)


@call("Executable_Serialize")
def executable_serialize(bridge: Bridge, args: Any) -> None:
    data = bridge.engine.serialize(bridge.handles[args.executable])
    args.serialized_bytes_size = len(data)
    args.serialized_bytes, args.serialized_executable, args.serialized_executable_deleter = (
        bridge.handles.new_bytes(data)
    )


@call("Executable_DeserializeAndLoad")
def executable_deserialize_and_load(bridge: Bridge, args: Any) -> None:
    data = ctypes.string_at(args.serialized_executable, args.serialized_executable_size)
    args.loaded_executable = bridge.handles.new(bridge.engine.deserialize(data))
