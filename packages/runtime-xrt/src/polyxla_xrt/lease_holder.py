"""A launcher's own helper process: it holds the lease on the worker's cores, and serves the mesh.

A process of its own, because a launcher may fork its replicas from itself, which gRPC's threads do not
survive; and because it stays until the last replica has said goodbye.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polyxla.console import say
from polyxla.env import POLYXLA_WAIT_S, snapshot
from polyxla.errors import PolyxlaError, UsageError
from polyxla_bridge.env import POLYXLA_STALL_TIMEOUT_S, BridgeSettings
from polyxla_xrt import env
from polyxla_xrt.client.job_owner import JobOwner
from polyxla_xrt.config.timeouts import LONGEST_WAIT_S
from polyxla_xrt.config.variables import Variable, find
from polyxla_xrt.config.workers import Worker, read_workers, write_workers
from polyxla_xrt.errors import WorkerLostError
from polyxla_xrt.plan import LOCALHOST, Plan

if TYPE_CHECKING:
    from polyxla_xrt.client.lease import Pod

START_S = 120.0
"""Longest wait for the worker and the mesh beyond what a person allows for another job, in seconds."""
END_S = 5.0
"""How long it may take, in seconds, to give the cores back."""
_MAIN = "import sys; sys.path[:] = {!r}; from {} import main; main({})"


@dataclass(frozen=True)
class Meeting:
    """What a job's processes must know.

    Attributes:
        address: ``host:port`` of the worker.
        job: the key that it gave.
        mesh: where processes meet; empty for one replica.
    """

    address: str
    job: str
    mesh: str


class LeaseHolder:
    """Has the worker's cores for a job, and a place where its processes meet, until it is left.

    Args:
        plan: where the replicas are.
        environ: the job's environment.

    Raises:
        PolyxlaError: the worker cannot be had, or the mesh cannot be served.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        limit_s = wait_s(environ)
        ours, theirs = Pipe()
        self._pipe = ours
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(sys.path, __name__, theirs.fileno())],
            env=dict(environ),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # A terminal's Ctrl-C goes to every process; this one ends with its launcher.
            start_new_session=True,
        )
        theirs.close()
        try:
            ours.send((plan, JobOwner.own()))
            self.meeting = self._meeting(limit_s + START_S + plan.configuration.mesh_connect_wait_s)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Meeting:
        return self.meeting

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _meeting(self, timeout_s: float) -> Meeting:
        deadline = time.monotonic() + timeout_s
        try:
            while self._pipe.poll(max(0.0, deadline - time.monotonic())):
                told = self._pipe.recv()
                if isinstance(told, PolyxlaError):
                    raise told
                if isinstance(told, Meeting):
                    return told
                say(told)
        except EOFError:
            raise _failed("ended before it had a worker; its own error stands above") from None
        raise _failed(f"had no worker within {timeout_s:g} s")

    def _end(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _failed(how: str) -> WorkerLostError:
    return WorkerLostError(
        f"the process that was to hold the worker for this job {how}", where="launch", fix="Start it again."
    )


def wait_s(environ: Mapping[str, str]) -> float:
    """Read how long to wait for another job's end, in seconds.

    Raises:
        UsageError: it is no such number.
    """
    asked = find(environ, POLYXLA_WAIT_S)
    if asked is None:
        return 0.0
    try:
        seconds = float(asked.text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_WAIT_S:
        raise asked.error(
            f"it is not a number of seconds from 0 to {LONGEST_WAIT_S:.0f}", f"Write {POLYXLA_WAIT_S}=600."
        )
    return seconds


def stall_timeout_s(environ: Mapping[str, str]) -> float:
    """Read how long replicas may wait for each other, in seconds.

    Raises:
        UsageError: it is no such number.
    """
    asked = find(environ, POLYXLA_STALL_TIMEOUT_S)
    try:
        seconds = float(asked.text) if asked else BridgeSettings.stall_timeout_s
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(
            "it is not a number of seconds above 0",
            where=asked.where if asked else POLYXLA_STALL_TIMEOUT_S,
            fix=f"Write {POLYXLA_STALL_TIMEOUT_S}=300.",
        )
    return seconds


def main(descriptor: int) -> None:
    """Be the helper process of the launcher at the other end of a pipe."""
    pipe = Connection(descriptor)
    plan, launcher = pipe.recv()
    try:
        _hold(pipe, plan, launcher, snapshot())
    except PolyxlaError as error:
        pipe.send(error)


def _hold(pipe: Connection, plan: Plan, launcher: JobOwner, environ: Mapping[str, str]) -> None:
    from polyxla_xrt.client.lease import Lease
    from polyxla_xrt.local_service import ensure_service
    from polyxla_xrt.proto import mesh_pb2 as pb
    from polyxla_xrt.server.mesh.server import MeshServer

    configuration = plan.configuration
    ensure_service(configuration, environ, pipe.send)
    worker, pod = _worker(plan, environ)
    lease = Lease(
        worker.address,
        plan.cores,
        environ,
        wait_s=wait_s(environ),
        stall_timeout_s=stall_timeout_s(environ),
        pod=pod,
        launcher=launcher,
        on_wait=pipe.send,
    )
    mesh: Any = None
    try:
        if len(plan.devices) > 1 and configuration.host_index == 0:
            config = pb.ConfigReply(
                workers=write_workers(configuration.workers), coordinator=lease.coordinator
            )
            address = configuration.mesh_address or f"{LOCALHOST}:0"
            mesh = MeshServer(address, len(plan.devices), config)
        met = mesh.address if mesh else configuration.mesh_address or ""
        pipe.send(Meeting(worker.address, lease.job, met))
        _wait_for_the_end(pipe)
    finally:
        lease.close()
        if mesh:
            mesh.close(0)


def _worker(plan: Plan, environ: Mapping[str, str]) -> tuple[Worker, Pod | None]:
    """Return this host's worker; on the hosts after the first, the mesh service knows where they are."""
    from polyxla_xrt.client.lease import Pod
    from polyxla_xrt.client.mesh import read_config

    configuration = plan.configuration
    host = configuration.host_index
    if configuration.hosts == 1:
        return configuration.workers[0], None
    if host == 0:
        worker = configuration.workers[0]
        return worker, Pod(configuration.hosts, host, worker.host)
    assert configuration.mesh_address is not None, "checked with the plan"
    told = read_config(configuration.mesh_address, configuration.mesh_connect_wait_s, environ)
    worker = read_workers(Variable(env.XRT_TPU_CONFIG, told.workers))[host]
    return worker, Pod(configuration.hosts, host, worker.host, told.coordinator)


def _wait_for_the_end(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
