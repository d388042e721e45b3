"""The launcher's helper process, which holds the lease on the worker's cores and serves the mesh.

It is a separate process for two reasons: the launcher may fork its replicas from itself, and gRPC's threads
do not survive a fork; and the helper must outlive the last replica's goodbye.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polyxla import PolyxlaError
from polyxla.plugin import LOCALHOST, POLYXLA_SECRET, derived, is_stopped, say, signal_name, snapshot
from polyxla_xrt import env
from polyxla_xrt.client.job_owner import JobOwner
from polyxla_xrt.config.resuming import read_resuming, refuse_resuming
from polyxla_xrt.config.timeouts import job_wait_s, stall_timeout_s
from polyxla_xrt.config.variables import Variable
from polyxla_xrt.config.workers import Worker, read_workers, write_workers
from polyxla_xrt.errors import WorkerLostError
from polyxla_xrt.plan import NodePlan

if TYPE_CHECKING:
    from polyxla_xrt.client.lease import Pod

START_S = 240.0
"""Longest wait for the worker and the mesh, in seconds, in addition to the user's wait for another job.

More than `polyxla_xrt.local_service.START_TPU_S`.
"""
END_S = 5.0
"""Longest wait for the helper process to end, in seconds."""
_LOOK_S = 1.0
"""Time between looks at the state of the helper process, in seconds."""
_MAIN = "import sys; sys.path[:] = {!r}; from {} import main; main({})"


@dataclass(frozen=True)
class GrantedLease:
    """A lease as the job's processes need it.

    Attributes:
        worker_address: ``host:port`` of the worker.
        job: the worker's key for the job.
        mesh_address: ``host:port`` of the mesh service; empty for one replica.
    """

    worker_address: str
    job: str
    mesh_address: str


class LeaseHolder:
    """A context manager that starts the helper process, and ends it with the job.

    Args:
        plan: where the replicas are.
        environ: the job's environment, with its secret.

    Attributes:
        lease: the granted lease.

    Raises:
        PolyxlaError: the worker is not available, or the mesh service cannot be started.
    """

    def __init__(self, plan: NodePlan, environ: Mapping[str, str]) -> None:
        # These come first: an invalid value must fail before a process is started.
        limit_s, self._stall_s = job_wait_s(environ), stall_timeout_s(environ)
        refuse_resuming(plan.configuration, environ)
        ours, theirs = Pipe()
        self._pipe = ours
        # Python ignores entries that are no strings, such as a Path.
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(path, __name__, theirs.fileno())],
            env=dict(environ),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # A terminal sends Ctrl-C to the whole session; the helper ends with its launcher instead.
            start_new_session=True,
        )
        # If this process also held the end of the helper, the pipe would not close when the helper ends.
        theirs.close()
        try:
            # A helper that has already ended is noticed next, by `_wait`.
            with contextlib.suppress(OSError):
                ours.send((plan, JobOwner.current()))
            self.lease = self._wait(limit_s + START_S + plan.configuration.mesh_connect_wait_s)
        except BaseException:
            # Nothing was granted that must be given back, and the helper may be waiting for a worker.
            self._process.kill()
            self._end()
            raise

    def __enter__(self) -> GrantedLease:
        return self.lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _wait(self, timeout_s: float) -> GrantedLease:
        """Wait for the lease; print the messages that come before it."""
        deadline = time.monotonic() + timeout_s
        went_on = time.monotonic()
        try:
            while (now := time.monotonic()) < deadline:
                if not is_stopped(self._process.pid):
                    went_on = now
                elif now - went_on > self._stall_s:
                    raise _failed(
                        f"has been stopped for {self._stall_s:g} s (kill -CONT continues a process)"
                    )
                # The waits are short, because a stopped process closes no pipe.
                if self._pipe.poll(min(_LOOK_S, deadline - now)):
                    message = self._pipe.recv()
                    if isinstance(message, PolyxlaError):
                        raise message
                    if isinstance(message, GrantedLease):
                        return message
                    say(message)
        except (EOFError, OSError):
            # An OSError is a reset: the helper was killed before it had read all that was sent.
            raise _failed(f"{self._ending()} before it had a worker") from None
        raise _failed(f"got no worker within {timeout_s:g} s")

    def _ending(self) -> str:
        # The pipe may close a moment before the process can be reaped.
        with contextlib.suppress(subprocess.TimeoutExpired):
            if (code := self._process.wait(END_S)) < 0:
                return f"was ended by {signal_name(-code)}"
        return "printed its error, which stands above, and ended"

    def _end(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _failed(how: str) -> WorkerLostError:
    return WorkerLostError(
        f"the helper process that holds the worker for this job {how}",
        where="launch",
        fix="Start the job again.",
    )


def main(descriptor: int) -> None:
    """Run the helper process of the launcher at the other end of a pipe."""
    pipe = Connection(descriptor)
    try:
        plan, owner = pipe.recv()
    except (EOFError, OSError):
        # The launcher was interrupted, or killed.
        return
    try:
        _hold(pipe, plan, owner, snapshot())
    except PolyxlaError as error:
        pipe.send(error)


def _hold(pipe: Connection, plan: NodePlan, owner: JobOwner, environ: Mapping[str, str]) -> None:
    # gRPC is imported in the helper only: the launcher may fork.
    from polyxla_xrt.client.lease import Lease
    from polyxla_xrt.local_service import ensure_service
    from polyxla_xrt.proto import mesh_pb2 as pb
    from polyxla_xrt.server.mesh.server import MeshServer

    configuration = plan.configuration
    ensure_service(configuration, environ, pipe.send)
    worker, pod = _worker(plan, environ)
    # The launcher reads messages until it has the lease; later ones go to the terminal.
    tell: Callable[[Any], None] = pipe.send
    lease = Lease(
        worker.address,
        plan.cores,
        environ,
        wait_s=job_wait_s(environ),
        stall_timeout_s=stall_timeout_s(environ),
        pod=pod,
        owner=owner,
        resuming=read_resuming(environ),
        revive=lambda: ensure_service(configuration, environ, say),
        on_wait=lambda text: tell(text),  # noqa: PLW0108  (`tell` changes below)
    )
    mesh: Any = None
    try:
        # The mesh comes after the lease, because it gives the other hosts the coordinator that the first
        # worker chose.
        if len(plan.devices) > 1 and configuration.host_index == 0:
            config = pb.ConfigReply(
                workers=write_workers(configuration.workers), coordinator=lease.coordinator
            )
            address = configuration.mesh_address or f"{LOCALHOST}:0"
            mesh = MeshServer(address, len(plan.devices), environ[POLYXLA_SECRET], config)
        mesh_address = mesh.address if mesh else configuration.mesh_address or ""
        pipe.send(GrantedLease(worker.address, lease.job, mesh_address))
        tell = say
        _wait_for_the_end(pipe)
    finally:
        lease.close()
        if mesh:
            # The replicas have ended or are about to be ended, so nobody is waited for.
            mesh.close(0)


def _worker(plan: NodePlan, environ: Mapping[str, str]) -> tuple[Worker, Pod | None]:
    """Return this host's worker. Hosts after the first get the list of workers from the mesh service."""
    from polyxla_xrt.client.lease import Pod
    from polyxla_xrt.client.mesh import read_config

    configuration = plan.configuration
    host = configuration.host_index
    if configuration.hosts == 1:
        return configuration.workers[0], None
    # The workers get a secret of their own, which does not reveal that of the job.
    secret = derived(environ[POLYXLA_SECRET], "the job's workers")
    if host == 0:
        worker = configuration.workers[0]
        return worker, Pod(configuration.hosts, host, worker.host, secret)
    assert configuration.mesh_address is not None, "checked with the plan"
    config = read_config(configuration.mesh_address, configuration.mesh_connect_wait_s, environ)
    worker = read_workers(Variable(env.XRT_TPU_CONFIG, config.workers))[host]
    return worker, Pod(configuration.hosts, host, worker.host, secret, config.coordinator)


def _wait_for_the_end(pipe: Connection) -> None:
    """Block until the launcher closes its end of the pipe, or dies."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
