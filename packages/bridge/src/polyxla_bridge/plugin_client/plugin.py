"""A PJRT plugin: its library with a function table, the calls, and their arguments in C's memory."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from polyxla_bridge import abi
from polyxla_bridge.abi import Code, NamedValue, NamedValueType, Program
from polyxla_bridge.errors import PjrtError

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
    # The size of a value is its number of elements: 1 for all but strings and lists.
    value = NamedValue(struct_size=ctypes.sizeof(NamedValue), name=name.encode(), value_size=1)
    value.name_size = len(name.encode())
    # Check booleans before integers: bool is a subclass of int.
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
        # The cast refers to the array, and the struct to the cast: the memory lives as long as the struct.
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
    # ctypes would read text up to a zero byte, which a name in C need not have, so its address is read.
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


Function = Callable[[Any], int | None]
"""A function of the table: takes its argument struct, and returns an error or none."""

OLDEST_MINOR = abi.MINOR
"""The oldest API version that is supported, as its minor number; the argument structs are of this one.

Later versions add functions at the end of the table, and fields at the end of structs. Of the structs that
are used here, plugins accept shorter ones, except for `abi.execute_options`. Tried with lammps-jax-pjrt-cpu
0.11.2 (0.115), and with libtpu 0.0.21 (0.75) and 0.0.52 (0.117) as far as compiling.
"""

FFI_MINOR = 115
"""The oldest API version whose plugins call the C library: XLA appends to its foreign function interface, and
the library's handlers are of the version that such plugins have. Tried with lammps-jax-pjrt-cpu 0.11.2.
"""

_log = logging.getLogger("polyxla.bridge")
_loaded: dict[Path, Plugin] = {}
_loading = threading.Lock()


class Plugin:
    """A loaded plugin. Any thread may call its functions. Use `load`: a process initializes a plugin once.

    Args:
        path: the library's.

    Attributes:
        path: the library's.
        minor: the API version that the plugin implements is 0.`minor`.

    Raises:
        PjrtError: the library cannot be loaded, is no plugin, or is of an API version that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._functions: dict[str, Function] = {}
        try:
            get_api = ctypes.CDLL(str(path)).GetPjrtApi
        except (OSError, AttributeError) as error:
            raise PjrtError(
                Code.NOT_FOUND, f"{path} cannot be used as a PJRT plugin, a library with GetPjrtApi: {error}"
            ) from error
        get_api.restype = ctypes.c_void_p
        address = get_api()
        if not address:
            raise PjrtError(Code.NOT_FOUND, f"{path} has no PJRT functions for this process")
        self._api = abi.Api.from_address(address)
        version = self._api.pjrt_api_version
        self.minor = version.minor_version
        if version.major_version != abi.MAJOR or self.minor < OLDEST_MINOR:
            raise PjrtError(
                Code.UNIMPLEMENTED,
                f"{path} speaks version {version.major_version}.{self.minor} of PJRT's API, and versions "
                f"{abi.MAJOR}.{OLDEST_MINOR} and later are supported: install a newer plugin",
            )
        self.call("Plugin_Initialize")

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """What the plugin says of itself, such as the StableHLO version that it reads."""
        found = self.call("Plugin_Attributes")
        return read_values(found.attributes, found.num_attributes)

    def has(self, name: str) -> bool:
        """Return whether the plugin has a function."""
        # The table of an older version is shorter, and behind its end is other memory.
        end = getattr(abi.Api, name).offset + ctypes.sizeof(ctypes.c_void_p)
        return end <= self._api.struct_size and bool(getattr(self._api, name))

    def function(self, name: str) -> Function:
        """Return a function of the table. It does not hold the GIL; pass its error to `check`.

        Args:
            name: one of `abi.FUNCTIONS`.

        Raises:
            PjrtError: the plugin does not have it.
        """
        if name not in self._functions:
            if not self.has(name):
                raise PjrtError(
                    Code.UNIMPLEMENTED,
                    f"the plugin {self.path}, of API version {abi.MAJOR}.{self.minor}, lacks PJRT_{name}",
                )
            self._functions[name] = abi.CALLBACKS[name](getattr(self._api, name))
        return self._functions[name]

    def call(self, name: str, **fields: Any) -> Any:
        """Call a function.

        Args:
            name: one of `abi.FUNCTIONS`.
            fields: of its argument struct.

        Returns:
            The struct, in which the function has written its results.

        Raises:
            PjrtError: the function failed, or does not exist.
        """
        arguments = abi.ARGS[name](struct_size=ctypes.sizeof(abi.ARGS[name]), **fields)
        self.check(self.function(name)(arguments))
        return arguments

    def register(self, target: str, handler: int) -> bool:
        """Let programs on the host's CPU call a function by its name; return whether they can.

        Args:
            target: the name.
            handler: address of a handler of XLA's foreign function interface.
        """
        extension = self._extension(abi.EXTENSION_TYPE_FFI)
        if extension is None or self.minor < FFI_MINOR:
            return False
        name, platform = Text(target), Text("Host")
        arguments = abi.RegisterHandler(
            struct_size=ctypes.sizeof(abi.RegisterHandler),
            target_name=name.address,
            target_name_size=name.size,
            handler=handler,
            platform_name=platform.address,
            platform_name_size=platform.size,
        )
        type_ = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(abi.RegisterHandler))
        try:
            self.check(type_(abi.FfiExtension.from_address(extension).register_handler)(arguments))
        except PjrtError as error:
            _log.info("programs on %s cannot call %s: %s", self.path, target, error.message)
            return False
        return True

    def _extension(self, type_: int) -> int | None:
        """Return the address of an extension; None if the plugin has none of this type."""
        at = self._api.extension_start
        while at:
            base = abi.ExtensionBase.from_address(at)
            if base.type == type_:
                return int(at)
            at = base.next
        return None

    def check(self, error: int | None) -> None:
        """Raise the error that a function returned, if it returned one.

        Raises:
            PjrtError: with the plugin's own code and words.
        """
        if not error:
            return
        code = self.call("Error_GetCode", error=error).code
        # The text belongs to the error, so it is copied before the error is destroyed.
        text = self.call("Error_Message", error=error)
        message = read_text(text.message, text.message_size)
        self.call("Error_Destroy", error=error)
        raise PjrtError(code, message)


def load(path: Path) -> Plugin:
    """Load a plugin, and initialize it if this process has not.

    Raises:
        PjrtError: as for `Plugin`.
    """
    # The lock is held while a plugin is loaded: a second thread must not initialize it again.
    path = path.resolve()
    with _loading:
        if path not in _loaded:
            _loaded[path] = Plugin(path)
        return _loaded[path]
