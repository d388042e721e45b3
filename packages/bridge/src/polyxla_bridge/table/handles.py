"""What stands behind the opaque pointers that torch_xla holds."""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from polyxla_bridge.engine.engine import ArrayType, Buffer, Engine, EngineDevice
from polyxla_bridge.engine.futures import Promise, end_of
from polyxla_bridge.errors import PjrtError, as_pjrt_error
from polyxla_bridge.native import LOCKED, UNLOCKED
from polyxla_bridge.table.abi import DTYPES, Code, Record

_log = logging.getLogger("polyxla.bridge")
GONE = "this array was deleted, or given to a program for its results"

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
    """A device. Its one number names its description and its one memory space too: C tells them by type."""

    def __init__(self, handles: Handles, device: EngineDevice) -> None:
        self.device = device
        self.handle = handles.new(self)
        self.itself = array([self.handle])


class ArrayTypes:
    """The types of several arrays as C reads them: their numbers, their ranks, and all sizes in one row."""

    def __init__(self, types: Sequence[ArrayType]) -> None:
        self.count = len(types)
        self.numbers = array([DTYPES.index(one.dtype) for one in types], ctypes.c_int)
        self.ranks = array([len(one.dims) for one in types], ctypes.c_size_t)
        self.dims = array([size for one in types for size in one.dims], ctypes.c_int64)


class Bridge:
    """One client: the engine, its devices, and everything that torch_xla holds of them.

    Buffers, events and errors are C's, so that nothing that torch_xla does with them waits for Python.
    What Python has to know of buffers it takes from C's queue: when it needs one, and else on a thread.

    Args:
        make_engine: called once, when torch_xla creates its client.
        settle: waits until torch_xla has asked for all that it will ask for; called once, by `finish`.
    """

    def __init__(self, make_engine: Callable[[], Engine], settle: Callable[[], None]) -> None:
        self.handles = Handles()
        self.devices: list[Device] = []
        self.local: list[Device] = []
        self._buffers: dict[int, Buffer] = {}
        self._make_engine = make_engine
        self._settle = settle
        self._settled: Future[None] = Future()
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        # A program's own finaliser may run while this is held, and read a tensor.
        self._taking = threading.RLock()
        self._taker = threading.Thread(target=self._keep_taking, name="polyxla-buffers", daemon=True)

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
                self._taker.start()

    def finish(self, timeout_s: float) -> bool:
        """Wait for what torch_xla and the devices still do; return whether it is done.

        Args:
            timeout_s: longest wait for each of the two, in seconds.

        Raises:
            RuntimeError: what torch_xla says of something that failed.
        """
        if self._engine is None:
            return True
        UNLOCKED.polyxla_stop()
        try:
            self._settled.result(timeout_s)
        except TimeoutError:
            return False
        return self._engine.finish(timeout_s)

    def close(self) -> None:
        """Let go of the engine; once."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def error(self, error: BaseException) -> int:
        """Return a new PJRT_Error for an exception."""
        known = as_pjrt_error(error)
        text = known.message.encode(errors="replace")
        made: int = LOCKED.polyxla_error(known.code, text, len(text))
        return made

    def event(self, done: Promise) -> int:
        """Return a new PJRT_Event that completes with `done`."""
        event: int = LOCKED.polyxla_event()
        self._complete_with(done, [event])
        return event

    def _complete_with(self, done: Promise, events: list[int]) -> None:
        def complete(done: Promise) -> None:
            error = done.exception()
            # One call: each lets go of Python's lock, and has to wait to get it back.
            UNLOCKED.polyxla_events_complete(array(events), len(events), self.error(error) if error else None)

        done.add_done_callback(complete)

    def promise(self, place: int, buffers: Sequence[Buffer], types: ArrayTypes) -> Any:
        """Return a C array of new PJRT_Buffers on the device `place`, which are ready with the engine's."""
        handles, events = array([0] * len(buffers)), array([0] * len(buffers))
        LOCKED.polyxla_outputs(place, len(buffers), types.numbers, types.ranks, types.dims, handles, events)
        together: dict[Promise, list[int]] = {}
        for buffer, handle, event in zip(buffers, handles, events, strict=False):
            self._buffers[handle] = buffer
            together.setdefault(end_of(buffer.value), []).append(event)
        for done, ready in together.items():
            self._complete_with(done, ready)
        return handles

    def buffer(self, handle: int) -> Buffer:
        """Return the engine's buffer behind a PJRT_Buffer; `take` has run.

        Raises:
            PjrtError: it was given up.
        """
        try:
            return self._buffers[handle]
        except KeyError:
            raise PjrtError(Code.INVALID_ARGUMENT, GONE) from None

    def take(self) -> None:
        """Take what C has queued: buffers from the host to their devices, and those that were given up."""
        record = Record()
        with self._taking:
            while LOCKED.polyxla_take(record):
                if record.is_deleted:
                    self._forget(record.buffer)
                else:
                    self._buffers[record.buffer] = self._from_host(record)

    def _keep_taking(self) -> None:
        while UNLOCKED.polyxla_wait():
            self.take()
        # Here, because at the end of the interpreter no new thread can be started.
        try:
            self._settle()
        except BaseException as error:
            self._settled.set_exception(error)
        else:
            self._settled.set_result(None)

    def _from_host(self, record: Record) -> Buffer:
        dims = read_array(record.dims, record.num_dims, ctypes.c_int64)
        type_ = ArrayType(DTYPES[record.type], tuple(dims))
        device = self.handles[record.place].device
        data = (ctypes.c_char * record.size).from_address(record.data) if record.size else b""
        try:
            return self.engine.from_host(device, type_, memoryview(data).cast("B"))
        except BaseException as error:
            # torch_xla was told that all went well; it hears of this where it uses the array.
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return Buffer(type_, device, broken)
        finally:
            UNLOCKED.polyxla_free(record.data)

    def _forget(self, handle: int) -> None:
        buffer = self._buffers.pop(handle)
        LOCKED.polyxla_drop(handle)
        try:
            self.engine.delete(buffer)
        except BaseException:
            _log.exception("the engine could not delete a buffer")


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
