"""`JaxEngine`: an engine on jaxlib's CPU clients. Importing this module imports jax."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from weakref import WeakValueDictionary

import jax
import ml_dtypes
import numpy as np
from jaxlib import _jax, xla_client

from polyxla_bridge.abi import Code
from polyxla_bridge.engine import batch_norm, memory_accounting
from polyxla_bridge.engine.clients import Clients, LoadedProgram
from polyxla_bridge.engine.device_thread import DeviceThread
from polyxla_bridge.engine.engine import Buffer, DeviceActivity, Engine, EngineDevice
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
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import arguments, cache, hlo, program_file, rewrite
from polyxla_bridge.programs.compile_coordination import CompileCoordinator, Published
from polyxla_bridge.programs.executable import ArrayType, Executable

COMPILER_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""XLA options that replace XLA's defaults. With YNNPACK's kernels, a step of a small convnet took 1.2 times
as long on 2 cores (jaxlib 0.10.2, ``nox -s bench -- replicas step``)."""
_log = logging.getLogger("polyxla.bridge")
FINISH_TIMEOUT_S = 60
"""Longest wait of `JaxEngine.close` for the queued work, in seconds."""


class JaxEngine(Engine):
    """Replicas on jaxlib's CPU clients.

    Args:
        settings: the job's replicas, which of them are in this process, and how to run them.
        on_lookup: called for each program that this process needs, with whether the compilation cache had it.

    Attributes:
        compiles: number of programs that this process compiled.
        cache: the compilation cache, and its hits and misses.

    Raises:
        PjrtError: a replica did not connect in time.
    """

    def __init__(self, settings: BridgeSettings, on_lookup: Callable[[bool], None] | None = None) -> None:
        jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
        self.platform = settings.platform
        self.process_index = settings.process
        self.compiles = 0
        self._settings = settings
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="polyxla-read")
        self._clients = Clients(settings)
        self.devices = self._devices()
        local = self._clients.local
        self._threads = {index: DeviceThread(index) for index in local}
        # Each replica of the machine may use an equal part of its memory.
        each = settings.memory_bytes or memory_accounting.machine_bytes() // settings.replicas
        self._accounts = {index: memory_accounting.MemoryAccount(each) for index in local}
        self._compile_locks: dict[str, threading.Lock] = {}
        self._compiled: WeakValueDictionary[str, Executable] = WeakValueDictionary()
        self.cache = cache.for_job(settings, COMPILER_OPTIONS, on_lookup)
        self._compiling = 0
        self._profile: Profile | None = None
        self._lock = threading.Lock()
        # Held while one execution is queued on several devices.
        self._order = threading.Lock()
        self._coordinator: CompileCoordinator | None = None
        self._watchdog: StallWatchdog | None = None
        if settings.replicas > 1:
            self._coordinator = CompileCoordinator(self._clients.link, settings.process)
            self._watchdog = StallWatchdog(
                self, self._coordinator, lambda: self._compiling > 0, settings.stall_timeout_s
            )

    def _devices(self) -> tuple[EngineDevice, ...]:
        settings = self._settings
        devices = [
            EngineDevice(index, process, process == settings.process, settings.kind, place, settings.cores)
            for process, share in self._clients.shares.items()
            for index, place in itertools.zip_longest(*share)
        ]
        return tuple(sorted(devices, key=lambda device: device.index))

    def compile(self, hlo_module: bytes, options: bytes) -> Executable:
        """Compile a program once for all replicas; different programs compile at the same time."""
        fingerprint = hashlib.sha256(hlo_module + options).hexdigest()
        with self._lock:
            one_at_a_time = self._compile_locks.setdefault(fingerprint, threading.Lock())
        with one_at_a_time:
            executable = self._compiled.get(fingerprint)
            if executable is None:
                executable = self._compile_or_wait(fingerprint, hlo_module, options)
                self._compiled[fingerprint] = executable
            return executable

    def _compile_or_wait(self, fingerprint: str, hlo_module: bytes, options: bytes) -> Executable:
        coordinator = self._coordinator if self._settings.processes > 1 else None
        if coordinator is None:
            return self._load_or_compile(fingerprint, hlo_module, options)[0]
        if not coordinator.claim(fingerprint):
            published = coordinator.wait(fingerprint)
            if published and published.data:
                executable = self.deserialize(published.data)
                # Processes may have separate cache directories, and another one may claim it in the next job.
                self.cache.save(fingerprint, lambda: published.data, is_replaced=False)
                self.cache.count(is_hit=published.is_hit)
                return executable
            # The heartbeat of the process that claimed it stopped, or the program cannot be sent. Compiling
            # twice is better than never.
            return self._load_or_compile(fingerprint, hlo_module, options)[0]
        try:
            executable, is_hit = self._load_or_compile(fingerprint, hlo_module, options)
            data = self.serialize(executable) if executable.native["program"].is_serializable else b""
            coordinator.publish(fingerprint, Published(data, is_hit))
        except BaseException as error:
            coordinator.fail(fingerprint, error)
            raise
        return executable

    def _load_or_compile(
        self, fingerprint: str, hlo_module: bytes, options: bytes
    ) -> tuple[Executable, bool]:
        """Load the program from the cache or compile it; return it and whether it was cached."""
        with self._lock:
            self._compiling += 1
        try:
            cached = self.cache.load(fingerprint, self.deserialize)
            self.cache.count(is_hit=cached is not None)
            if cached is not None:
                return cached, True
            compiled = self._compile(fingerprint, hlo_module, options)
            if compiled.native["program"].is_serializable:
                self.cache.save(fingerprint, lambda: self.serialize(compiled))
            return compiled, False
        finally:
            with self._lock:
                self._compiling -= 1

    def _compile(self, fingerprint: str, hlo_module: bytes, options: bytes) -> Executable:
        with self._lock:
            self.compiles += 1
        # Called for its error: dynamic shapes must be refused before the compilation.
        hlo.results(hlo_module)
        compile_options = xla_client.CompileOptions.ParseFromString(options)
        device = self._only_device(compile_options)
        self._complete(compile_options, device)
        partitions = compile_options.num_partitions
        code = arguments.for_jaxlib(hlo_module, is_partitioned=partitions > 1)
        if partitions > 1:
            # The partitioner adds collectives in forms that the client knows.
            code = batch_norm.expand(code)
        else:
            code = rewrite.for_jaxlib(code, compile_options.num_replicas)
        module = _jax.mlir.hlo_to_stablehlo(code)
        first = self._first(device)
        native = self._clients.compile(first, module, compile_options)
        optimized = native.hlo_modules()[0].as_serialized_hlo_module_proto()
        executable = Executable(
            name=hlo.module_name(hlo_module),
            outputs=tuple(ArrayType(dtype, dims) for dtype, dims in hlo.results(optimized)),
            num_replicas=compile_options.num_replicas,
            optimized_hlo=optimized,
            code_size_bytes=native.size_of_generated_code_in_bytes(),
            fingerprint=fingerprint,
            num_partitions=partitions,
            device=device,
        )
        return self._attach(executable, self._loaded(hlo_module, module, compile_options, native, device))

    def _loaded(
        self, hlo_module: bytes, module: Any, options: Any, native: Any, device: int | None
    ) -> LoadedProgram:
        """Return the program that `native` is on the first replica."""
        first = self._first(device)
        if options.num_partitions == 1 or _has_equal_parts(hlo_module, native):
            return LoadedProgram(self._clients, options.num_partitions, {first: native})

        def compile_on(index: int) -> Any:
            return self._clients.compile(index, module, options)

        return LoadedProgram(self._clients, options.num_partitions, {first: native}, compile_on=compile_on)

    def _attach(self, executable: Executable, program: LoadedProgram) -> Executable:
        executable.native["program"] = program
        executable.native["donated"] = hlo.donated(executable.optimized_hlo)
        executable.native["collectives"] = hlo.collectives(executable.optimized_hlo)
        executable.native["groups"] = hlo.groups(executable.optimized_hlo)
        return executable

    def _only_device(self, options: Any) -> int | None:
        """Return the device for which JAX and TorchTPU compile; None for all, for which torch_xla does.

        Raises:
            PjrtError: the program is for another number of devices.
        """
        assignment = options.device_assignment
        numbers = hlo.assigned_devices(assignment.serialize()) if assignment is not None else ()
        if len(numbers) in (0, self._settings.replicas):
            return None
        if len(numbers) > 1 or numbers[0] not in self._clients.local:
            raise PjrtError(
                Code.UNIMPLEMENTED,
                f"a program for the devices {list(numbers)} is not supported, only for one device of this "
                f"process or for all {self._settings.replicas}",
            )
        return numbers[0]

    def _first(self, device: int | None) -> int:
        """Return the local replica on which a program is loaded first."""
        return self._clients.local[0] if device is None else device

    def _complete(self, options: Any, device: int | None) -> None:
        """Write the devices and this engine's own options into a program's options."""
        partitions = options.num_partitions
        options.num_replicas = (self._settings.replicas if device is None else 1) // partitions
        # `arguments` has unpacked the tuple.
        options.parameter_is_tupled_arguments = False
        # The program numbers devices 0..N-1; jaxlib gives each client a block of ids.
        ids = np.array(self._clients.global_ids, dtype=np.int32)
        if device is not None:
            ids = ids[[device]]
        options.device_assignment = xla_client.DeviceAssignment.create(ids.reshape(-1, partitions))
        # A flag that the user sets takes precedence.
        options.env_option_overrides = [
            (name, value) for name, value in COMPILER_OPTIONS.items() if name not in self._settings.xla_flags
        ]

    def execute(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int] = frozenset(),
    ) -> list[Buffer]:
        """Queue one execution on the device's thread."""
        if executable.num_partitions > 1:
            raise PjrtError(
                Code.UNIMPLEMENTED,
                f"{executable.name} is partitioned (SPMD): one device alone cannot execute it",
            )
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
            executable.check([one.type for one in row])
        inputs = {completion_of(one.value) for row in arguments for one in row}
        local = [device for device in self.devices if device.is_local]
        # In the same order on each device: two programs that meet in different orders would wait forever.
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
        """Queue one execution on one device, which waits for the inputs of the other devices, too."""
        done: Future[None] = Future()
        results = [GroupedFuture(done) for _ in executable.outputs]
        outputs = [Buffer(type_, device, one) for type_, one in zip(executable.outputs, results, strict=True)]
        # Read now: `give_up` below replaces the values of donated arguments.
        values = [argument.value for argument in arguments]
        # The program would donate these; `_run` makes jaxlib copy them.
        protected = executable.native["donated"] & keep

        def run() -> None:
            # If another device cannot run its part, this one would wait for it in a collective.
            for one in inputs:
                one.result()
            set_values(results, self._run(executable, device.index, values, protected))

        self._threads[device.index].put(done, run)
        for number in executable.native["donated"] - keep:
            arguments[number].give_up("was donated to a program")
        return outputs

    def _run(
        self, executable: Executable, index: int, values: list[FutureLike], protected: frozenset[int]
    ) -> list[Any]:
        arguments = [value.result() for value in values]
        # While numpy has a view of an array, jaxlib copies it instead of donating its memory.
        views = [np.asarray(arguments[number]) for number in protected]
        loaded = executable.native["program"].on(index)
        native = executable.native
        self._threads[index].enter(executable.name, native["collectives"], native["groups"])
        results = loaded.execute_sharded(arguments)
        arrays = [parts[0] for parts in results.disassemble_into_single_device_arrays()]
        # An error of the computation itself is raised here, not by the call above.
        _jax.batched_block_until_ready(arrays)
        del views
        for number in executable.native["donated"]:
            if arguments[number].is_deleted():
                self._accounts[index].take(arguments[number])
        self._accounts[index].add(arrays)
        return arrays

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Copy before returning, since the caller may reuse its memory."""
        host = np.frombuffer(data, numpy_dtype(type_.dtype), math.prod(type_.dims)).reshape(type_.dims)
        return Buffer(type_, device, CompletedFuture(self._put(device.index, host)))

    def _put(self, index: int, host: np.ndarray[Any, Any]) -> Any:
        array = self._clients.put(index, host)
        self._accounts[index].add([array])
        return array

    def to_host(self, buffer: Buffer) -> Future[memoryview]:
        """Read the buffer as soon as it is computed."""
        return self._read(buffer, _bytes)

    def address(self, buffer: Buffer) -> int:
        """Return jaxlib's own address of the array."""
        found: Future[int] = Future()
        then(buffer.value, lambda array: found.set_result(array.unsafe_buffer_pointer()), found)
        return found.result()

    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Copy through the host, since the clients share no memory."""
        copied: Future[Any] = self._read(buffer, lambda host: self._put(device.index, host))
        return Buffer(buffer.type, device, copied)

    def _read(self, buffer: Buffer, use: Callable[[np.ndarray[Any, Any]], Any]) -> Future[Any]:
        done: Future[Any] = Future()

        def look(array: Any) -> None:
            # On the device's thread, before a later program can reuse the memory: while numpy has a view of
            # an array, jaxlib does not donate it.
            host = np.asarray(array)
            self._readers.submit(complete, done, lambda: use(host))

        then(buffer.value, look, done)
        return done

    def delete(self, buffer: Buffer) -> None:
        """Release the array; executions that are already queued still use it."""
        buffer.give_up("was deleted")

    def serialize(self, executable: Executable) -> bytes:
        """Return the program in jaxlib's format, with a header for what that format lacks."""
        return program_file.pack(executable, executable.native["program"].data())

    def deserialize(self, data: bytes) -> Executable:
        """Load what `serialize` returned, in any process of a job with as many devices."""
        unpacked = program_file.unpack(data, self._settings.replicas)
        program = LoadedProgram(self._clients, unpacked.executable.num_partitions, {}, unpacked.native)
        try:
            program.on(self._first(unpacked.executable.device))
        except Exception as error:
            raise PjrtError(
                Code.INVALID_ARGUMENT, f"jaxlib cannot load {unpacked.executable.name}: {error}"
            ) from error
        return self._attach(unpacked.executable, program)

    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return the memory of the device's live arrays."""
        return self._accounts[device.index].stats()

    def start_profile(self) -> None:
        """Record what jaxlib runs in this process."""
        self._profile = Profile()

    def stop_profile(self) -> bytes:
        """Return what jaxlib has run."""
        profile, self._profile = self._profile, None
        return profile.stop() if profile else b""

    def activities(self) -> list[DeviceActivity]:
        """Return what each local replica is doing."""
        return [thread.activity for thread in self._threads.values()]

    def retire(self, index: int) -> None:
        """Publish it from the device's thread, behind everything that is queued there."""
        if self._coordinator is not None:
            self._threads[index].run(self._coordinator.retire, index)

    def finish(self, timeout_s: float) -> bool:
        """Wait for a marker task that is queued behind all other work of each device."""
        markers = [thread.run(int) for thread in self._threads.values()]
        return not wait(markers, timeout_s).not_done

    def close(self) -> None:
        """Finish the queued work, then end the clients, then the service that they are connected to.

        Raises:
            PjrtError: a program did not end in time; its replica keeps running.
        """
        for index in self._threads:
            self.retire(index)
        unfinished = not self.finish(FINISH_TIMEOUT_S)
        if self._watchdog is not None:
            self._watchdog.close()
        self._readers.shutdown(wait=not unfinished, cancel_futures=unfinished)
        self._compiled.clear()
        if unfinished:
            where = "; ".join(str(one) for one in self.activities())
            raise PjrtError(
                Code.DEADLINE_EXCEEDED,
                f"the engine was closed, but had not finished after {FINISH_TIMEOUT_S} s: {where}",
            )
        if self.cache.hits + self.cache.misses and self._settings.process == 0:
            _log.info("%s", self.cache)
        self._clients.wait_for_all()
        # On the existing threads, because no thread can be started while the interpreter shuts down.
        leaving = [thread.run(self._clients.leave, index) for index, thread in self._threads.items()]
        _, late = wait(leaving, FINISH_TIMEOUT_S)
        for thread in self._threads.values():
            thread.close(0 if late else FINISH_TIMEOUT_S)
        self._clients.close()


def _has_equal_parts(hlo_module: bytes, native: Any) -> bool:
    """Return whether the partitions' shares of each argument and result are equal.

    If they are not, jaxlib 0.10.2 ends the process when it serialises the program.
    """
    for arrays, shardings in (
        (hlo.parameters(hlo_module), native.get_parameter_shardings()),
        (hlo.results(hlo_module), native.get_output_shardings()),
    ):
        if shardings and len(shardings) != len(arrays):
            return False
        for (_, dims), sharding in zip(arrays, shardings or (), strict=False):
            # A last count without a dimension is of devices that have the same part.
            counts = sharding.tile_assignment_dimensions
            if any(size % count for size, count in zip(dims, counts, strict=False)):
                return False
    return True


def _bytes(host: np.ndarray[Any, Any]) -> memoryview:
    # As uint8, because memoryview does not support bfloat16 and the other dtypes of ml_dtypes.
    return memoryview(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)


def numpy_dtype(name: str) -> Any:
    """Return numpy's dtype of this name, or ml_dtypes'."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
