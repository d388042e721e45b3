"""The objects behind the opaque pointers that torch_xla holds, and the bridge that owns them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from polyxla_bridge.abi import DTYPES, Code, Deleter, NamedValue, NamedValueType, Record
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, Engine, EngineDevice
from polyxla_bridge.engine.futures import CompletedFuture, FutureLike, completion_of
from polyxla_bridge.errors import PjrtError, as_pjrt_error
from polyxla_bridge.native import LOCKED, UNLOCKED
from polyxla_bridge.programs.executable import ArrayType

_log = logging.getLogger("polyxla.bridge")
GONE = "this array was deleted, or donated to a program"

Call = Callable[["Bridge", Any], None]
"""A function of the table: reads and fills its argument struct; an exception becomes a PJRT_Error."""

CALLS: dict[str, Call] = {}
"""The functions implemented in Python, by name. Any other function that is not in C answers UNIMPLEMENTED."""


def call(name: str) -> Callable[[Call], Call]:
    """Register the Python implementation of a PJRT function."""

    def register(function: Call) -> Call:
        CALLS[name] = function
        return function

    return register


class Handles:
    """Handles of Python objects: C holds a number, never an address."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        # No handle is 0, which C would take for a null pointer.
        self._numbers = itertools.count(16, 16)

    def new(self, value: Any) -> int:
        """Return a handle for `value`, which lives until `drop`."""
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def new_bytes(self, data: bytes) -> tuple[int, int, int | None]:
        """Return the address of a copy of `data`, its handle, and the function by which C releases both."""
        copy = ctypes.create_string_buffer(data, len(data))
        deleter = Deleter(self.drop)
        # The handle keeps the deleter alive too.
        return address(copy), self.new((copy, deleter)), ctypes.cast(deleter, ctypes.c_void_p).value

    def __getitem__(self, number: int) -> Any:
        return self._objects[number]

    def drop(self, number: int | None) -> None:
        """Release a handle; an unknown one is ignored, as free(NULL) is."""
        if number is not None:
            self._objects.pop(number, None)

    def __len__(self) -> int:
        return len(self._objects)


class DeviceHandle:
    """A device. Its handle also stands for its description and its only memory, which differ in type in C."""

    def __init__(self, handles: Handles, device: EngineDevice) -> None:
        self.device = device
        self.handle = handles.new(self)
        self.itself = array([self.handle])
        self.attributes = _attributes(device)


def _attributes(device: EngineDevice) -> Any:
    """Return the attributes of a device as a C array, which is empty on the CPU.

    Source: the names and types are libtpu's; ``jax.Device`` shows both.
    """
    if device.place is None:
        return (NamedValue * 0)()
    x, y, z, core, slice_index = device.place
    coordinates = array([x, y, z], ctypes.c_int64)
    # The attributes hold only its address, and C reads them as long as the process lives.
    _keep(coordinates)
    coords = _attribute(b"coords", NamedValueType.INT64_LIST, 3)
    coords.int64_array_value = address(coordinates)
    numbers = {b"core_on_chip": core, b"num_cores": device.cores}
    # libtpu has this attribute in a job on several slices only: torch_xla and torch_tpu tell them by it.
    if slice_index is not None:
        numbers[b"slice_index"] = slice_index
    attributes = [coords]
    for name, number in numbers.items():
        attributes.append(_attribute(name, NamedValueType.INT64, 1))
        attributes[-1].int64_value = number
    return (NamedValue * len(attributes))(*attributes)


def _attribute(name: bytes, kind: int, size: int) -> NamedValue:
    return NamedValue(
        struct_size=ctypes.sizeof(NamedValue), name=name, name_size=len(name), type=kind, value_size=size
    )


class ArrayTypes:
    """The types of several arrays in the form that C reads: dtypes, ranks, and all dimensions in one row."""

    def __init__(self, types: Sequence[ArrayType]) -> None:
        self.count = len(types)
        self.numbers = array([DTYPES.index(type_.dtype) for type_ in types], ctypes.c_int)
        self.ranks = array([len(type_.dims) for type_ in types], ctypes.c_size_t)
        self.dims = array([size for type_ in types for size in type_.dims], ctypes.c_int64)


class Bridge:
    """One PJRT client: the engine, its devices, and the objects that torch_xla holds.

    Buffers, events and errors are C objects, so that torch_xla never waits for the GIL when it uses one. C
    queues new and deleted buffers for Python. Python drains the queue before it needs a buffer, and otherwise
    on a thread.

    Args:
        make_engine: called when torch_xla creates its client, and when it creates another after the last has
            ended.
        wait_for_torch_xla: returns when torch_xla has submitted all its work; called once, by `finish`.
    """

    def __init__(self, make_engine: Callable[[], Engine], wait_for_torch_xla: Callable[[], None]) -> None:
        self.handles = Handles()
        self.clients: set[int] = set()
        self.devices: list[DeviceHandle] = []
        self.local: list[DeviceHandle] = []
        self._buffers: dict[int, Buffer] = {}
        self._make_engine = make_engine
        self._wait_for_torch_xla = wait_for_torch_xla
        self._torch_xla_done: Future[None] = Future()
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        # The lock is reentrant, because the garbage collector may run a user's finaliser while a thread holds
        # it, and the finaliser may read a tensor.
        self._drain_lock = threading.RLock()
        self._drain_thread = threading.Thread(
            target=self._drain_until_stopped, name="polyxla-buffers", daemon=True
        )

    @property
    def is_started(self) -> bool:
        """Whether the engine has started, and is not closed."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine. Call `start` first."""
        assert self._engine is not None
        return self._engine

    def start(self) -> None:
        """Start the engine and make the handles of its devices; a second call does nothing."""
        with self._lock:
            if self._engine is None:
                self._engine = self._make_engine()
                self.devices = [DeviceHandle(self.handles, device) for device in self._engine.devices]
                self.local = [device for device in self.devices if device.device.is_local]
                self.device_array = array([device.handle for device in self.devices])
                self.local_array = array([handle.handle for handle in self.local])
                LOCKED.polyxla_set_local(self.local_array, len(self.local))
                # The thread outlives the engine, because C's queue belongs to the process.
                if self._drain_thread.ident is None:
                    self._drain_thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Wait for the remaining work of torch_xla, then of the devices; return whether all is done.

        Args:
            timeout_s: longest wait for each of the two, in seconds, while no device computes by itself.

        Raises:
            RuntimeError: an execution failed; raised by torch_xla.
        """
        if self._engine is None:
            return True
        # The stopped queue ends the loop of the drain thread, which then waits for torch_xla.
        UNLOCKED.polyxla_stop()
        while wait([self._torch_xla_done], timeout_s).not_done:
            if not self._is_computing(self._engine):
                return False
        self._torch_xla_done.result()
        while not self._engine.finish(timeout_s):
            if not self._is_computing(self._engine):
                return False
        return True

    @staticmethod
    def _is_computing(engine: Engine) -> bool:
        """Return whether a device runs a program that needs no other device, and so ends by itself."""
        return any(activity.program and not activity.collectives for activity in engine.activities())

    def stay(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until every replica of the job has returned."""
        if self._engine is not None:
            self._engine.stay(timeout_s)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, others_s: float = 0) -> None:
        """Close the engine; a second call does nothing. The arguments are those of `Engine.close`."""
        with self._lock:
            engine, self._engine = self._engine, None
        # Close without the lock: closing may take a minute, and a second call must not wait for it.
        if engine is not None:
            engine.close(timeout_s, others_s)

    def error(self, error: BaseException) -> int:
        """Return a new PJRT_Error for an exception."""
        known = as_pjrt_error(error)
        text = known.message.encode(errors="replace")
        made: int = LOCKED.polyxla_error(known.code, text, len(text))
        return made

    def event(self, done: FutureLike) -> int:
        """Return a new PJRT_Event that completes with `done`."""
        event: int = LOCKED.polyxla_event()
        self._complete_with(done, [event])
        return event

    def _complete_with(self, done: FutureLike, events: list[int]) -> None:
        def complete(done: FutureLike) -> None:
            error = done.exception()
            # One call for all events, because each call releases the GIL and waits to acquire it again.
            UNLOCKED.polyxla_events_complete(array(events), len(events), self.error(error) if error else None)

        done.add_done_callback(complete)

    def make_buffers(
        self, place: int, buffers: Sequence[Buffer], types: ArrayTypes, done: int | None = None
    ) -> Any:
        """Return a C array of new PJRT_Buffers on device `place`, each ready when its engine buffer is.

        Args:
            place: handle of the device.
            buffers: the engine's.
            types: of the buffers.
            done: a PJRT_Event that completes with the first buffer; at once if there is none.
        """
        handles, events = array([0] * len(buffers)), array([0] * len(buffers))
        LOCKED.polyxla_outputs(place, len(buffers), types.numbers, types.ranks, types.dims, handles, events)
        # Results of one execution complete together: one callback completes all their events.
        together: dict[FutureLike, list[int]] = {}
        # The zip is not strict, because an `array` has an element even if there are no buffers.
        for buffer, handle, event in zip(buffers, handles, events, strict=False):
            self._buffers[handle] = buffer
            together.setdefault(completion_of(buffer.value), []).append(event)
        if done is not None:
            first = completion_of(buffers[0].value) if buffers else CompletedFuture()
            together.setdefault(first, []).append(done)
        for completion, ready in together.items():
            self._complete_with(completion, ready)
        return handles

    def buffer(self, handle: int) -> Buffer:
        """Return the engine's buffer behind a PJRT_Buffer. Call `drain` first.

        Raises:
            PjrtError: it was deleted or donated.
        """
        try:
            return self._buffers[handle]
        except KeyError:
            raise PjrtError(Code.INVALID_ARGUMENT, GONE) from None

    def drain(self) -> None:
        """Process C's queue: copy new buffers to their devices, release deleted ones."""
        record = Record()
        # A record that another thread has taken is in `_buffers` once that thread releases the lock. So each
        # caller finds every buffer that was queued before its call.
        with self._drain_lock:
            while LOCKED.polyxla_take(record):
                if record.is_deleted:
                    self._delete(record.buffer)
                else:
                    self._buffers[record.buffer] = self._from_host(record)

    def _drain_until_stopped(self) -> None:
        while UNLOCKED.polyxla_wait():
            self.drain()
        # This thread waits for torch_xla, because no thread can be started while the interpreter shuts down.
        try:
            self._wait_for_torch_xla()
        except BaseException as error:
            self._torch_xla_done.set_exception(error)
        else:
            self._torch_xla_done.set_result(None)

    def _from_host(self, record: Record) -> Buffer:
        dims = read_array(record.dims, record.num_dims, ctypes.c_int64)
        type_ = ArrayType(DTYPES[record.type], tuple(dims))
        device = self.handles[record.place].device
        data = host_memory(record.data, record.size)
        # The engine may use C's memory as it is, so it is freed with the last reference to it.
        if record.size:
            memory: Any = data.obj
            memory.allocation = _Allocation(record.data)
        try:
            return self.engine.from_host(device, type_, data)
        except BaseException as error:
            # torch_xla's call has returned, so the error is raised where the array is used. It gets no
            # traceback, because the frames of one would keep the data until then.
            broken: Future[Any] = Future()
            broken.set_exception(error.with_traceback(None))
            return Buffer(type_, device, broken)

    def _delete(self, handle: int) -> None:
        # Remove the entry first: once the reference is dropped, C may give a new buffer the same address.
        buffer = self._buffers.pop(handle)
        LOCKED.polyxla_drop(handle)
        # A framework may delete its buffers just before its client, while they are in the queue.
        if not self.is_started:
            return
        try:
            self.engine.delete(buffer)
        except BaseException:
            _log.exception("the engine could not delete a buffer")


class _Allocation:
    """Memory of C that is freed with the last reference to this object."""

    _free = UNLOCKED.polyxla_free

    def __init__(self, address: int) -> None:
        self._address = address

    def __del__(self) -> None:
        self._free(self._address)


def host_memory(start: int | None, size: int) -> memoryview:
    """Return a view of C's memory."""
    if not start or not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(start)).cast("B")


def array(numbers: list[int], type_: Any = ctypes.c_void_p) -> Any:
    """Return a C array of at least one element, since an empty one may have no address."""
    return (type_ * max(1, len(numbers)))(*numbers)


@functools.cache
def text(value: str | bytes) -> tuple[int, int]:
    """Return address and length of a C string that is never freed."""
    data = value if isinstance(value, bytes) else value.encode()
    copy = ctypes.create_string_buffer(data)
    _keep(copy)
    return ctypes.addressof(copy), len(data)


def _keep(value: Any) -> None:
    """Keep a C object for ever, because TorchTPU's threads outlive the interpreter and still read it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def address(value: Any) -> int:
    """Return the address of a ctypes object."""
    return ctypes.addressof(value)


def read_array(pointer: int | None, count: int, type_: Any) -> list[int]:
    """Return the elements of a C array; empty for a null pointer."""
    return list((type_ * count).from_address(pointer)) if count and pointer else []
