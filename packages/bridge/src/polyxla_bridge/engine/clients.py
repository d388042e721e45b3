"""jaxlib's CPU clients: one for each local replica, with one device.

Replicas may run different programs, and one client's program would be every device's. The clients meet
through jaxlib's distributed runtime and gloo, whichever threads or processes they are in.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxlib import _jax

from polyxla_bridge import native
from polyxla_bridge.engine import startup_barrier
from polyxla_bridge.env import Share

CONNECT_TIMEOUT_S = 120
"""Longest wait for all replicas to have a client, in seconds."""
LEAVE_TIMEOUT_S = 300
"""How long process 0 stays for others that still compute, in seconds; it holds what they meet through."""


class Clients:
    """One jaxlib client per local replica, and the runtime through which they know each other.

    Args:
        share: which replicas there are, and which of them are here.
        timeout_s: longest wait for the others.

    Attributes:
        global_ids: jaxlib's number of each replica's device; not 0..N-1, but blocks of one a client.
        link: the first replica's connection to all others; None if there are none.

    Raises:
        PjrtError: the replicas did not find each other in time.
    """

    def __init__(self, share: Share, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._share = share
        self._clients: dict[int, Any] = {}
        self._links: dict[int, Any] = {}
        self._service: Any = None
        self._company: startup_barrier.Company | None = None
        if share.replicas == 1:
            self._clients[0] = _jax.get_tfrt_cpu_client(asynchronous=False, num_devices=1)
        else:
            native.LOCKED.polyxla_drop_greetings()
            self._company = startup_barrier.hold(share, self._start_service, timeout_s)
            self._connect(timeout_s)
        self._shardings = {i: SingleDeviceSharding(self._device(i)) for i in self._clients}
        self.global_ids = [device.id for device in self._clients[share.local[0]].devices()]
        self.link = self._links.get(share.local[0])

    def _start_service(self) -> None:
        self._service = _jax.get_distributed_runtime_service(self._share.coordinator, self._share.replicas)

    def _connect(self, timeout_s: float) -> None:
        local = self._share.local
        # All at once: each waits until every other one is there.
        with ThreadPoolExecutor(len(local)) as together:
            made = together.map(lambda index: self._join(index, timeout_s), local)
            self._clients = dict(zip(local, made, strict=True))

    def _join(self, index: int, timeout_s: float) -> Any:
        link = _jax.get_distributed_runtime_client(
            self._share.coordinator,
            index,
            init_timeout=max(1, int(timeout_s)),
            # On one machine, packing takes longer than sending.
            use_compression=False,
            shutdown_on_destruction=False,
        )
        link.connect()
        self._links[index] = link
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=link, hostname=self._share.host)
        return _jax.get_tfrt_cpu_client(
            asynchronous=False,
            distributed_client=link,
            node_id=index,
            num_nodes=self._share.replicas,
            collectives=collectives,
            num_devices=1,
        )

    def _device(self, index: int) -> Any:
        return self._clients[index].local_devices()[0]

    def compile(self, index: int, module: Any, options: Any) -> Any:
        """Compile for all replicas, and load on one."""
        return self._clients[index].compile_and_load(module, self._list(index), options)

    def load(self, index: int, data: bytes) -> Any:
        """Load on one replica what `serialize` returned, in any process."""
        return self._clients[index].deserialize_executable(data, self._list(index), None)

    def serialize(self, index: int, loaded: Any) -> bytes:
        """Return a program in jaxlib's own form."""
        data: bytes = self._clients[index].serialize_executable(loaded)
        return data

    def put(self, index: int, host: np.ndarray[Any, Any]) -> Any:
        """Copy an array to a replica's device; `host` may be reused when this returns."""
        aval = jax.core.ShapedArray(host.shape, host.dtype)
        device = self._device(index)
        return _jax.batched_device_put(aval, self._shardings[index], [host], [device], force_copy=True)

    def _list(self, index: int) -> Any:
        return _jax.DeviceList((self._device(index),))

    def leave(self, index: int) -> None:
        """Let go of one replica's device and of its connection to the others."""
        self._clients.pop(index, None)
        if index in self._links:
            self._links.pop(index).shutdown()

    def close(self) -> None:
        """End the service, after every link in every process: jaxlib ends a process whose service went first.

        Raises:
            PjrtError: another process did not leave in time.
        """
        self.link = None
        try:
            if self._company is not None:
                self._company.leave(LEAVE_TIMEOUT_S)
        finally:
            if self._service is not None:
                self._service.shutdown()
                self._service = None


class Program:
    """A compiled program, loaded by each replica that runs it.

    Args:
        clients: the replicas of this process.
        loaded: the program on some of them; or empty.
        data: the program in jaxlib's form; needed if it is loaded nowhere.
    """

    def __init__(self, clients: Clients, loaded: dict[int, Any], data: bytes | None = None) -> None:
        self._clients = clients
        self._loaded = loaded
        self._data = data
        self._lock = threading.Lock()

    def on(self, index: int) -> Any:
        """Return the program as one replica runs it."""
        if index not in self._loaded:
            with self._lock:
                if index not in self._loaded:
                    self._loaded[index] = self._clients.load(index, self._bytes())
        return self._loaded[index]

    def data(self) -> bytes:
        """Return the program in jaxlib's form."""
        with self._lock:
            return self._bytes()

    def _bytes(self) -> bytes:
        if self._data is not None:
            return self._data
        index, loaded = next(iter(self._loaded.items()))
        return self._clients.serialize(index, loaded)
