"""The TPU node in torch_xla's plugin registry, and the state of this process's replica for stall reports.

Heavy: imported by processes that import torch_xla.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from torch_xla.experimental import plugins

from polyxla.plugin import failures, snapshot
from polyxla_bridge.abi import Code
from polyxla_bridge.engine import stall_watchdog
from polyxla_bridge.engine.engine import DeviceActivity, Engine
from polyxla_bridge.torch_xla_plugin import EnginePlugin
from polyxla_xrt import env
from polyxla_xrt.config.assignment import read_assignment
from polyxla_xrt.errors import WorkerError
from polyxla_xrt.own_assignment import lease_cores
from polyxla_xrt.plan import configured_plan

EXIT_GRACE_S = 10.0
"""Time for a program to end by itself once its worker is gone, in seconds."""


class Node(EnginePlugin):
    """A TPU node: the bridge's plugin with a remote engine behind it."""

    def make_engine(self) -> Engine:
        """Connect to the worker, with the cores that a launcher assigned to this process, or with all."""
        # The import waits until here, because programs that launch replicas import this module and may fork,
        # which the threads of gRPC do not survive.
        from polyxla_xrt.client.engine import RemoteEngine

        environ = snapshot()
        if assignment := read_assignment(environ):
            _own.engine = RemoteEngine(assignment, environ, _end_process)
        else:
            assignment, end_lease = lease_cores(configured_plan(environ), environ)
            _own.engine = RemoteEngine(assignment, environ, _end_process, end_lease)
        return _own.engine

    def refusal_of_spmd(self) -> str:
        """Refuse partitioned programs in a replica, which has one core, and on several workers."""
        environ = snapshot()
        # Only a launcher assigns a core. A program without an assignment has all cores of its worker.
        if read_assignment(environ):
            return "a replica has one core; run an SPMD program without launching replicas, by python SCRIPT"
        hosts = configured_plan(environ).configuration.hosts
        if hosts > 1:
            return (
                f"this job has {hosts} workers, and each host drives only its own; run an SPMD program on "
                "one worker, or on a TPU VM"
            )
        return ""

    def host_index(self) -> int:
        """Return the index of this host among those of the job."""
        return int(snapshot().get(env.TPU_WORKER_ID, "0"))

    def physical_chip_count(self) -> int:
        """Return the number of processes of this host."""
        return configured_plan(snapshot()).cores

    def configure_single_process(self) -> None:
        """Do nothing: the environment already describes the process."""


def register() -> None:
    """Register the node with torch_xla's Python, which looks it up as a TPU."""
    plugins._plugin_registry["TPU"] = Node()


@dataclass
class _NodeState:
    """The state of this process."""

    engine: Engine | None = None
    waits_at: str | None = None
    since: float = field(default_factory=time.monotonic)


_own = _NodeState()


def enter_wait(what: str) -> None:
    """Record that this replica waits for others outside of its device."""
    _own.waits_at, _own.since = what, time.monotonic()


def leave_wait() -> None:
    """Record that the wait is over."""
    _own.waits_at = None


def position() -> DeviceActivity:
    """Return the activity of this process's first replica."""
    if _own.engine is None:
        return DeviceActivity(0, None, (), 0.0)
    at = _own.engine.activities()[0]
    # While a replica waits for others outside of its device, the device is idle, and its activity would not
    # explain the wait.
    if _own.waits_at is None:
        return at
    return DeviceActivity(at.device, _own.waits_at, (), time.monotonic() - _own.since)


def describe() -> str:
    """Return the activity of this process's replica, and the stack of each thread."""
    return f"  {position()}\n{stall_watchdog.stacks()}"


def _end_process(error: WorkerError, code: int) -> None:
    """End this process when its worker is gone or has ended its job, whatever its program does.

    Called on the engine's reader thread, which must not block: another thread ends the process. The program's
    futures have not failed yet, so what it raises comes after this.
    """
    # A connection that broke is the cause itself. A worker that ends the job has a reason, which the launcher
    # learns from the replica that died.
    failures.blame(error, follows_another=code != Code.UNAVAILABLE)
    if code == Code.DEADLINE_EXCEEDED and failures.has_parent():
        # The report comes from this thread, while the stack of the program still shows where it waits.
        failures.report_stall(f"polyxla: {error.what}\n{describe()}")
        return
    threading.Thread(target=_end, args=(error,), name="polyxla-end", daemon=True).start()


def _end(error: WorkerError) -> None:
    if not failures.has_parent():
        # Without a launcher, the program gets the error at its next use of the device and may handle it.
        time.sleep(EXIT_GRACE_S)
    failures.give_up(error)
