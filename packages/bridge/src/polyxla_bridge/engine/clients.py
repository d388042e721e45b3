"""jaxlib's CPU clients: one per local replica, each with one device.

A client runs one program on all of its devices, but replicas may run different programs, so each replica has
a client. The clients reach each other through jaxlib's distributed runtime and gloo, within a process and
across processes; if all are on one machine, most collectives go through memory that they share.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxlib import _jax

from polyxla_bridge import native
from polyxla_bridge.engine import startup_barrier
from polyxla_bridge.engine.coordination_service import CoordinationService
from polyxla_bridge.engine.numbering import Share, Shares
from polyxla_bridge.engine.shared_memory import SharedMemory
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.programs.executable import ArrayType

CONNECT_TIMEOUT_S = 120
"""Longest wait until the clients of all replicas are connected, in seconds."""


class Clients:
    """One jaxlib client per local replica, and their connection to the clients of the other replicas.

    Args:
        settings: the job's replicas, and which of them are in this process.
        timeout_s: longest wait for the other replicas, in seconds.

    Attributes:
        shares: the replicas of each process.
        local: this process's replicas.
        global_ids: jaxlib's device id of each replica; not 0..N-1, because each client has a block of ids.
        link: connection of the first local replica to the distributed runtime; None for a single replica.
        memory: what the replicas share.

    Raises:
        PjrtError: a replica did not connect in time.
    """

    def __init__(self, settings: BridgeSettings, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._settings = settings
        self._clients: dict[int, Any] = {}
        self._links: dict[int, Any] = {}
        self._service: Any = None
        self._peers: startup_barrier.PeerConnections | None = None
        self.shares: Shares = {}
        self.memory = SharedMemory(settings)
        if settings.replicas == 1:
            self.shares = {0: Share((0,), settings.places)}
            self._clients[0] = _jax.get_tfrt_cpu_client(asynchronous=False, num_devices=1)
        else:
            # gloo prints and polls as soon as the clients connect, so both calls come first.
            native.LOCKED.polyxla_drop_greetings()
            native.LOCKED.polyxla_let_gloo_nap()
            try:
                self._meet(timeout_s)
                self._connect(timeout_s)
            except BaseException:
                self.memory.leave()
                raise
            # All have joined before they connected.
            self.memory.forget()
        self._shardings = {i: SingleDeviceSharding(self._device(i)) for i in self._clients}
        self.global_ids = [device.id for device in self._clients[self.local[0]].devices()]
        self.link = self._links.get(self.local[0])

    @property
    def local(self) -> tuple[int, ...]:  # noqa: D102  (see above)
        return self.shares[self._settings.process].replicas

    def _meet(self, timeout_s: float) -> None:
        """Wait for all processes, and start the coordination service."""
        settings = self._settings
        # The replicas of a single process end together, so the service may run in that process.
        if settings.processes > 1 and settings.process == 0:
            self._service = CoordinationService(settings.coordinator, settings.replicas)
        try:
            self._peers = startup_barrier.wait_for_peers(
                settings, self.memory, self._start_service, timeout_s
            )
        except BaseException:
            if self._service is not None:
                self._service.shutdown()
            raise
        self.shares = self._peers.shares
        self.memory.join(self._peers.memory, self.local)

    def _start_service(self, peers: Sequence[socket.socket]) -> None:
        if self._service is None:
            self._service = _jax.get_distributed_runtime_service(
                self._settings.coordinator, self._settings.replicas
            )
        else:
            self._service.start(peers)

    def _connect(self, timeout_s: float) -> None:
        local = self.local
        # Each client connects on a thread of its own, because it waits until all others are connected.
        with ThreadPoolExecutor(len(local)) as pool:
            made = pool.map(lambda index: self._join(index, timeout_s), local)
            self._clients = dict(zip(local, made, strict=True))

    def _join(self, index: int, timeout_s: float) -> Any:
        link = _jax.get_distributed_runtime_client(
            self._settings.coordinator,
            index,
            init_timeout=max(1, int(timeout_s)),
            # Between processes of one machine, compressing takes longer than sending.
            use_compression=False,
            # `leave` shuts the connection down explicitly.
            shutdown_on_destruction=False,
        )
        link.connect()
        self._links[index] = link
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=link, hostname=self._settings.host)
        return _jax.get_tfrt_cpu_client(
            asynchronous=False,
            distributed_client=link,
            node_id=index,
            num_nodes=self._settings.replicas,
            collectives=collectives,
            num_devices=1,
        )

    def _device(self, index: int) -> Any:
        return self._clients[index].local_devices()[0]

    def compile(self, index: int, module: Any, options: Any, devices: Sequence[int] = ()) -> Any:
        """Compile StableHLO, and load it on one replica.

        Args:
            index: the replica.
            module: the program.
            options: of the compilation.
            devices: replicas that compute one partitioned program together; none for all.
        """
        client = self._clients[index]
        # jaxlib's arrays of results name these. Partitions make one together, each replica one of its own.
        listed = [self._device(index)]
        if options.num_partitions > 1:
            every = client.devices()
            listed = [every[number] for number in sorted(devices) or range(len(every))]
        return client.compile_and_load(module, _jax.DeviceList(tuple(listed)), options)

    def load(self, index: int, data: bytes) -> Any:
        """Load on one replica the bytes that `serialize` returned in any process."""
        alone = _jax.DeviceList((self._device(index),))
        return self._clients[index].deserialize_executable(data, alone, None)

    def serialize(self, index: int, loaded: Any) -> bytes:
        """Return a program in jaxlib's format."""
        data: bytes = self._clients[index].serialize_executable(loaded)
        return data

    def put(self, index: int, host: np.ndarray[Any, Any]) -> Any:
        """Bring an array to a replica's device, which uses its memory if that is aligned.

        jaxlib's CPU client never writes to it: a program that is to reuse the memory gets a copy instead.
        """
        # Without it, jax would make 32-bit arrays of int64 and float64. The program may use jax, too, so its
        # own setting stays.
        with jax.enable_x64(True):
            aval = jax.core.ShapedArray(host.shape, host.dtype)
            device = self._device(index)
            return _jax.batched_device_put(aval, self._shardings[index], [host], [device])

    def handlers(self, index: int, types: Sequence[ArrayType]) -> list[Any]:
        """Return what makes jax's arrays of a program's results on a replica, without Python for each."""
        with jax.enable_x64(True):
            return [
                _jax.array_result_handler(
                    jax.core.ShapedArray(type_.dims, numpy_dtype(type_.dtype)),
                    sharding=self._shardings[index],
                    committed=True,
                    _skip_checks=True,
                )
                for type_ in types
            ]

    def wait_for_others(self, timeout_s: float) -> None:
        """Wait in process 0 until every other process has left.

        Raises:
            PjrtError: a process had not left after `timeout_s` seconds.
        """
        if self._peers is not None:
            self._peers.wait_for_others(timeout_s)

    def leave(self, index: int) -> None:
        """Release one replica's device and its connection to the others."""
        # The client comes first, because it was made with the connection.
        self._clients.pop(index, None)
        if index in self._links:
            self._links.pop(index).shutdown()

    def close(self) -> None:
        """Leave the service; call `leave` for each replica before."""
        self.memory.leave()
        self.link = None
        if self._peers is not None:
            self._peers.leave()
        if self._service is not None:
            self._service.shutdown()
            self._service = None


class JaxProgram:
    """A compiled program, loaded on each replica at its first execution.

    Args:
        clients: the clients of this process.
        loaded: the program by replica, as far as it is loaded already.
        data: the program in jaxlib's format.
        results: types of its results.

    Attributes:
        data: as above.
    """

    def __init__(
        self, clients: Clients, loaded: dict[int, Any], data: bytes, results: Sequence[ArrayType]
    ) -> None:
        self.data = data
        self._clients = clients
        self._loaded = loaded
        self._results = results
        self._handlers: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def on(self, index: int) -> Any:
        """Return the program as loaded on one replica."""
        # Check again with the lock: replicas run on threads, and each must load the program only once.
        if index not in self._loaded:
            with self._lock:
                if index not in self._loaded:
                    self._loaded[index] = self._clients.load(index, self.data)
        return self._loaded[index]

    def run(self, index: int, arguments: list[Any]) -> list[Any]:
        """Start the program on one replica; return its results, which may not be computed yet."""
        results = self.on(index).execute_sharded(arguments)
        if index not in self._handlers:
            self._handlers[index] = self._clients.handlers(index, self._results)
        arrays: list[Any] = results.consume_with_handlers(self._handlers[index])
        return arrays


def numpy_dtype(name: str) -> Any:
    """Return numpy's dtype of this name, or ml_dtypes'."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
