"""Starting the engine of a job on this worker's cores."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import closing

from polyxla import env as core_env
from polyxla.launcher.ports import LOCALHOST
from polyxla_bridge import env as bridge
from polyxla_bridge.engine.engine import Engine
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.proto import worker_pb2 as pb


def coordinator_address(request: pb.LeaseRequest) -> str:
    """Return the coordinator of a job's replicas, ``host:port``: the one in the request, or a free port here.

    The first worker of a job chooses it, and the request to the others contains it.

    Raises:
        ValueError: the requested address is not ``host:port``.
        OSError: the requested host is not an address of this machine.
        TypeError: the requested host contains a null character.
    """
    if request.coordinator:
        host, _, port = request.coordinator.rpartition(":")
        if not (host and port.isdecimal() and host.isprintable()):
            raise ValueError("the coordinator is not host:port")
        return request.coordinator
    host = request.host if request.workers > 1 else LOCALHOST
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as probe:
        probe.bind((host, 0))
        return join_address(host, probe.getsockname()[1])


def cpu_engine(
    request: pb.LeaseRequest, coordinator: str, environ: Mapping[str, str], on_stall: Callable[[str], None]
) -> Engine:
    """Start jaxlib's clients on this machine's CPU, one for each core of the job.

    Args:
        request: the job's request.
        coordinator: ``host:port`` of the coordinator of its replicas.
        environ: this process's environment.
        on_stall: receives the positions of all replicas if one stalls.
    """
    from polyxla_bridge.engine import stall_watchdog
    from polyxla_bridge.engine.jax_engine import JaxEngine

    workers = max(1, request.workers)
    replicas = request.cores * workers
    # Each core has its own thread pools; more threads than processors would only wait for each other.
    threads = str(max(1, (os.cpu_count() or 1) // request.cores))
    limits = {bridge.NPROC: environ.get(bridge.NPROC) or threads}
    share = bridge.from_environ(
        {
            **environ,
            **limits,
            bridge.POLYXLA_BRIDGE_REPLICAS: str(replicas),
            bridge.POLYXLA_BRIDGE_PROCESSES: str(workers),
            bridge.POLYXLA_BRIDGE_PROCESS: str(request.worker),
            bridge.POLYXLA_BRIDGE_COORDINATOR: coordinator if replicas > 1 else "",
            bridge.POLYXLA_BRIDGE_HOST: request.host or LOCALHOST,
            bridge.POLYXLA_STALL_TIMEOUT_S: str(
                request.stall_timeout_s or bridge.BridgeSettings.stall_timeout_s
            ),
        }
    )
    stall_watchdog.on_stall(lambda text, _: on_stall(text))
    with core_env.temporary_environ({**environ, **limits}):
        return JaxEngine(share)
