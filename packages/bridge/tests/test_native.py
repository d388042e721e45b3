"""What the C part does with events, errors and buffers, called as torch_xla calls it."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import Future
from typing import Any, cast

import pytest

from polyxla_bridge.engine.engine import ArrayType, Buffer, Engine, EngineDevice
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.table import abi
from polyxla_bridge.table.abi import Code
from polyxla_bridge.table.handles import ArrayTypes, Bridge, array
from polyxla_bridge.table.table import Table

TIMEOUT_S = 10


class ListEngine:
    """One device that keeps bytes in a list; what else an engine can is not asked of it here."""

    platform = "CPU"
    process_index = 0
    devices = (EngineDevice(0, 0, True, "list"),)

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.deleted: list[Buffer] = []

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        if type_.dims == (7,):
            raise PjrtError(Code.RESOURCE_EXHAUSTED, "seven is too many")
        self.received.append(bytes(data))
        value: Future[Any] = Future()
        value.set_result(bytes(data))
        return Buffer(type_, device, value)

    def delete(self, buffer: Buffer) -> None:
        self.deleted.append(buffer)


class Caller:
    """A PJRT client of one bridge."""

    def __init__(self) -> None:
        self.engine = ListEngine()
        self.bridge = Bridge(lambda: cast("Engine", self.engine), lambda: None)
        self.table = Table(self.bridge)
        self.bridge.start()
        self.device = self.bridge.local[0].handle

    def __call__(self, name: str, **values: Any) -> Any:
        """Call a function of the table, and return its argument struct; or raise its error."""
        args = abi.ARGS[name](ctypes.sizeof(abi.ARGS[name]), None)
        for field, value in values.items():
            setattr(args, field, value)
        error = abi.CALLBACKS[name](getattr(self.table.api, name))(ctypes.byref(args))
        if error:
            raise self.taken(error)
        return args

    def taken(self, error: int) -> PjrtError:
        message = self("Error_Message", error=error)
        text = ctypes.string_at(message.message, message.message_size).decode()
        code = self("Error_GetCode", error=error).code
        self("Error_Destroy", error=error)
        return PjrtError(code, text)

    def put(
        self, data: bytes, dims: list[int], dtype: str = "uint8", strides: list[int] | None = None
    ) -> Any:
        strides = strides or []
        bytes_ = ctypes.create_string_buffer(data, len(data))
        sizes, steps = array(dims, ctypes.c_int64), array(strides, ctypes.c_int64)
        return self(
            "Client_BufferFromHostBuffer",
            data=ctypes.addressof(bytes_),
            type=abi.DTYPES.index(dtype),
            dims=ctypes.addressof(sizes),
            num_dims=len(dims),
            byte_strides=ctypes.addressof(steps),
            num_byte_strides=len(strides),
            device=self.device,
        )


@pytest.fixture(scope="module")
def caller() -> Caller:
    """One for all: the C part has one queue."""
    return Caller()


@pytest.fixture
def call(caller: Caller) -> Caller:
    caller.engine.received.clear()
    caller.engine.deleted.clear()
    return caller


def test_bytes_from_the_host_reach_the_engine_by_themselves(call: Caller) -> None:
    made = call.put(b"abcdef", [2, 3], strides=[3, 1])
    assert call("Event_IsReady", event=made.done_with_host_buffer).is_ready
    call("Event_Destroy", event=made.done_with_host_buffer)
    assert call("Buffer_OnDeviceSizeInBytes", buffer=made.buffer).on_device_size_in_bytes == 6
    dims = call("Buffer_Dimensions", buffer=made.buffer)
    assert (ctypes.c_int64 * dims.num_dims).from_address(dims.dims)[:] == [2, 3]
    layout = call("Buffer_GetMemoryLayout", buffer=made.buffer).layout.layout.tiled
    order = (ctypes.c_int64 * layout.minor_to_major_size).from_address(layout.minor_to_major)
    assert order[:] == [1, 0]
    wait_until(lambda: call.engine.received == [b"abcdef"])
    call("Buffer_Destroy", buffer=made.buffer)
    wait_until(lambda: len(call.engine.deleted) == 1)


def test_python_never_hears_of_a_buffer_that_it_had_no_time_for(call: Caller) -> None:
    with call.bridge._taking:
        # The thread that takes has one at most, and waits for us with it.
        made = [call.put(b"x", [1]) for _ in range(100)]
        for one in made:
            call("Buffer_Delete", buffer=one.buffer)
            assert call("Buffer_IsDeleted", buffer=one.buffer).is_deleted
            call("Buffer_Destroy", buffer=one.buffer)
            call("Event_Destroy", event=one.done_with_host_buffer)
        call.bridge.take()
    assert not call.engine.received
    assert not call.engine.deleted


@pytest.mark.parametrize(
    ("values", "code", "text"),
    [
        ({"dims": [2, 3], "strides": [1, 2]}, Code.UNIMPLEMENTED, "dimension 1 has a stride of 2 bytes"),
        ({"dims": [1], "dtype": "token"}, Code.INVALID_ARGUMENT, "arrays of type token (23)"),
    ],
)
def test_what_cannot_be_copied_is_refused(call: Caller, values: Any, code: int, text: str) -> None:
    with pytest.raises(PjrtError) as error:
        call.put(b"abcdef", **values)
    assert error.value.code == code
    assert text in error.value.message


def test_strides_that_say_nothing_are_not_looked_at(call: Caller) -> None:
    for dims, strides in [([1, 3], [77, 1]), ([2, 0, 3], [9, 9, 1]), ([], [])]:
        made = call.put(b"abc", dims, strides=strides)
        call("Event_Destroy", event=made.done_with_host_buffer)
        call("Buffer_Destroy", buffer=made.buffer)


def test_a_buffer_that_did_not_reach_the_device_fails_where_it_is_used(call: Caller) -> None:
    made = call.put(b"1234567", [7])
    call.bridge.take()
    error = call.bridge.buffer(made.buffer).value.exception(TIMEOUT_S)
    assert str(error) == "seven is too many"
    call("Buffer_Destroy", buffer=made.buffer)
    call.bridge.take()
    with pytest.raises(PjrtError, match="this array was deleted"):
        call.bridge.buffer(made.buffer)


@pytest.mark.parametrize("error", [None, ValueError("m\u00e9chant")])
def test_those_who_wait_for_an_event_hear_its_end(call: Caller, error: Exception | None) -> None:
    done: Future[None] = Future()
    event = call.bridge.event(done)
    heard: list[str] = []

    def hear(failure: int | None, who: int) -> None:
        heard.append(f"{who} {call.taken(failure) if failure else 'well'}")
        if who == 1:
            # As torch_xla does; the second one still hears.
            call("Event_Destroy", event=event)

    callback = abi.OnReady(hear)
    where = ctypes.cast(callback, ctypes.c_void_p).value
    for who in (1, 2):
        call("Event_OnReady", event=event, callback=where, user_arg=who)
    assert heard == []
    assert not call("Event_IsReady", event=event).is_ready
    done.set_exception(error) if error else done.set_result(None)
    text = "ValueError: m\u00e9chant" if error else "well"
    assert heard == [f"1 {text}", f"2 {text}"]


def test_waiting_for_an_event_does_not_hold_python_up(call: Caller) -> None:
    done: Future[None] = Future()
    event = call.bridge.event(done)
    threading.Timer(0.05, done.set_exception, [KeyError("late")]).start()
    with pytest.raises(PjrtError, match="late"):
        call("Event_Await", event=event)
    with pytest.raises(PjrtError, match="late"):
        call("Event_Error", event=event)
    call("Event_Destroy", event=event)


def test_results_are_ready_with_the_engines_and_go_with_torch_xlas(call: Caller) -> None:
    types = [ArrayType("float32", (2, 3)), ArrayType("bool", ())]
    values: list[Future[Any]] = [Future() for _ in types]
    buffers = [
        Buffer(type_, call.engine.devices[0], value) for type_, value in zip(types, values, strict=True)
    ]
    handles = call.bridge.promise(call.device, buffers, ArrayTypes(types))[:]
    ready = [call("Buffer_ReadyEvent", buffer=handle).event for handle in handles]
    assert [call("Buffer_OnDeviceSizeInBytes", buffer=one).on_device_size_in_bytes for one in handles] == [
        24,
        1,
    ]
    call("Buffer_Destroy", buffer=handles[0])
    wait_until(lambda: call.engine.deleted == buffers[:1])
    for value in values:
        value.set_result(None)
    for event in ready:
        call("Event_Await", event=event)
        call("Event_Destroy", event=event)
    call("Buffer_Destroy", buffer=handles[1])
    wait_until(lambda: call.engine.deleted == buffers)


def test_destroying_nothing_is_harmless(call: Caller) -> None:
    call("Buffer_Destroy", buffer=None)
    call("Event_Destroy", event=None)
    call("Error_Destroy", error=None)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()
