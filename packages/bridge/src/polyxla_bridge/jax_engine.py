"""`JaxEngine`: jaxlib's own clients. Heavy: it imports jax, so it is imported where it is started.

On CPU each local replica has a client of its own with one device, because replicas may run different
programs and one client's program would be every device's. The clients meet through jaxlib's distributed
runtime and gloo, whichever threads, processes or hosts they are in.
"""

from __future__ import annotations

import hashlib
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxlib import _jax, xla_client

from polyxla_bridge import hlo
from polyxla_bridge.abi import Code
from polyxla_bridge.engine import ArrayType, Buffer, Engine, EngineDevice, Executable
from polyxla_bridge.env import Share
from polyxla_bridge.errors import PjrtError

CONNECT_TIMEOUT_S = 120
"""Longest wait for all replicas to have a client, in seconds."""
HOST = "127.0.0.1"
"""Where gloo listens: all replicas are on this machine."""
SHUTDOWN_TIMEOUT_S = 10
"""Longest wait for all replicas to say goodbye, in seconds."""


class JaxEngine(Engine):
    """Replicas on jaxlib's CPU clients.

    Args:
        share: which replicas there are, and which of them are here.
        platform: the name that torch_xla is told.
        kind: the device kind in attributes.

    Raises:
        PjrtError: the replicas did not find each other in time.
    """

    def __init__(self, share: Share, platform: str = "CPU", kind: str = "polyxla CPU") -> None:
        jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
        self.platform = platform
        self.process_index = share.process
        self.devices = tuple(
            EngineDevice(index, index // share.per_process, index in share.local, kind)
            for index in range(share.replicas)
        )
        self._share = share
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="polyxla-read")
        self._clients = _Clients(share)
        self._streams = {index: _Stream(f"polyxla-device-{index}") for index in share.local}
        self._compiling: dict[str, threading.Lock] = {}
        self._compiled: dict[str, Executable] = {}
        self._lock = threading.Lock()

    def compile(self, hlo_module: bytes, options: bytes) -> Executable:
        """Compile on the first local client; others load the result when they first run it."""
        fingerprint = hashlib.sha256(hlo_module + options).hexdigest()
        with self._lock:
            turn = self._compiling.setdefault(fingerprint, threading.Lock())
        # Replicas that share a program wait for the one that compiles it; other programs do not wait.
        with turn:
            if fingerprint not in self._compiled:
                self._compiled[fingerprint] = self._compile(fingerprint, hlo_module, options)
            return self._compiled[fingerprint]

    def _compile(self, fingerprint: str, hlo_module: bytes, options: bytes) -> Executable:
        first = self._share.local[0]
        module = _jax.mlir.hlo_to_stablehlo(hlo_module)
        native = self._clients.compile(first, module, self._options(options))
        optimized = native.hlo_modules()[0].as_serialized_hlo_module_proto()
        return Executable(
            name=hlo.module_name(hlo_module),
            outputs=tuple(ArrayType(dtype, dims) for dtype, dims in hlo.results(optimized)),
            num_replicas=self._share.replicas,
            optimized_hlo=optimized,
            code_size_bytes=native.size_of_generated_code_in_bytes(),
            fingerprint=fingerprint,
            native={"loaded": {first: native}, "lock": threading.Lock()},
        )

    def _options(self, data: bytes) -> Any:
        options = xla_client.CompileOptions.ParseFromString(data)
        options.num_replicas = self._share.replicas
        # Ours are 0..N-1; jaxlib numbers devices in blocks, one block a client.
        assignment = np.array(self._clients.global_ids, dtype=np.int32)[:, None]
        options.device_assignment = xla_client.DeviceAssignment.create(assignment)
        return options

    def _loaded(self, executable: Executable, index: int) -> Any:
        loaded = executable.native["loaded"]
        if index not in loaded:
            with executable.native["lock"]:
                if index not in loaded:
                    loaded[index] = self._clients.load(index, self.serialize(executable))
        return loaded[index]

    def execute(
        self, executable: Executable, device: EngineDevice, arguments: Sequence[Buffer]
    ) -> list[Buffer]:
        """Queue one execution on the device's own thread."""
        done: Future[list[Any]] = Future()
        outputs = [Buffer(type_, device, _part(done, i)) for i, type_ in enumerate(executable.outputs)]
        self._streams[device.index].put(done, lambda: self._run(executable, device, arguments))
        return outputs

    def _run(self, executable: Executable, device: EngineDevice, arguments: Sequence[Buffer]) -> list[Any]:
        loaded = self._loaded(executable, device.index)
        results = loaded.execute_sharded([argument.value.result() for argument in arguments])
        arrays = [parts[0] for parts in results.disassemble_into_single_device_arrays()]
        # An error of the computation itself shows here, not in the call.
        _jax.batched_block_until_ready(arrays)
        return arrays

    def from_host(self, device: EngineDevice, type_: ArrayType, data: memoryview) -> Buffer:
        """Copy now: the caller's memory is only lent."""
        host = np.frombuffer(data, _numpy_dtype(type_.dtype), math.prod(type_.dims)).reshape(type_.dims)
        ready: Future[Any] = Future()
        ready.set_result(self._clients.put(device.index, host))
        return Buffer(type_, device, ready)

    def to_host(self, buffer: Buffer) -> Future[memoryview]:
        """Read as soon as the buffer has its value."""
        return self._readers.submit(lambda: _bytes(np.ascontiguousarray(buffer.value.result())))

    def copy(self, buffer: Buffer, device: EngineDevice) -> Buffer:
        """Copy through the host: the clients share no memory."""
        ready: Future[Any] = Future()
        stream = self._streams[device.index]
        stream.put(ready, lambda: self._clients.put(device.index, np.asarray(buffer.value.result())))
        return Buffer(buffer.type, device, ready)

    def delete(self, buffer: Buffer) -> None:
        """Let go of the array; executions that were queued before hold on to it."""
        buffer.is_deleted = True

    def serialize(self, executable: Executable) -> bytes:
        """Return jaxlib's own serialised form."""
        index, loaded = next(iter(executable.native["loaded"].items()))
        data: bytes = self._clients.serialize(index, loaded)
        return data

    def deserialize(self, data: bytes) -> Executable:
        """Refuse: jaxlib's form does not hold all that an `Executable` says."""
        raise PjrtError(Code.UNIMPLEMENTED, "loading a serialised program is not implemented")

    def memory_stats(self, device: EngineDevice) -> Mapping[str, int]:
        """Return the host's memory: the CPU client has no allocator of its own to ask."""
        page = os.sysconf("SC_PAGE_SIZE")
        limit = os.sysconf("SC_PHYS_PAGES") * page
        return {"bytes_in_use": limit - os.sysconf("SC_AVPHYS_PAGES") * page, "bytes_limit": limit}

    def finish(self, timeout_s: float) -> bool:
        """Wait for a mark that is queued behind everything else."""
        marks = [stream.run(int) for stream in self._streams.values()]
        return not wait(marks, timeout_s).not_done

    def close(self) -> None:
        """Finish what was queued; then the clients leave, and after them the service."""
        self._readers.shutdown()
        self._compiled.clear()
        # On threads that exist: at the end of the interpreter no new ones can be started.
        leaving = [stream.run(self._clients.leave, index) for index, stream in self._streams.items()]
        for done in leaving:
            done.result(CONNECT_TIMEOUT_S)
        for stream in self._streams.values():
            stream.close()
        self._clients.close()


class _Stream:
    """A device's thread: it runs what is queued, in order."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, done: Future[Any], task: Callable[[], Any]) -> None:
        """Queue a task whose result, or error, completes `done`."""
        self._tasks.put((done, task))

    def run(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call and promise its result."""
        done: Future[Any] = Future()
        self.put(done, lambda: task(*arguments))
        return done

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            done, task = item
            try:
                result = task()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)
            # Or this frame would keep the last results alive until the next task.
            del item, done, task

    def close(self) -> None:
        """Wait for what was queued, then end."""
        self._tasks.put(None)
        self._thread.join()


class _Clients:
    """One jaxlib client per local replica, and the runtime through which they know each other."""

    def __init__(self, share: Share) -> None:
        self._clients: dict[int, Any] = {}
        self._links: dict[int, Any] = {}
        self._service: Any = None
        if share.replicas == 1:
            self._clients[0] = _jax.get_tfrt_cpu_client(asynchronous=False, num_devices=1)
        else:
            self._connect(share)
        self._shardings = {i: SingleDeviceSharding(self._device(i)) for i in self._clients}
        self.global_ids = [device.id for device in self._clients[share.local[0]].devices()]

    def _connect(self, share: Share) -> None:
        if share.local[0] == 0:
            self._service = _jax.get_distributed_runtime_service(
                share.coordinator, share.replicas, shutdown_timeout=SHUTDOWN_TIMEOUT_S
            )
        # All at once: each waits until every other one is there.
        with ThreadPoolExecutor(len(share.local)) as together:
            for index, client in zip(
                share.local, together.map(lambda i: self._join(share, i), share.local), strict=True
            ):
                self._clients[index] = client

    def _join(self, share: Share, index: int) -> Any:
        link = _jax.get_distributed_runtime_client(
            share.coordinator,
            index,
            init_timeout=CONNECT_TIMEOUT_S,
            use_compression=True,
            shutdown_on_destruction=False,
        )
        link.connect()
        self._links[index] = link
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=link, hostname=HOST)
        return _jax.get_tfrt_cpu_client(
            asynchronous=False,
            distributed_client=link,
            node_id=index,
            num_nodes=share.replicas,
            collectives=collectives,
            num_devices=1,
        )

    def _device(self, index: int) -> Any:
        return self._clients[index].local_devices()[0]

    def compile(self, index: int, module: Any, options: Any) -> Any:
        return self._clients[index].compile_and_load(module, self._list(index), options)

    def load(self, index: int, data: bytes) -> Any:
        return self._clients[index].deserialize_executable(data, self._list(index), None)

    def serialize(self, index: int, loaded: Any) -> bytes:
        data: bytes = self._clients[index].serialize_executable(loaded)
        return data

    def put(self, index: int, host: np.ndarray[Any, Any]) -> Any:
        aval = jax.core.ShapedArray(host.shape, host.dtype)
        device = self._device(index)
        return _jax.batched_device_put(aval, self._shardings[index], [host], [device], force_copy=True)

    def _list(self, index: int) -> Any:
        return _jax.DeviceList((self._device(index),))

    def leave(self, index: int) -> None:
        """Say goodbye for one replica, and wait until all have: each on a thread of its own."""
        self._clients.pop(index, None)
        if index in self._links:
            self._links.pop(index).shutdown()

    def close(self) -> None:
        """End the service, after every link: jaxlib ends a process whose service went first."""
        if self._service is not None:
            self._service.shutdown()
            self._service = None


def _part(done: Future[list[Any]], index: int) -> Future[Any]:
    """Promise one of several results."""
    part: Future[Any] = Future()

    def pass_on(whole: Future[list[Any]]) -> None:
        if error := whole.exception():
            part.set_exception(error)
        else:
            part.set_result(whole.result()[index])

    done.add_done_callback(pass_on)
    return part


def _bytes(host: np.ndarray[Any, Any]) -> memoryview:
    # By way of uint8: memoryviews know nothing of bfloat16 and its like.
    return memoryview(host.reshape(-1).view(np.uint8).data)


def _numpy_dtype(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
