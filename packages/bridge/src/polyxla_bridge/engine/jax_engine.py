"""`JaxEngine`: jaxlib's own clients. Heavy: it imports jax, so it is imported where it is started."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from weakref import WeakValueDictionary

import jax
import ml_dtypes
import numpy as np
from jaxlib import _jax, xla_client

from polyxla_bridge.engine import memory_accounting
from polyxla_bridge.engine.clients import Clients, Program
from polyxla_bridge.engine.device_thread import Stream
from polyxla_bridge.engine.engine import ArrayType, Buffer, Engine, EngineDevice, Executable, Position
from polyxla_bridge.engine.futures import Kept, Part, Promise, complete, share, then
from polyxla_bridge.engine.stall_watchdog import Watch
from polyxla_bridge.env import Share
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import cache, hlo, program_file, rewrite
from polyxla_bridge.programs.compile_coordination import Board, Published
from polyxla_bridge.table.abi import Code

COMPILER = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""XLA's options that differ here from its own. YNNPACK's kernels made a step of a small convnet take 1.2
times as long on 2 cores (jaxlib 0.10.2, ``nox -s bench -- replicas step``)."""
_log = logging.getLogger("polyxla.bridge")
FINISH_TIMEOUT_S = 60
"""Longest wait for what was asked of the devices before they are let go of, in seconds."""


class JaxEngine(Engine):
    """Replicas on jaxlib's CPU clients.

    Args:
        share: which replicas there are, which of them are here, and what torch_xla is told they are.
        on_lookup: told of each program that a process needs whether the folder of compiled programs had it.

    Attributes:
        compiles: how many programs this process compiled.
        cache: the folder of compiled programs, and how often it had what this process needed.

    Raises:
        PjrtError: the replicas did not find each other in time.
    """

    def __init__(self, share: Share, on_lookup: Callable[[bool], None] | None = None) -> None:
        jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
        self.platform = share.platform
        self.process_index = share.process
        self.devices = tuple(
            EngineDevice(index, index // share.per_process, index in share.local, share.kind)
            for index in range(share.replicas)
        )
        self.compiles = 0
        self._share = share
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="polyxla-read")
        self._clients = Clients(share)
        self._streams = {index: Stream(index) for index in share.local}
        # Replicas share the machine, and may all take as much of it.
        each = memory_accounting.machine_bytes() // share.replicas
        self._accounts = {index: memory_accounting.Account(each) for index in share.local}
        self._turns: dict[str, threading.Lock] = {}
        self._compiled: WeakValueDictionary[str, Executable] = WeakValueDictionary()
        self.cache = cache.of_job(share, COMPILER, on_lookup)
        self._compiling = 0
        self._lock = threading.Lock()
        self._board = Board(self._clients.link, share.process) if share.replicas > 1 else None
        self._watch = (
            Watch(self, self._board, lambda: self._compiling > 0, share.stall_timeout_s)
            if self._board
            else None
        )

    def compile(self, hlo_module: bytes, options: bytes) -> Executable:
        """Compile once for all replicas: they wait for the one that compiles; other programs do not."""
        fingerprint = hashlib.sha256(hlo_module + options).hexdigest()
        with self._lock:
            turn = self._turns.setdefault(fingerprint, threading.Lock())
        with turn:
            executable = self._compiled.get(fingerprint)
            if executable is None:
                executable = self._obtain(fingerprint, hlo_module, options)
                self._compiled[fingerprint] = executable
            return executable

    def _obtain(self, fingerprint: str, hlo_module: bytes, options: bytes) -> Executable:
        board = self._board if self._share.processes > 1 else None
        if board is None:
            return self._make(fingerprint, hlo_module, options)[0]
        if not board.claim(fingerprint):
            published = board.wait(fingerprint)
            if published:
                executable = self.deserialize(published.data)
                # Each process may have a folder of its own, and claim other programs the next time.
                self.cache.save(fingerprint, lambda: published.data, is_replaced=False)
                self.cache.count(is_hit=published.is_hit)
                return executable
            # Better twice than never: the process that was to compile it gives no more sign of life.
            return self._make(fingerprint, hlo_module, options)[0]
        try:
            executable, is_hit = self._make(fingerprint, hlo_module, options)
            board.publish(fingerprint, Published(self.serialize(executable), is_hit))
        except BaseException as error:
            board.fail(fingerprint, error)
            raise
        return executable

    def _make(self, fingerprint: str, hlo_module: bytes, options: bytes) -> tuple[Executable, bool]:
        """Return the program, and whether it was in the folder."""
        with self._lock:
            self._compiling += 1
        try:
            kept = self.cache.load(fingerprint, self.deserialize)
            self.cache.count(is_hit=kept is not None)
            if kept is not None:
                return kept, True
            compiled = self._compile(fingerprint, hlo_module, options)
            self.cache.save(fingerprint, lambda: self.serialize(compiled))
            return compiled, False
        finally:
            with self._lock:
                self._compiling -= 1

    def _compile(self, fingerprint: str, hlo_module: bytes, options: bytes) -> Executable:
        with self._lock:
            self.compiles += 1
        # Refused before it is compiled, if its shapes are.
        hlo.results(hlo_module)
        module = _jax.mlir.hlo_to_stablehlo(rewrite.for_jaxlib(hlo_module, self._share.replicas))
        first = self._share.local[0]
        native = self._clients.compile(first, module, self._options(options))
        optimized = native.hlo_modules()[0].as_serialized_hlo_module_proto()
        executable = Executable(
            name=hlo.module_name(hlo_module),
            outputs=tuple(ArrayType(dtype, dims) for dtype, dims in hlo.results(optimized)),
            num_replicas=self._share.replicas,
            optimized_hlo=optimized,
            code_size_bytes=native.size_of_generated_code_in_bytes(),
            fingerprint=fingerprint,
        )
        return self._ready(executable, Program(self._clients, {first: native}))

    def _ready(self, executable: Executable, program: Program) -> Executable:
        executable.native["program"] = program
        executable.native["donated"] = hlo.donated(executable.optimized_hlo)
        executable.native["collectives"] = hlo.collectives(executable.optimized_hlo)
        return executable

    def _options(self, data: bytes) -> Any:
        options = xla_client.CompileOptions.ParseFromString(data)
        options.num_replicas = self._share.replicas
        # Ours are 0..N-1; jaxlib numbers devices in blocks, one block a client.
        assignment = np.array(self._clients.global_ids, dtype=np.int32)[:, None]
        options.device_assignment = xla_client.DeviceAssignment.create(assignment)
        # Whoever sets a flag knows better.
        options.env_option_overrides = [
            (name, value) for name, value in COMPILER.items() if name not in self._share.xla_flags
        ]
        return options

    def execute(
        self,
        executable: Executable,
        device: EngineDevice,
        arguments: Sequence[Buffer],
        keep: frozenset[int] = frozenset(),
    ) -> list[Buffer]:
        """Queue one execution on the device's own thread."""
        done: Future[None] = Future()
        results = [Part(done) for _ in executable.outputs]
        outputs = [Buffer(type_, device, one) for type_, one in zip(executable.outputs, results, strict=True)]
        values = [argument.value for argument in arguments]
        kept = executable.native["donated"] & keep
        self._streams[device.index].put(
            done, lambda: share(results, self._run(executable, device.index, values, kept))
        )
        for number in executable.native["donated"] - keep:
            arguments[number].give_up("was given to a program for its results")
        return outputs

    def _run(
        self, executable: Executable, index: int, values: list[Promise], kept: frozenset[int]
    ) -> list[Any]:
        arguments = [value.result() for value in values]
        # Whose memory is being looked at, as here, the program copies instead of taking it.
        views = [np.asarray(arguments[number]) for number in kept]
        loaded = executable.native["program"].on(index)
        self._streams[index].enter(executable.name, executable.native["collectives"])
        results = loaded.execute_sharded(arguments)
        arrays = [parts[0] for parts in results.disassemble_into_single_device_arrays()]
        # An error of the computation itself shows here, not in the call.
        _jax.batched_block_until_ready(arrays)
        del views
        for number in executable.native["donated"]:
            if arguments[number].is_deleted():
                self._accounts[index].take(arguments[number])
        self._accounts[index].add(arrays)
        return arrays

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Copy now: the caller's memory is only lent."""
        host = np.frombuffer(data, _numpy_dtype(type_.dtype), math.prod(type_.dims)).reshape(type_.dims)
        return Buffer(type_, device, Kept(self._put(device.index, host)))

    def _put(self, index: int, host: np.ndarray[Any, Any]) -> Any:
        array = self._clients.put(index, host)
        self._accounts[index].add([array])
        return array

    def to_host(self, buffer: Buffer) -> Future[memoryview]:
        """Read as soon as the buffer has its value."""
        return self._read(buffer, _bytes)

    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Copy through the host: the clients share no memory."""
        copied: Future[Any] = self._read(buffer, lambda host: self._put(device.index, host))
        return Buffer(buffer.type, device, copied)

    def _read(self, buffer: Buffer, use: Callable[[np.ndarray[Any, Any]], Any]) -> Future[Any]:
        done: Future[Any] = Future()

        def look(array: Any) -> None:
            # Before a later program can take the memory: while there is a view of it, none does.
            host = np.asarray(array)
            self._readers.submit(complete, done, lambda: use(host))

        then(buffer.value, look, done)
        return done

    def delete(self, buffer: Buffer) -> None:
        """Let go of the array; executions that were queued before hold on to it."""
        buffer.give_up("was deleted")

    def serialize(self, executable: Executable) -> bytes:
        """Return jaxlib's own form, and what it leaves out."""
        return program_file.pack(executable, executable.native["program"].data())

    def deserialize(self, data: bytes) -> Executable:
        """Load what `serialize` returned, in this process or another one of such a job."""
        packed = program_file.unpack(data, self._share.replicas)
        program = Program(self._clients, {}, packed.native)
        try:
            program.on(self._share.local[0])
        except Exception as error:
            raise PjrtError(
                Code.INVALID_ARGUMENT, f"jaxlib cannot load {packed.executable.name}: {error}"
            ) from error
        return self._ready(packed.executable, program)

    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return what the device's live arrays take."""
        return self._accounts[device.index].stats()

    def positions(self) -> list[Position]:
        """Return what each local replica does."""
        return [stream.position for stream in self._streams.values()]

    def finish(self, timeout_s: float) -> bool:
        """Wait for a mark that is queued behind everything else."""
        marks = [stream.run(int) for stream in self._streams.values()]
        return not wait(marks, timeout_s).not_done

    def close(self) -> None:
        """Finish what was queued; then the clients leave, and after them the service.

        Raises:
            PjrtError: a program did not end in time; its replica is left as it is.
        """
        unfinished = not self.finish(FINISH_TIMEOUT_S)
        if self._watch is not None:
            self._watch.close()
        self._readers.shutdown(wait=not unfinished, cancel_futures=unfinished)
        self._compiled.clear()
        if unfinished:
            where = "; ".join(str(one) for one in self.positions())
            raise PjrtError(
                Code.DEADLINE_EXCEEDED, f"not finished {FINISH_TIMEOUT_S} s after it was closed: {where}"
            )
        if self.cache.hits + self.cache.misses and self._share.process == 0:
            _log.info("%s", self.cache)
        # On threads that exist: at the end of the interpreter no new ones can be started.
        leaving = [stream.run(self._clients.leave, index) for index, stream in self._streams.items()]
        _, late = wait(leaving, FINISH_TIMEOUT_S)
        for stream in self._streams.values():
            stream.close(0 if late else FINISH_TIMEOUT_S)
        self._clients.close()


def _bytes(host: np.ndarray[Any, Any]) -> memoryview:
    # By way of uint8: memoryviews know nothing of bfloat16 and its like.
    return memoryview(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)


def _numpy_dtype(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
