"""Events, errors and buffers of the C library, called as torch_xla calls them."""

from __future__ import annotations

import ctypes
import json
import re
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from polyxla_bridge import abi, native
from polyxla_bridge.abi import Code
from polyxla_bridge.engine.engine import Buffer, Engine, EngineDevice
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs.executable import ArrayType
from polyxla_bridge.table.handles import ArrayTypes, Bridge, array
from polyxla_bridge.table.table import Table

TIMEOUT_S = 60


class ListEngine:
    """An engine with one device that collects bytes; only what these tests call is implemented."""

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

    def to_host(self, buffer: Buffer, into: memoryview) -> Future[memoryview]:
        done: Future[memoryview] = Future()

        def write() -> None:
            into[:] = buffer.value.result()
            done.set_result(into)

        threading.Timer(0.2, write).start()
        return done

    def delete(self, buffer: Buffer) -> None:
        self.deleted.append(buffer)


class Caller:
    """A PJRT client of one bridge."""

    def __init__(self) -> None:
        self.engine = ListEngine()
        self.bridge = Bridge(lambda: cast("Engine", self.engine), lambda: None)
        self.table = Table(self.bridge)
        self.client = self("Client_Create").client
        self.device = self.bridge.local[0].handle

    def __call__(self, name: str, **values: Any) -> Any:
        """Call a function of the table; return its argument struct, or raise its error."""
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
    """One for all tests, because the C library has one queue."""
    return Caller()


@pytest.fixture
def call(caller: Caller) -> Caller:
    caller.engine.received.clear()
    caller.engine.deleted.clear()
    return caller


def test_bytes_from_the_host_reach_the_engine_without_another_call(call: Caller) -> None:
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


def test_a_buffer_deleted_before_python_sees_it_is_skipped(call: Caller) -> None:
    with call.bridge._drain_lock:
        # The draining thread waits for this lock, with one record at most.
        made = [call.put(b"x", [1]) for _ in range(100)]
        for handle in made:
            call("Buffer_Delete", buffer=handle.buffer)
            assert call("Buffer_IsDeleted", buffer=handle.buffer).is_deleted
            call("Buffer_Destroy", buffer=handle.buffer)
            call("Event_Destroy", event=handle.done_with_host_buffer)
        call.bridge.drain()
    assert not call.engine.received
    assert not call.engine.deleted


@pytest.mark.parametrize(
    ("dims", "strides", "dtype", "expected"),
    [
        ([3, 2], [1, 3], "uint8", b"adbecf"),
        ([2, 2], [3, 2], "uint8", b"acdf"),
        ([2, 1, 2], [2, 9, 1], "uint8", b"abcd"),
        ([2, 2], [4, 2], "int16", b"abcdefgh"),
        ([2, 2], [2, 4], "int16", b"abefcdgh"),
        ([3], [0], "int16", b"ababab"),
    ],
)
def test_arrays_that_are_not_dense_are_copied_in_their_order(
    call: Caller, dims: list[int], strides: list[int], dtype: str, expected: bytes
) -> None:
    made = call.put(b"abcdefgh", dims, dtype, strides)
    wait_until(lambda: call.engine.received == [expected])
    call("Event_Destroy", event=made.done_with_host_buffer)
    call("Buffer_Destroy", buffer=made.buffer)
    wait_until(lambda: len(call.engine.deleted) == 1)


def test_an_array_of_an_unknown_type_is_refused(call: Caller) -> None:
    with pytest.raises(PjrtError) as error:
        call.put(b"abcdef", [1], "token")
    assert error.value.code == Code.INVALID_ARGUMENT
    assert "arrays of type token (23)" in error.value.message


def test_strides_without_effect_are_ignored(call: Caller) -> None:
    cases = [([1, 3], [77, 1]), ([2, 0, 3], [9, 9, 1]), ([], [])]
    made = [call.put(b"abc", dims, strides=strides) for dims, strides in cases]
    wait_until(lambda: call.engine.received == [b"abc", b"", b"a"])
    for handle in made:
        call("Event_Destroy", event=handle.done_with_host_buffer)
        call("Buffer_Destroy", buffer=handle.buffer)
    wait_until(lambda: len(call.engine.deleted) == len(made))


def test_an_upload_error_is_raised_where_the_buffer_is_used(call: Caller) -> None:
    made = call.put(b"1234567", [7])
    call.bridge.drain()
    error = call.bridge.buffer(made.buffer).value.exception(TIMEOUT_S)
    assert str(error) == "seven is too many"
    call("Buffer_Destroy", buffer=made.buffer)
    call.bridge.drain()
    with pytest.raises(PjrtError, match="this array was deleted"):
        call.bridge.buffer(made.buffer)


@pytest.mark.parametrize("error", [None, ValueError("m\u00e9chant")])
def test_all_callbacks_of_an_event_are_called(call: Caller, error: Exception | None) -> None:
    done: Future[None] = Future()
    event = call.bridge.event(done)
    called: list[str] = []

    def on_ready(failure: int | None, who: int) -> None:
        called.append(f"{who} {call.taken(failure) if failure else 'well'}")
        if who == 1:
            # As torch_xla does; the second callback is still called.
            call("Event_Destroy", event=event)

    callback = abi.OnReady(on_ready)
    where = ctypes.cast(callback, ctypes.c_void_p).value
    for who in (1, 2):
        call("Event_OnReady", event=event, callback=where, user_arg=who)
    assert called == []
    assert not call("Event_IsReady", event=event).is_ready
    done.set_exception(error) if error else done.set_result(None)
    text = "ValueError: m\u00e9chant" if error else "well"
    assert called == [f"1 {text}", f"2 {text}"]


def test_waiting_for_an_event_releases_the_gil(call: Caller) -> None:
    done: Future[None] = Future()
    event = call.bridge.event(done)
    threading.Timer(0.05, done.set_exception, [KeyError("late")]).start()
    with pytest.raises(PjrtError, match="late"):
        call("Event_Await", event=event)
    with pytest.raises(PjrtError, match="late"):
        call("Event_Error", event=event)
    call("Event_Destroy", event=event)


def test_results_are_ready_when_the_engine_is_and_deleted_when_torch_xla_destroys_them(call: Caller) -> None:
    types = [ArrayType("float32", (2, 3)), ArrayType("bool", ())]
    values: list[Future[Any]] = [Future() for _ in types]
    buffers = [
        Buffer(type_, call.engine.devices[0], value) for type_, value in zip(types, values, strict=True)
    ]
    handles = call.bridge.make_buffers(call.device, buffers, ArrayTypes(types))[:]
    ready = [call("Buffer_ReadyEvent", buffer=handle).event for handle in handles]
    assert [
        call("Buffer_OnDeviceSizeInBytes", buffer=handle).on_device_size_in_bytes for handle in handles
    ] == [
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


def test_a_device_of_this_process_is_known(call: Caller) -> None:
    assert call("Device_IsAddressable", device=call.device).is_addressable
    assert not call("Device_IsAddressable", device=call.device + 16).is_addressable


def test_the_topology_of_a_client_has_its_devices(call: Caller) -> None:
    topology = call("Client_TopologyDescription", client=call.client).topology
    name = call("TopologyDescription_PlatformName", topology=topology)
    assert ctypes.string_at(name.platform_name, name.platform_name_size) == b"CPU"
    version = call("TopologyDescription_PlatformVersion", topology=topology)
    assert b"ListEngine" in ctypes.string_at(version.platform_version, version.platform_version_size)
    assert call("TopologyDescription_Attributes", topology=topology).num_attributes == 0
    found = call("TopologyDescription_GetDeviceDescriptions", topology=topology)
    descriptions = (ctypes.c_void_p * found.num_descriptions).from_address(found.descriptions)[:]
    assert [
        call("DeviceDescription_Id", device_description=description).id for description in descriptions
    ] == [0]
    written = call("TopologyDescription_Serialize", topology=topology)
    data = ctypes.string_at(written.serialized_bytes, written.serialized_bytes_size)
    assert json.loads(data) == {"platform": "CPU", "devices": [[0, "list", None]]}
    held = len(call.bridge.handles)
    abi.Deleter(written.serialized_topology_deleter)(written.serialized_topology)
    assert len(call.bridge.handles) == held - 1
    # Of a topology that the client owns.
    call("TopologyDescription_Destroy", topology=topology)
    assert call("Client_Devices", client=call.client).num_devices == 1
    with pytest.raises(PjrtError, match="PJRT_TopologyDescription_Create is not implemented"):
        call("TopologyDescription_Create")


def test_destroying_null_is_harmless(call: Caller) -> None:
    call("Buffer_Destroy", buffer=None)
    call("Event_Destroy", event=None)
    call("Error_Destroy", error=None)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


def test_the_library_works_with_the_libraries_of_old_machines() -> None:
    # A wheel with newer symbols gets a newer tag than manylinux_2_17, or one that an index refuses.
    # Source: auditwheel's manylinux-policy.json, manylinux_2_17.
    newest = {b"GLIBC": (2, 17), b"GLIBCXX": (3, 4, 19), b"CXXABI": (1, 3, 7), b"GCC": (4, 8)}
    library = Path(native.__file__).with_name("library.so").read_bytes()
    found = re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)(?=\0)", library)
    assert {name for name, _ in found} >= {b"GLIBC", b"GLIBCXX", b"CXXABI"}
    versions = [(name, tuple(int(part) for part in version.split(b"."))) for name, version in found]
    assert [(name, version) for name, version in versions if version > newest[name]] == []
