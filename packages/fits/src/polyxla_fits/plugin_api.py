"""The part of the PJRT C API that compiles programs for a TPU that is not there, as a client of libtpu.

jaxlib could do the same with a libtpu of its own age, but it crashes on the one that torch_xla 2.9 needs.
libtpu 0.0.21 (API 0.75) and 0.0.52 (0.117) accept the argument structs of `polyxla_bridge.abi` (0.72): later
versions add fields at the end of structs, and functions at the end of the table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyxla_bridge import abi

Option = str | Sequence[int]


class CompilerError(Exception):
    """An error of the library.

    Args:
        function: the function that failed, without its prefix.
        code: one of `polyxla_bridge.abi.Code`.
        message: the library's.
    """

    def __init__(self, function: str, code: int, message: str) -> None:
        super().__init__(function, code, message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Cost:
    """What a compiled program needs, on each device.

    Attributes:
        argument_bytes: memory of the arguments.
        output_bytes: memory of the results, including results in the memory of donated arguments.
        alias_bytes: memory that a donated argument and a result share, hence in both of the above.
        temporary_bytes: memory in use while the program runs only.
        code_bytes: memory of the program itself.
        flops: floating-point operations; None if the library does not say.
        accessed_bytes: bytes that its operations read and write; None if the library does not say.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int
    flops: float | None
    accessed_bytes: float | None

    @property
    def total_bytes(self) -> int:
        """Memory while the program runs."""
        needed = self.argument_bytes + self.output_bytes - self.alias_bytes
        return needed + self.temporary_bytes + self.code_bytes


class Compiler:
    """A PJRT plugin that compiles for a topology. Not safe to use from several threads.

    libtpu may end the process instead of raising, so use it in a process of its own.

    Args:
        library: the plugin's path.
        topology: its name for the topology, such as ``v5e:2x4``.
        options: its options for the topology.

    Raises:
        CompilerError: the plugin does not know the topology.
    """

    def __init__(self, library: Path, topology: str, options: Mapping[str, Option]) -> None:
        get_api = ctypes.CDLL(str(library)).GetPjrtApi
        get_api.restype = ctypes.c_void_p
        self._api = abi.Api.from_address(get_api())
        self._call("Plugin_Initialize")
        name, values = _Text(topology), _NamedValues(options)
        self._topology = self._call(
            "TopologyDescription_Create",
            topology_name=name.address,
            topology_name_size=name.size,
            create_options=values.address,
            num_options=values.count,
        ).topology

    @property
    def device_count(self) -> int:
        """Number of devices of the topology."""
        found = self._call("TopologyDescription_GetDeviceDescriptions", topology=self._topology)
        return int(found.num_descriptions)

    def compile(self, hlo: bytes, options: bytes) -> Cost:
        """Compile a program, and return what it needs.

        Args:
            hlo: a serialised HloModuleProto.
            options: a serialised CompileOptionsProto.

        Raises:
            CompilerError: it cannot be compiled, or needs too much memory.
        """
        code, form, chosen = _Text(hlo), _Text("hlo"), _Text(options)
        program = abi.Program(
            struct_size=ctypes.sizeof(abi.Program),
            code=code.address,
            code_size=code.size,
            format=form.address,
            format_size=form.size,
        )
        executable = self._call(
            "Compile",
            topology=self._topology,
            program=ctypes.addressof(program),
            compile_options=chosen.address,
            compile_options_size=chosen.size,
        ).executable
        try:
            return self._cost(executable)
        finally:
            self._call("Executable_Destroy", executable=executable)

    def _cost(self, executable: int) -> Cost:
        memory = self._call("Executable_GetCompiledMemoryStats", executable=executable)
        found = self._call("Executable_GetCostAnalysis", executable=executable)
        properties = dict(_floats(found.properties, found.num_properties))
        return Cost(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            # XLA leaves out a count that is 0.
            flops=properties.get("flops", 0.0) if properties else None,
            accessed_bytes=properties.get("bytes accessed"),
        )

    def _call(self, name: str, **fields: Any) -> Any:
        arguments = abi.ARGS[name](struct_size=ctypes.sizeof(abi.ARGS[name]), **fields)
        error = abi.CALLBACKS[name](getattr(self._api, name))(arguments)
        if error:
            raise self._error(name, error)
        return arguments

    def _error(self, function: str, error: int) -> CompilerError:
        code = self._call("Error_GetCode", error=error).code
        text = self._call("Error_Message", error=error)
        message = ctypes.string_at(text.message, text.message_size).decode(errors="replace")
        self._call("Error_Destroy", error=error)
        return CompilerError(function, code, message)


class _Text:
    """Bytes in memory of their own, for C."""

    def __init__(self, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._memory = ctypes.create_string_buffer(data, len(data))
        self.address, self.size = ctypes.addressof(self._memory), len(data)


class _NamedValues:
    """Options in memory of their own, for C."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        values = [self._value(name, option) for name, option in options.items()]
        self._memory = (abi.NamedValue * len(values))(*values)
        self.address, self.count = ctypes.addressof(self._memory), len(values)

    @staticmethod
    def _value(name: str, option: Option) -> abi.NamedValue:
        value = abi.NamedValue(struct_size=ctypes.sizeof(abi.NamedValue), name=name.encode())
        value.name_size = len(name.encode())
        if isinstance(option, str):
            value.type, value.string_value = abi.NamedValueType.STRING, option.encode()
            value.value_size = len(option.encode())
        else:
            numbers = (ctypes.c_int64 * len(option))(*option)
            value.type, value.value_size = abi.NamedValueType.INT64_LIST, len(option)
            value.int64_array_value = ctypes.cast(numbers, ctypes.c_void_p)
        return value


def _floats(address: int | None, count: int) -> list[tuple[str, float]]:
    # Read by their addresses: the names do not end with a zero byte.
    if not address:
        return []
    values = (abi.NamedValue * count).from_address(address)
    return [(_name(value), value.float_value) for value in values if value.type == abi.NamedValueType.FLOAT]


def _name(value: abi.NamedValue) -> str:
    pointer = ctypes.c_void_p.from_buffer(value, abi.NamedValue.name.offset).value
    return ctypes.string_at(pointer or 0, value.name_size).decode()
