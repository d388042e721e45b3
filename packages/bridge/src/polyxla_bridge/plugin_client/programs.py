"""Compiled programs of a plugin, and their execution."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from polyxla_bridge import abi
from polyxla_bridge.plugin_client.buffers import DeviceArray, Event
from polyxla_bridge.plugin_client.client import PluginClient, PluginDevice
from polyxla_bridge.plugin_client.plugin import HloProgram, Text, read_array, read_text


class LoadedProgram:
    """A compiled program on the devices of a client. Any thread may use it.

    Args:
        client: of the devices.
        handle: the PJRT_LoadedExecutable.

    Attributes:
        devices: handles of this process's devices that it was compiled for, in its own order; empty if any
            single device may run it.
        code_size_bytes: size of the code.
    """

    def __init__(self, client: PluginClient, handle: int) -> None:
        self._client, self._handle = client, handle
        # The client owns each handle before the next call, which may fail.
        client.own("LoadedExecutable_Destroy", handle)
        # `__del__` reads this even if the call below fails: the client owns no handle 0.
        self._executable = 0
        plugin = client.plugin
        self._executable = plugin.call("LoadedExecutable_GetExecutable", loaded_executable=handle).executable
        client.own("Executable_Destroy", self._executable)
        found = plugin.call("LoadedExecutable_AddressableDevices", executable=handle)
        self.devices = tuple(read_array(found.addressable_devices, found.num_addressable_devices))
        size = plugin.call("Executable_SizeOfGeneratedCodeInBytes", executable=self._executable)
        self.code_size_bytes: int = size.size_in_bytes

    def __del__(self) -> None:
        self._client.destroy("Executable_Destroy", self._executable)
        self._client.destroy("LoadedExecutable_Destroy", self._handle)

    def optimized(self) -> tuple[str, bytes]:
        """Return the optimised program: its format, ``hlo`` or ``hlo_with_config``, and its bytes."""
        program = abi.Program(struct_size=ctypes.sizeof(abi.Program))
        asked = {"executable": self._executable, "program": ctypes.addressof(program)}
        # Without memory for the code, the first call only returns its size.
        self._client.plugin.call("Executable_OptimizedProgram", **asked)
        code = ctypes.create_string_buffer(program.code_size)
        program.code = ctypes.addressof(code)
        self._client.plugin.call("Executable_OptimizedProgram", **asked)
        return read_text(program.format, program.format_size), code.raw[: program.code_size]

    def memory(self) -> Any:
        """Return ``PJRT_Executable_GetCompiledMemoryStats_Args``: what an execution needs, in bytes."""
        return self._client.plugin.call("Executable_GetCompiledMemoryStats", executable=self._executable)

    def serialize(self) -> bytes:
        """Return the program as bytes that `load` of the same plugin reads."""
        found = self._client.plugin.call("Executable_Serialize", executable=self._executable)
        # The plugin allocated the bytes, so they are copied, and freed by its own function.
        data = ctypes.string_at(found.serialized_bytes, found.serialized_bytes_size)
        abi.Deleter(found.serialized_executable_deleter)(found.serialized_executable)
        return data

    def launch(
        self,
        rows: Sequence[Sequence[DeviceArray]],
        sizes: Sequence[int],
        keep: frozenset[int],
        device: PluginDevice | None,
    ) -> tuple[list[list[DeviceArray]], list[Event]]:
        """Start an execution.

        Args:
            rows: the arguments on each device, in the order of `devices`.
            sizes: size of each result on one device, in bytes.
            keep: indices of arguments that must not be donated.
            device: the only device that is to run the program now; None for all of `devices`.

        Returns:
            The results on each device, and the event of each device's end.
        """
        plugin, count = self._client.plugin, len(rows)
        options_type = abi.execute_options(plugin.minor)
        kept = (ctypes.c_int64 * max(len(keep), 1))(*keep)
        options = options_type(
            struct_size=ctypes.sizeof(options_type),
            non_donatable_input_indices=ctypes.addressof(kept),
            num_non_donatable_input_indices=len(keep),
        )
        given = [_pointers([argument.handle for argument in row]) for row in rows]
        made = [_pointers([None] * len(sizes)) for _ in rows]
        lists, results, events = _table(given), _table(made), _pointers([None] * count)
        plugin.call(
            "LoadedExecutable_Execute",
            executable=self._handle,
            options=ctypes.addressof(options),
            argument_lists=ctypes.addressof(lists),
            num_devices=count,
            num_args=len(rows[0]),
            output_lists=ctypes.addressof(results),
            device_complete_events=ctypes.addressof(events),
            execute_device=device.handle if device else None,
        )
        # A row may be longer than the results: an array in C has at least one element.
        arrays = [
            [DeviceArray(self._client, handle, size) for handle, size in zip(row, sizes, strict=False)]
            for row in made
        ]
        return arrays, [Event(plugin, event) for event in events[:count]]


def _pointers(values: Sequence[int | None]) -> Any:
    # The array gets at least one element, because an empty array may have no address.
    return (ctypes.c_void_p * max(len(values), 1))(*values)


def _table(rows: Sequence[Any]) -> Any:
    return _pointers([ctypes.addressof(row) for row in rows])


def compile_hlo(client: PluginClient, hlo: bytes, options: bytes) -> LoadedProgram:
    """Compile a program, and load it on the devices that its options name.

    Args:
        client: of the devices.
        hlo: a serialised HloModuleProto.
        options: a serialised CompileOptionsProto, with the plugin's numbers of the devices.

    Raises:
        PjrtError: the plugin's, with its words.
    """
    client.check_open()
    program, chosen = HloProgram(hlo), Text(options)
    made = client.plugin.call(
        "Client_Compile",
        client=client.handle,
        program=program.address,
        compile_options=chosen.address,
        compile_options_size=chosen.size,
    )
    return LoadedProgram(client, made.executable)


def load(client: PluginClient, data: bytes, options: bytes) -> LoadedProgram:
    """Load a program that `LoadedProgram.serialize` returned.

    Args:
        client: of the devices.
        data: the program.
        options: its options, with this client's numbers of the devices.

    Raises:
        PjrtError: the plugin's, with its words.
    """
    client.check_open()
    program, chosen = Text(data), Text(options)
    made = client.plugin.call(
        "Executable_DeserializeAndLoad",
        client=client.handle,
        serialized_executable=program.address,
        serialized_executable_size=program.size,
        overridden_serialized_compile_options=chosen.address,
        overridden_serialized_compile_options_size=chosen.size,
    )
    return LoadedProgram(client, made.loaded_executable)
