"""This machine's CPU cores: an engine of jaxlib's CPU clients for each job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future

from polyxla.plugin import LOCALHOST
from polyxla.plugin import env as core_env
from polyxla_bridge import env as bridge
from polyxla_bridge.engine import memory_accounting
from polyxla_bridge.engine.engine import Engine
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.server.worker.platforms.engines import OnStall, Served

CPU = "cpu"
DEFAULT_CORES = 8
"""Number of cores without ``--devices``: that of a TPU v2 or v3 with four chips."""
CLOSE_S = 3.0
"""`JobEngines.close_s`: a new process serves again within seconds."""


class CpuEngines:
    """Serves any number of CPU cores; a `JobEngines`.

    Args:
        cores: number of cores; None for `DEFAULT_CORES`.
        environ: this process's environment.
    """

    close_s = CLOSE_S

    def __init__(self, cores: int | None, environ: Mapping[str, str]) -> None:
        self.served = Served(cores or DEFAULT_CORES, CPU, memory_accounting.machine_bytes())
        self.lost: Future[str] = Future()
        self._environ = environ

    def refusal(self, request: pb.LeaseRequest) -> str | None:
        """Accept every request: a job may also have cores of other workers."""
        return None

    def wait_until_open(self) -> None:
        """Do nothing: CPU cores are always open."""

    def start(self, request: pb.LeaseRequest, coordinator: str, on_stall: OnStall) -> Engine:
        """Start jaxlib's clients, one for each core of the job."""
        from polyxla_bridge.engine import stall_watchdog
        from polyxla_bridge.engine.jax_engine import JaxEngine

        workers = max(1, request.workers)
        replicas = request.cores * workers
        # Each core has its own thread pools; more threads than processors would only wait for each other.
        threads = str(max(1, (os.cpu_count() or 1) // request.cores))
        limits = {bridge.NPROC: self._environ.get(bridge.NPROC) or threads}
        share = bridge.from_environ(
            {
                **self._environ,
                **limits,
                bridge.POLYXLA_BRIDGE_REPLICAS: str(replicas),
                bridge.POLYXLA_BRIDGE_PROCESSES: str(workers),
                bridge.POLYXLA_BRIDGE_PROCESS: str(request.worker),
                bridge.POLYXLA_BRIDGE_COORDINATOR: coordinator if replicas > 1 else "",
                bridge.POLYXLA_SECRET: request.secret,
                bridge.POLYXLA_BRIDGE_HOST: request.host or LOCALHOST,
                bridge.POLYXLA_STALL_TIMEOUT_S: str(
                    request.stall_timeout_s or bridge.BridgeSettings.stall_timeout_s
                ),
            }
        )
        # There is one handler for the whole process, and only one job at a time.
        stall_watchdog.on_stall(lambda text, _: on_stall(text))
        # jaxlib reads the number of threads from the process's environment when it makes its clients.
        with core_env.temporary_environ({**self._environ, **limits}):
            return JaxEngine(share)
