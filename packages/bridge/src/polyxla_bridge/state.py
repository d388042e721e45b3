"""What stands behind the opaque pointers that torch_xla holds."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from polyxla_bridge.engine import Engine, EngineDevice
from polyxla_bridge.errors import PjrtError, as_pjrt_error

Call = Callable[["Bridge", Any], None]
"""A function of the table: reads and fills its argument struct, raises what becomes a PJRT_Error."""

CALLS: dict[str, Call] = {}
"""The implemented functions by name; all others answer UNIMPLEMENTED."""


def call(name: str) -> Callable[[Call], Call]:
    """Register the implementation of a function of the table."""

    def register(function: Call) -> Call:
        CALLS[name] = function
        return function

    return register


class Handles:
    """Numbers for Python objects: what C holds is the number, never an address."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._numbers = itertools.count(16, 16)

    def new(self, value: Any) -> int:
        """Return a number for `value`, which lives until `drop`."""
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def __getitem__(self, number: int) -> Any:
        return self._objects[number]

    def drop(self, number: int | None) -> None:
        """Forget a number; one that is not known is no error, as free(NULL) is none."""
        if number is not None:
            self._objects.pop(number, None)

    def __len__(self) -> int:
        return len(self._objects)


class Device:
    """A device with the numbers that its description and its one memory space go by."""

    def __init__(self, handles: Handles, device: EngineDevice) -> None:
        self.device = device
        self.handle = handles.new(self)
        self.description = handles.new(self)
        self.memory = handles.new(self)
        self.memories = array([self.memory])
        self.itself = array([self.handle])


class Bridge:
    """One client: the engine, its devices, and everything that torch_xla holds of them.

    Args:
        make_engine: called once, when torch_xla creates its client.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self.handles = Handles()
        self.devices: list[Device] = []
        self.local: list[Device] = []
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        """The engine; `start` has run."""
        assert self._engine is not None
        return self._engine

    def start(self) -> None:
        """Start the engine and name its devices; once."""
        with self._lock:
            if self._engine is None:
                self._engine = self._make_engine()
                self.devices = [Device(self.handles, device) for device in self._engine.devices]
                self.local = [one for one in self.devices if one.device.is_local]
                self.device_array = array([one.handle for one in self.devices])
                self.local_array = array([one.handle for one in self.local])
                self.memory_array = array([one.memory for one in self.local])

    def finish(self, timeout_s: float) -> bool:
        """Wait for what the devices still do, at most `timeout_s` seconds; return whether it is done."""
        return self._engine is None or self._engine.finish(timeout_s)

    def close(self) -> None:
        """Let go of the engine; once."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def error(self, error: BaseException) -> int:
        """Return the number of a PJRT_Error for an exception."""
        return self.handles.new(as_pjrt_error(error))

    def event(self, done: Future[Any]) -> int:
        """Return the number of a PJRT_Event that completes with `done`."""
        return self.handles.new(done)


def array(numbers: list[int], type_: Any = ctypes.c_void_p) -> Any:
    """Return a C array; at least one long, since an empty one may have no address."""
    return (type_ * max(1, len(numbers)))(*numbers)


@functools.cache
def text(value: str | bytes) -> tuple[int, int]:
    """Return address and length of a string that lives as long as the process."""
    data = value if isinstance(value, bytes) else value.encode()
    kept = ctypes.create_string_buffer(data)
    _KEPT.append(kept)
    return ctypes.addressof(kept), len(data)


_KEPT: list[Any] = []


def address(kept: Any) -> int:
    """Return where a ctypes object is."""
    return ctypes.addressof(kept)


def read_array(pointer: int | None, count: int, type_: Any) -> list[int]:
    """Return the numbers that a C array holds."""
    return list((type_ * count).from_address(pointer)) if count and pointer else []


def completed(value: Any = None) -> Future[Any]:
    """Return a promise that is kept already."""
    done: Future[Any] = Future()
    done.set_result(value)
    return done


def failure(done: Future[Any]) -> PjrtError | None:
    """Wait for a promise and return what broke it."""
    error = done.exception()
    return as_pjrt_error(error) if error else None
