"""`JaxEngine`: an engine on jaxlib's CPU clients. Importing this module imports jax."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxlib import _jax

from polyxla_bridge.engine import memory_accounting, stall_watchdog
from polyxla_bridge.engine.clients import Clients
from polyxla_bridge.engine.compiler import Compiler
from polyxla_bridge.engine.device_thread import DeviceThread
from polyxla_bridge.engine.engine import FINISH_TIMEOUT_S, Buffer, DeviceActivity, Engine, EngineDevice
from polyxla_bridge.engine.futures import (
    CompletedFuture,
    FutureLike,
    GroupedFuture,
    complete,
    completion_of,
    set_values,
    then,
)
from polyxla_bridge.engine.profile import Profile
from polyxla_bridge.engine.stall_watchdog import StallWatchdog
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError, keep_first
from polyxla_bridge.programs import cache
from polyxla_bridge.programs.agreement import Agreement
from polyxla_bridge.programs.compile_once import CompileCoordinator
from polyxla_bridge.programs.executable import ArrayType, Executable
from polyxla_bridge.transfers import Transfers

_log = logging.getLogger("polyxla.bridge")

_STAY_POLL_S = 0.1
"""Interval between two checks of which replicas have returned, in seconds."""


class JaxEngine(Engine):
    """Replicas on jaxlib's CPU clients.

    Args:
        settings: the job's replicas, which of them are in this process, and how to run them.
        on_lookup: called for each program that this process needs, with whether the compilation cache had it.

    Raises:
        PjrtError: a replica did not connect in time.
    """

    def __init__(self, settings: BridgeSettings, on_lookup: Callable[[bool], None] | None = None) -> None:
        # Without it, jax would make 32-bit arrays of int64 and float64.
        jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
        self.platform = settings.platform
        self.process_index = settings.process
        self._settings = settings
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="polyxla-read")
        self._clients = Clients(settings)
        self.devices = self._devices()
        local = self._clients.local
        self._threads = {index: DeviceThread(index) for index in local}
        # The replicas share the memory of their machine equally.
        each = settings.memory_bytes or memory_accounting.machine_bytes() // settings.replicas
        self._accounts = {
            index: memory_accounting.MemoryAccount(each, settings.is_memory_limited) for index in local
        }
        self._profile: Profile | None = None
        # `execute_partitioned` holds the lock while it queues one execution on several devices.
        self._order = threading.Lock()
        self._is_closed = False
        self._transfers = Transfers(
            settings.secret, settings.host, settings.process, settings.stall_timeout_s
        )
        self._moving: dict[Future[Any], tuple[int, str, str, float]] = {}
        self._coordinator: CompileCoordinator | None = None
        self._watchdog: StallWatchdog | None = None
        self._agreement: Agreement | None = None
        if settings.replicas > 1:
            self._agreement = Agreement(self._clients.link, settings)
            self._coordinator = CompileCoordinator(self._clients.link, settings.process, settings.secret)
        self._compiler = Compiler(settings, self._clients, self._coordinator, on_lookup)
        # The watchdog comes last, because its thread calls the engine as soon as it starts.
        if self._coordinator is not None:
            self._watchdog = StallWatchdog(
                self, self._coordinator, lambda: self._compiler.is_compiling, settings.stall_timeout_s
            )

    @property
    def compiles(self) -> int:
        """Number of programs that this process compiled."""
        return self._compiler.compiles

    @property
    def cache(self) -> cache.ProgramCache:
        """The compilation cache, and its hits and misses."""
        return self._compiler.cache

    def _devices(self) -> tuple[EngineDevice, ...]:
        settings = self._settings
        devices = [
            EngineDevice(index, process, process == settings.process, settings.kind, place, settings.cores)
            for process, share in self._clients.shares.items()
            for index, place in itertools.zip_longest(*share)
        ]
        return tuple(sorted(devices, key=lambda device: device.index))

    def compile(self, hlo_module: bytes, options: bytes) -> Executable:
        """Compile a program once for all replicas; different programs compile at the same time.

        Raises:
            PjrtError: it cannot be compiled, or the limit of a device's memory is enforced and it needs more.
        """
        try:
            executable = self._compiler.compile(hlo_module, options)
            # All replicas have the same limit, so one account stands for all.
            self._accounts[self._clients.local[0]].check(executable.native["memory"], executable.name)
        except Exception as error:
            keep_first(error)
            raise
        return executable

    def execute(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int] = frozenset(),
    ) -> list[Buffer]:
        """Queue one execution on the device's thread."""
        executable.check_whole()
        return self._queue(executable, device, arguments, keep)

    def execute_partitioned(
        self,
        executable: Executable,
        arguments: Sequence[Sequence[Buffer]],
        keep: frozenset[int] = frozenset(),
    ) -> list[list[Buffer]]:
        """Queue one execution on the thread of each local device.

        Raises:
            PjrtError: an argument is not the part of an array that the program was compiled for. jaxlib only
                compares sizes, and would take another part of the same size.
        """
        for row in arguments:
            executable.check([argument.type for argument in row])
        inputs = {completion_of(argument.value) for row in arguments for argument in row}
        local = [device for device in self.devices if device.is_local and executable.runs_on(device.index)]
        # The lock keeps one order on all devices: two programs that meet in different orders would deadlock.
        with self._order:
            return [
                self._queue(executable, device, row, keep, inputs)
                for device, row in zip(local, arguments, strict=True)
            ]

    def _queue(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int],
        inputs: AbstractSet[FutureLike] = frozenset(),
    ) -> list[Buffer]:
        """Queue one execution on one device, which also waits for the inputs of the other devices."""
        done: Future[None] = Future()
        results = [GroupedFuture(done) for _ in executable.outputs]
        outputs = [
            Buffer(type_, device, result) for type_, result in zip(executable.outputs, results, strict=True)
        ]
        # Read the values now, because `give_up` below replaces those of donated arguments.
        values = [argument.value for argument in arguments]
        # The program would donate these; `_run` makes jaxlib copy them.
        protected = executable.native["donated"] & keep

        def run() -> None:
            # If an argument of another device failed, that device never joins the collectives of this one.
            for argument in inputs:
                argument.result()
            set_values(results, self._run(executable, device.index, values, protected))

        self._threads[device.index].put(done, run)
        for number in executable.native["donated"] - keep:
            arguments[number].give_up("was donated to a program")
        return outputs

    def _run(
        self, executable: Executable, index: int, values: list[FutureLike], protected: frozenset[int]
    ) -> list[Any]:
        _free_host_memory()
        arguments = [value.result() for value in values]
        # While numpy has a view of an array, jaxlib copies it instead of donating its memory.
        views = [np.asarray(arguments[number]) for number in protected]
        try:
            arrays = self._compute(executable, index, arguments)
        except Exception as error:
            keep_first(error)
            raise
        del views
        account = self._accounts[index]
        # Only jaxlib knows whether it took an argument's memory or copied it.
        for number in executable.native["donated"]:
            if arguments[number].is_deleted():
                account.take(arguments[number])
        account.add(arrays)
        return arrays

    def _compute(self, executable: Executable, index: int, arguments: list[Any]) -> list[Any]:
        native, account = executable.native, self._accounts[index]
        loaded = native["program"].on(index)
        if self._agreement is not None:
            self._agree(self._agreement, executable, index)
        self._threads[index].enter(executable.name, native["collectives"], native["groups"])
        own = native["memory"].own
        account.reserve(own, f"program {executable.name}")
        try:
            results = loaded.execute_sharded(arguments)
            arrays = [parts[0] for parts in results.disassemble_into_single_device_arrays()]
            # An error of the computation itself is raised here, not by the call above.
            _jax.batched_block_until_ready(arrays)
            return arrays
        # From here on, `_run` counts the results as arrays, and the temporary arrays no longer exist.
        finally:
            account.release(own)

    def _agree(self, agreement: Agreement, executable: Executable, index: int) -> None:
        try:
            agreement.meet(executable, index)
        except PjrtError as error:
            # The others wait in the collective that this replica does not join.
            stall_watchdog.report(self, f"polyxla: {error.message}")
            raise

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Use the memory as it is if it is aligned, and copy the bytes otherwise."""
        host = np.frombuffer(data, numpy_dtype(type_.dtype), math.prod(type_.dims)).reshape(type_.dims)
        return Buffer(type_, device, CompletedFuture(self._put(device.index, host)))

    def _put(self, index: int, host: np.ndarray[Any, Any]) -> Any:
        what = f"an array of shape {host.shape} and dtype {host.dtype}"
        return self._accounts[index].make(host.nbytes, what, lambda: self._clients.put(index, host))

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
        copied: Future[Any] = self._read(buffer, lambda host: self._put(device.index, host))
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
            made.set_result(self._put(device.index, host))

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
        # A queued execution has the array's future, which `give_up` does not touch.
        buffer.give_up("was deleted")
        _free_host_memory()

    def serialize(self, executable: Executable) -> bytes:
        """Return the program in jaxlib's format, with a header for what that format lacks."""
        return self._compiler.serialize(executable)

    def deserialize(self, data: bytes) -> Executable:
        """Load what `serialize` returned, in any process of a job with as many devices."""
        return self._compiler.deserialize(data)

    def temporary_bytes(self, executable: Executable) -> int:
        """Return the size that XLA's compiler has found."""
        needs: memory_accounting.MemoryNeeds = executable.native["memory"]
        return needs.temporary

    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return the memory of the device's live arrays."""
        return self._accounts[device.index].stats()

    def reset_memory_peak(self, device: EngineDevice) -> None:
        """Restart the peak at the bytes in use."""
        self._accounts[device.index].reset_peak()

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
        return [*(thread.activity for thread in self._threads.values()), *moving]

    def retire(self, index: int) -> None:
        """Publish it from the device's thread, behind everything that is queued there."""
        if self._coordinator is not None:
            self._threads[index].run(self._coordinator.retire, index)

    def finish(self, timeout_s: float) -> bool:
        """Wait for a marker task that is queued behind all other work of each device."""
        markers = [thread.run(int) for thread in self._threads.values()]
        return not wait(markers, timeout_s).not_done

    def stay(self, timeout_s: float) -> None:
        """Read from the service which replicas have returned."""
        if self._coordinator is None or self._is_closed:
            return
        for index in self._threads:
            self.retire(index)
        every = {device.index for device in self.devices}
        deadline = time.monotonic() + timeout_s
        while not every <= self._coordinator.retired() and time.monotonic() < deadline:
            time.sleep(_STAY_POLL_S)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, others_s: float = 0) -> None:
        """Finish the queued work, then end the clients, then leave the service that they are connected to.

        Raises:
            PjrtError: a program did not end in time, and its replica keeps running; or another process did
                not end.
        """
        with self._order:
            if self._is_closed:
                return
            self._is_closed = True
        # Each replica publishes its return when its own work is done, not when that of all replicas here is.
        for index in self._threads:
            self.retire(index)
        unfinished = not self.finish(timeout_s)
        if unfinished and self._coordinator is not None:
            # The queued programs may wait for other processes, which need not wait for this one. So publish
            # ahead of the queue.
            for index in self._threads:
                self._coordinator.retire(index)
        # Until here the watchdog could still report that a queued program is stuck.
        if self._watchdog is not None:
            self._watchdog.close()
        self._transfers.close()
        self._readers.shutdown(wait=not unfinished, cancel_futures=unfinished)
        self._compiler.close()
        if unfinished:
            raise self.unfinished(timeout_s)
        if self.cache.hits + self.cache.misses and self._settings.process == 0:
            _log.info("%s", self.cache)
        if others_s:
            self._clients.wait_for_others(others_s)
        # The existing threads leave, because no thread can be started while the interpreter shuts down.
        leaving = [thread.run(self._clients.leave, index) for index, thread in self._threads.items()]
        _, late = wait(leaving, FINISH_TIMEOUT_S)
        for thread in self._threads.values():
            thread.close(0 if late else FINISH_TIMEOUT_S)
        self._clients.close()


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


def numpy_dtype(name: str) -> Any:
    """Return numpy's dtype of this name, or ml_dtypes'."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
