"""Successive jobs leave nothing behind in the serving process."""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from statistics import median
from typing import Any

import numpy as np
import pytest
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla.plugin import snapshot
from polyxla_bridge.programs.executable import ArrayType
from polyxla_xrt.client.engine import RemoteEngine
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.config.assignment import Assignment

TIMEOUT_S = 60.0
OPTIONS = xla_client.CompileOptions().SerializeAsString()
PROGRAM: bytes = hlo_module_from_text("""HloModule meet, replica_count=2
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main { x = f32[] parameter(0) ROOT r = f32[] all-reduce(x), replica_groups={}, to_apply=add }
""").as_serialized_hlo_module_proto()
WARM, JOBS, WINDOW = 20, 60, 10
GROWTH = 1.03
"""Largest growth of the worker's memory once it is warm; the figure varies as much between single jobs."""
ONCE = 1.2
"""Largest growth of the worker's memory in the size of an array; a second copy would double it."""


def compute(address: str, job: str, core: int) -> float:
    engine = RemoteEngine(Assignment(address, job, (core,), "TPU", core, 2, core, 2), snapshot())
    device = engine.devices[core]
    argument = engine.from_host(device, ArrayType("float32", ()), memoryview(struct.pack("<f", core + 1)))
    large = engine.from_host(device, ArrayType("uint8", (1 << 20,)), memoryview(bytes(1 << 20)))
    (result,) = engine.execute(engine.compile(PROGRAM, OPTIONS), device, [argument])
    (value,) = struct.unpack("<f", engine.to_host(result).result(TIMEOUT_S))
    assert not large.is_deleted
    engine.close()
    return float(value)


def test_an_uploaded_array_is_let_go_once_it_is_sent(start_worker: Callable[..., Any]) -> None:
    worker = start_worker()
    with closing(Lease(worker.address, 1, snapshot(), wait_s=TIMEOUT_S)) as lease:
        engine = RemoteEngine(Assignment(worker.address, lease.job, (0,), "TPU", 0, 1, 0, 1), snapshot())
        host = np.zeros(3 << 20, np.uint8)
        freed = threading.Event()
        weakref.finalize(host, freed.set)
        engine.from_host(engine.devices[0], ArrayType("uint8", (host.size,)), host.data)
        del host
        # Nothing else is sent during the wait, so that no later message can release the array.
        assert freed.wait(TIMEOUT_S)
        engine.close()


def test_a_worker_holds_an_uploaded_array_once(start_worker: Callable[..., Any]) -> None:
    worker = start_worker()
    size = 256 << 20
    with closing(Lease(worker.address, 1, snapshot(), wait_s=TIMEOUT_S)) as lease:
        engine = RemoteEngine(Assignment(worker.address, lease.job, (0,), "TPU", 0, 1, 0, 1), snapshot())
        (device,) = engine.devices
        before = worker.resident_bytes
        held = engine.from_host(device, ArrayType("uint8", (size,)), memoryview(bytes(size)))
        # The worker answers this request after the array has arrived.
        assert engine.memory_stats(device)["bytes_in_use"] == size
        assert worker.resident_bytes - before < ONCE * size
        assert not held.is_deleted
        engine.close()


@pytest.mark.timeout(600)
@pytest.mark.long
def test_many_jobs_do_not_grow_the_workers_memory(start_worker: Callable[..., Any]) -> None:
    worker = start_worker()
    resident = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(JOBS):
            with closing(Lease(worker.address, 2, snapshot(), wait_s=TIMEOUT_S)) as lease:
                sums = [pool.submit(compute, worker.address, lease.job, core) for core in range(2)]
                assert [total.result(TIMEOUT_S) for total in sums] == [3.0, 3.0]
            worker.wait_until_free()
            resident.append(worker.resident_bytes)
    warm, last = median(resident[WARM : WARM + WINDOW]), median(resident[-WINDOW:])
    assert last < GROWTH * warm, [size >> 20 for size in resident]
