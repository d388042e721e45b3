"""Python's values in C's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from polyxla_bridge.abi import NamedValue, NamedValueType, Program

Option = str | bool | int | float | Sequence[int]
"""The value of a named option."""


class Text:
    """Bytes in memory of their own, for C.

    Attributes:
        address: of the first byte.
        size: number of bytes.
    """

    def __init__(self, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._memory = ctypes.create_string_buffer(data, len(data))
        self.address, self.size = ctypes.addressof(self._memory), len(data)


class HloProgram:
    """A serialised HloModuleProto as ``PJRT_Program``.

    Attributes:
        address: of the struct.
    """

    def __init__(self, hlo: bytes) -> None:
        self._code, self._format = Text(hlo), Text("hlo")
        self._memory = Program(
            struct_size=ctypes.sizeof(Program),
            code=self._code.address,
            code_size=self._code.size,
            format=self._format.address,
            format_size=self._format.size,
        )
        self.address = ctypes.addressof(self._memory)


class NamedValues:
    """Named options in memory of their own, for C.

    Attributes:
        address: of the first option.
        count: number of options.
    """

    def __init__(self, options: Mapping[str, Option]) -> None:
        values = [_value(name, option) for name, option in options.items()]
        self._memory = (NamedValue * len(values))(*values)
        self.address, self.count = ctypes.addressof(self._memory), len(values)


def _value(name: str, option: Option) -> NamedValue:
    value = NamedValue(struct_size=ctypes.sizeof(NamedValue), name=name.encode(), value_size=1)
    value.name_size = len(name.encode())
    # Before integers: a boolean is one, too.
    if isinstance(option, bool):
        value.type, value.bool_value = NamedValueType.BOOL, option
    elif isinstance(option, int):
        value.type, value.int64_value = NamedValueType.INT64, option
    elif isinstance(option, float):
        value.type, value.float_value = NamedValueType.FLOAT, option
    elif isinstance(option, str):
        value.type, value.string_value = NamedValueType.STRING, option.encode()
        value.value_size = len(option.encode())
    else:
        numbers = (ctypes.c_int64 * len(option))(*option)
        value.type, value.value_size = NamedValueType.INT64_LIST, len(option)
        value.int64_array_value = ctypes.cast(numbers, ctypes.c_void_p)
    return value


def read_values(address: int | None, count: int) -> dict[str, Any]:
    """Return named values that C has written."""
    if not address:
        return {}
    return {_name(value): _read(value) for value in (NamedValue * count).from_address(address)}


def _name(value: NamedValue) -> str:
    # Read by its address: a name does not end with a zero byte.
    pointer = ctypes.c_void_p.from_buffer(value, NamedValue.name.offset).value
    return read_text(pointer, value.name_size)


def _read(value: NamedValue) -> Any:
    match value.type:
        case NamedValueType.STRING:
            pointer = ctypes.c_void_p.from_buffer(value, NamedValue.value.offset).value
            return read_text(pointer, value.value_size)
        case NamedValueType.INT64:
            return value.int64_value
        case NamedValueType.INT64_LIST:
            return read_array(value.int64_array_value, value.value_size, ctypes.c_int64)
        case NamedValueType.FLOAT:
            return value.float_value
        case _:
            return value.bool_value


def read_text(address: int | None, size: int) -> str:
    """Return text that C has written; C does not always write valid UTF-8."""
    return ctypes.string_at(address, size).decode(errors="replace") if address and size else ""


def read_array(address: int | None, count: int, type_: Any = ctypes.c_void_p) -> list[int]:
    """Return the elements of a C array; empty for a null pointer."""
    return list((type_ * count).from_address(address)) if count and address else []
