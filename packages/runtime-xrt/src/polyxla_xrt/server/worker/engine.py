"""The engine of a job, on this worker's cores."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import closing

from polyxla import env as core_env
from polyxla_bridge import env as bridge
from polyxla_bridge.engine.engine import Engine
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.proto import worker_pb2 as pb

LOCALHOST = "127.0.0.1"
# Source: glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MOST = (1 << 31) - 1


def coordinator(request: pb.LeaseRequest) -> str:
    """Return where the replicas of a job's workers meet: what the first worker chose, or choose it here."""
    if request.coordinator:
        host, _, port = request.coordinator.rpartition(":")
        if not (host and port.isdecimal() and host.isprintable()):
            raise ValueError("it is not host:port")
        return request.coordinator
    host = request.host if request.workers > 1 else LOCALHOST
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as probe:
        probe.bind((host, 0))
        return join_address(host, probe.getsockname()[1])


def share_memory() -> None:
    """Have threads share one arena of glibc's, which keeps what is freed; call it before there are threads.

    There would be eight arenas for each processor, which the threads of one job after the other fill a
    little: 200 jobs took a worker from 240 to 397 MiB. And an array of 256 MiB would be new pages each time,
    which the kernel fills with zeros: half of the time of an upload. `return_memory` gives back what is kept.
    """
    # Other C libraries have no such call.
    if option := getattr(ctypes.CDLL(None), "mallopt", None):
        for name, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _MOST), (_M_TRIM_THRESHOLD, _MOST)):
            option(name, value)


def return_memory() -> None:
    """Give the memory of a job that is over back to the system, which glibc would keep."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def cpu_engine(
    request: pb.LeaseRequest, meeting: str, environ: Mapping[str, str], on_stall: Callable[[str], None]
) -> Engine:
    """Start jaxlib's clients on this machine's CPU, one for each core of the job.

    Args:
        request: what the job asked for.
        meeting: where its replicas meet.
        environ: this process's environment.
        on_stall: told where all replicas are when one of them has waited too long.
    """
    from polyxla_bridge.engine import stall_watchdog
    from polyxla_bridge.engine.jax_engine import JaxEngine

    workers = max(1, request.workers)
    replicas = request.cores * workers
    # Each core has pools of its own, and more threads than there are processors only wait for each other.
    threads = str(max(1, (os.cpu_count() or 1) // request.cores))
    limits = {bridge.NPROC: environ.get(bridge.NPROC) or threads}
    share = bridge.from_environ(
        {
            **environ,
            **limits,
            bridge.POLYXLA_BRIDGE_REPLICAS: str(replicas),
            bridge.POLYXLA_BRIDGE_PROCESSES: str(workers),
            bridge.POLYXLA_BRIDGE_PROCESS: str(request.worker),
            bridge.POLYXLA_BRIDGE_COORDINATOR: meeting if replicas > 1 else "",
            bridge.POLYXLA_BRIDGE_HOST: request.host or LOCALHOST,
            bridge.POLYXLA_STALL_TIMEOUT_S: str(request.stall_timeout_s or bridge.BridgeSettings.stall_timeout_s),
        }
    )
    stall_watchdog.on_stall(on_stall)
    with core_env.lent({**environ, **limits}):
        return JaxEngine(share)
