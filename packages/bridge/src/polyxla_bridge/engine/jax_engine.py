"""`JaxEngine`: an engine on jaxlib's CPU clients. Importing this module imports jax."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from jaxlib import _jax, _profiler  # type: ignore[attr-defined]

from polyxla_bridge.engine import stall_watchdog
from polyxla_bridge.engine.clients import Clients, numpy_dtype
from polyxla_bridge.engine.compiler import Compiler
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, DeviceActivity, EngineDevice
from polyxla_bridge.engine.futures import (
    CompletedFuture,
    FutureLike,
    complete,
    completion_of,
    set_values,
    then,
)
from polyxla_bridge.engine.local_engine import Execution, LocalEngine, MakeTask, Task
from polyxla_bridge.engine.stall_watchdog import OwnProgress
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError, keep_first
from polyxla_bridge.programs.agreement import Agreement, Program
from polyxla_bridge.programs.compile_once import CompileCoordinator
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_bridge.programs.xspace_pb2 import XSpace
from polyxla_bridge.transfers import Transfers

_STAY_POLL_S = 0.1
"""Interval between two checks of which replicas have returned, in seconds."""
OPERATIONS = "/device:CUSTOM:polyxla"
"""Name of the plane with the operations of all local devices.
Source: of the prefixes in tsl/profiler/utils/xplane_schema.cc, the one for devices that XLA does not know."""
_PLANES = {"/host:CPU": OPERATIONS, "/host:metadata": "/host:metadata"}
"""The planes to keep, and their new names: the framework has a plane of its own for the host."""


class JaxEngine(LocalEngine):
    """Replicas on jaxlib's CPU clients.

    Args:
        settings: the job's replicas, which of them are in this process, and how to run them.
        on_lookup: called for each program that this process needs, with whether the compilation cache had it.

    Raises:
        PjrtError: a replica did not connect in time.
    """

    _compiler: Compiler

    def __init__(self, settings: BridgeSettings, on_lookup: Callable[[bool], None] | None = None) -> None:
        self._clients = Clients(settings)
        super().__init__(settings, _devices(settings, self._clients))
        # These copy arrays that are computed, and wait for nothing.
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="polyxla-read")
        self._profile: Profile | None = None
        self._transfers = Transfers(
            settings.secret, settings.host, settings.process, settings.stall_timeout_s
        )
        self._moving: dict[Future[Any], tuple[int, str, str, float]] = {}
        self._agreement: Agreement | None = None
        self._met: dict[int, set[frozenset[int]]] = {index: set() for index in self._threads}
        self._awaited: dict[int, set[frozenset[int]]] = {index: set() for index in self._threads}
        coordinator: CompileCoordinator | None = None
        if settings.replicas > 1:
            self._agreement = Agreement(self._clients.link, settings)
            coordinator = CompileCoordinator(self._clients.link, settings.process, settings.secret)
        self._coordinator = coordinator
        self._progress = coordinator or OwnProgress()
        self._compiler = Compiler(settings, self._clients, coordinator, on_lookup)
        if coordinator is not None:
            self._start_watchdog()

    def _task(self, execution: Execution, inputs: AbstractSet[FutureLike] = frozenset()) -> Task:
        """Return the task of an execution, which also waits for the inputs of the other devices."""

        def run() -> None:
            # If an argument of another device failed, that device never joins the collectives of this one.
            for argument in inputs:
                argument.result()
            executable, index = execution.executable, execution.device
            # The program would donate these; `_run` makes jaxlib copy them.
            protected = executable.native["donated"] & execution.keep
            set_values(execution.results, self._run(executable, index, execution.values, protected))

        return execution.done, run

    def _make_together(self, devices: Sequence[int], arguments: Sequence[Sequence[Buffer]]) -> MakeTask:
        inputs = {completion_of(argument.value) for row in arguments for argument in row}
        return functools.partial(self._task, inputs=inputs)

    def _run(
        self, executable: Executable, index: int, values: Sequence[FutureLike], protected: frozenset[int]
    ) -> list[Any]:
        _free_host_memory()
        arguments = [value.result() for value in values]
        # While numpy has a view of an array, jaxlib copies it instead of donating its memory.
        views = [np.asarray(arguments[number]) for number in protected]
        try:
            arrays = self._compute(executable, index, arguments)
        except Exception as error:
            keep_first(error)
            # The collectives of others fail once the process of a replica that has returned has ended.
            if self._watchdog is not None and not isinstance(error, PjrtError):
                self._watchdog.await_report(index)
            raise
        del views
        return arrays

    def _compute(self, executable: Executable, index: int, arguments: list[Any]) -> list[Any]:
        native, account = executable.native, self._accounts[index]
        # Load the program before the others wait for this replica.
        native["program"].on(index)
        meets = self._agree(self._agreement, executable, index) if self._agreement is not None else None
        self._threads[index].enter(executable.name, native["collectives"], native["groups"])
        if meets is not None and self._coordinator is not None:
            self._gather(self._coordinator, meets, index, native["groups_on_sockets"])
        own = native["memory"].own
        account.reserve(own, f"program {executable.name}")
        try:
            arrays: list[Any] = native["program"].run(index, arguments)
            # An error of the computation itself is raised here, not by the call above.
            _jax.batched_block_until_ready(arrays)
        except BaseException:
            account.release(own)
            raise
        # Only jaxlib knows whether it took an argument's memory or copied it.
        for number in native["donated"]:
            if arguments[number].is_deleted():
                account.take(arguments[number])
        account.add(arrays, reserved=own)
        return arrays

    def _gather(
        self,
        coordinator: CompileCoordinator,
        meets: Program,
        index: int,
        on_sockets: frozenset[frozenset[int]],
    ) -> None:
        """Wait for the replicas that this one meets through gloo for the first time: gloo waits 30 s only."""
        # A replica arrives with the first program that meets the group, even if that shares memory.
        for group in meets.groups:
            if group not in self._met[index]:
                coordinator.arrive(group, index)
        self._met[index].update(meets.groups)
        new = on_sockets - self._awaited[index]
        # The replicas of a group may have different programs. Then another may be on its way to a later group
        # only after this one has met the first.
        for group in meets.groups:
            if group in new and (not meets.is_divided or group == meets.groups[0]):
                coordinator.await_arrivals(group)
        self._awaited[index].update(new)

    def _agree(self, agreement: Agreement, executable: Executable, index: int) -> Program:
        try:
            return agreement.meet(executable, index)
        except PjrtError as error:
            # The others wait in the collective that this replica does not join.
            stall_watchdog.report(self, f"polyxla: {error.message}")
            raise

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Use the memory as it is if it is aligned, and copy the bytes otherwise."""
        host = np.frombuffer(data, numpy_dtype(type_.dtype), math.prod(type_.dims)).reshape(type_.dims)
        return Buffer(type_, device, CompletedFuture(self._put(device.index, type_, host)))

    def _put(self, index: int, type_: ArrayType, host: np.ndarray[Any, Any]) -> Any:
        return self._make(index, type_, lambda: self._clients.put(index, host))

    def to_host(self, buffer: Buffer, into: memoryview | None = None) -> Future[memoryview]:
        """Read the buffer as soon as it is computed."""
        return self._read(buffer, _bytes if into is None else lambda host: _written(host, into))

    def address(self, buffer: Buffer) -> int:
        """Return jaxlib's own address of the array."""
        found: Future[int] = Future()
        then(buffer.value, lambda array: found.set_result(array.unsafe_buffer_pointer()), found)
        return found.result()

    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Share the memory, which no program changes while both arrays exist."""
        copied: Future[Any] = self._read(buffer, lambda host: self._put(device.index, buffer.type, host))
        return Buffer(buffer.type, device, copied)

    def _read(self, buffer: Buffer, use: Callable[[np.ndarray[Any, Any]], Any]) -> Future[Any]:
        done: Future[Any] = Future()

        def look(array: Any) -> None:
            # This runs on the device's thread before a later program can reuse the memory. Once numpy has a
            # view of the array, jaxlib does not donate it.
            host = np.asarray(array)
            self._readers.submit(complete, done, lambda: use(host))

        then(buffer.value, look, done)
        return done

    def receive(self, device: EngineDevice, type_: ArrayType) -> tuple[Buffer, bytes]:
        """Await the array on a port of this process."""
        arrived, descriptor = self._transfers.receive(type_)
        made: Future[Any] = Future()
        self._watch(made, device, "recv", "the send of another")

        def put(data: bytearray) -> None:
            host = np.frombuffer(data, numpy_dtype(type_.dtype)).reshape(type_.dims)
            made.set_result(self._put(device.index, type_, host))

        then(arrived, put, made)
        return Buffer(type_, device, made), descriptor

    def send(self, buffer: Buffer, descriptor: bytes) -> Future[None]:
        """Send the array on a thread, as soon as it is computed."""
        sent: Future[None] = Future()

        def send(data: memoryview) -> None:
            self._watch(sent, buffer.device, "send", "the recv of another")
            task = functools.partial(self._transfers.send, buffer.type, data, descriptor)
            # Each array has a thread of its own, because the receiver may first wait for another array.
            threading.Thread(
                target=complete, args=(sent, task), name="polyxla-transfers", daemon=True
            ).start()

        then(self.to_host(buffer), send, sent)
        return sent

    def _watch(self, moved: Future[Any], device: EngineDevice, kind: str, other: str) -> None:
        self._moving[moved] = device.index, kind, other, time.monotonic()
        moved.add_done_callback(self._moving.pop)

    def delete(self, buffer: Buffer) -> None:
        """Release the array; executions that are already queued still use it."""
        super().delete(buffer)
        _free_host_memory()

    def start_profile(self) -> None:
        """Record what jaxlib runs in this process."""
        self._profile = Profile()

    def stop_profile(self) -> bytes:
        """Return what jaxlib has run."""
        profile, self._profile = self._profile, None
        return profile.stop() if profile else b""

    def activities(self) -> list[DeviceActivity]:
        """Return what each local replica is doing, and which arrays it sends and receives."""
        now = time.monotonic()
        moving = [
            DeviceActivity(device, kind, (other,), now - since)
            for device, kind, other, since in list(self._moving.values())
        ]
        return [*super().activities(), *moving]

    def stay(self, timeout_s: float) -> None:
        """Read from the service which replicas have returned."""
        if self._settings.replicas == 1 or self._is_closed:
            return
        for index in self._threads:
            self.retire(index)
        every = {device.index for device in self.devices}
        deadline = time.monotonic() + timeout_s
        while not every <= self._progress.retired() and time.monotonic() < deadline:
            time.sleep(_STAY_POLL_S)

    def _stop(self, *, is_unfinished: bool) -> None:
        self._transfers.close()
        self._readers.shutdown(wait=not is_unfinished, cancel_futures=is_unfinished)

    def _release(self, others_s: float) -> None:
        """End the clients, then leave the service that they are connected to."""
        if others_s:
            self._clients.wait_for_others(others_s)
        # The existing threads leave, because no thread can be started while the interpreter shuts down.
        leaving = [thread.run(self._clients.leave, index) for index, thread in self._threads.items()]
        _, late = wait(leaving, FINISH_TIMEOUT_S)
        for thread in self._threads.values():
            thread.close(0 if late else FINISH_TIMEOUT_S)
        self._clients.close()


def _devices(settings: BridgeSettings, clients: Clients) -> tuple[EngineDevice, ...]:
    devices = [
        EngineDevice(index, process, process == settings.process, settings.kind, place, settings.cores)
        for process, share in clients.shares.items()
        for index, place in itertools.zip_longest(*share)
    ]
    return tuple(sorted(devices, key=lambda device: device.index))


def _free_host_memory() -> None:
    # jaxlib frees the host memory of deleted arrays only here, or when the next array arrives.
    _jax.collect_garbage()


def _bytes(host: np.ndarray[Any, Any]) -> memoryview:
    # memoryview does not support bfloat16 and the other dtypes of ml_dtypes, so the view is of uint8.
    return memoryview(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)


def _written(host: np.ndarray[Any, Any], into: memoryview) -> memoryview:
    # numpy copies without the GIL; slicing a memoryview would hold it.
    np.frombuffer(into, np.uint8)[:] = np.frombuffer(_bytes(host), np.uint8)
    return into


class Profile:
    """A profile of what jaxlib runs here, from now on. Another profile of jaxlib makes it empty."""

    def __init__(self) -> None:
        options = _profiler.ProfileOptions()
        options.python_tracer_level = 0
        self._session: Any = _profiler.ProfilerSession(options)

    def stop(self) -> bytes:
        """Stop, and return the operations and the programs as a serialised XSpace."""
        space = XSpace()
        space.ParseFromString(self._session.stop())
        kept = [plane for plane in space.planes if plane.name in _PLANES]
        for plane in kept:
            plane.name = _PLANES[plane.name]
        return XSpace(planes=kept).SerializeToString()
