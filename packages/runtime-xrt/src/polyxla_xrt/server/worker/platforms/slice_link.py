"""The link between the workers of a TPU slice: their serving processes begin together and end together.

libtpu's client of a slice waits for the processes of all hosts without naming them, and is useless once one
of them has ended. So the serving process of worker 0 serves a link, which the others join before they open
libtpu; each joined stream stays open as long as both processes live. Whoever loses the link is replaced by
its supervisor, and the new process joins again. During a job, the workers exchange their progress over it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from polyxla import PolyxlaError, UsageError
from polyxla.plugin import BASE_PORT
from polyxla_bridge.engine.stall_watchdog import DeviceProgress
from polyxla_xrt.client.attendance import attend
from polyxla_xrt.client.channel import WorkerChannel
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.config.workers import write_workers
from polyxla_xrt.errors import WorkerError
from polyxla_xrt.proto import worker_pb2 as pb
from polyxla_xrt.proto import worker_pb2_grpc
from polyxla_xrt.protocol.channels import server_options
from polyxla_xrt.protocol.worker import OPTIONS, PROTOCOL
from polyxla_xrt.server.refusals import MalformedRequests
from polyxla_xrt.server.worker.platforms.library import SliceMembers
from polyxla_xrt.server.worker.security import Security

Exchange = Callable[[pb.Account], Sequence[pb.Account]]
"""Publishes a worker's account and returns those of all workers that take part in the same job."""


class AccountTable:
    """The accounts of all workers in the running job, which worker 0 keeps. Any thread may use it."""

    def __init__(self) -> None:
        self._job = ""
        self._accounts: dict[int, pb.Account] = {}
        self._lock = threading.Lock()

    def begin(self, job: str) -> None:
        """Forget the last job: an account of it that arrives late must not count in the new job."""
        with self._lock:
            self._job = job
            self._accounts.clear()

    def exchange(self, account: pb.Account) -> list[pb.Account]:
        """Store a worker's account and return those of all workers; return none for another job."""
        with self._lock:
            # A worker that is a job behind must not see the progress of the new job, nor count in it.
            if account.job != self._job:
                return []
            self._accounts[account.worker] = account
            return list(self._accounts.values())


class SliceProgress(DeviceProgress):
    """A worker's account in one job, and what it knows of the others'.

    Args:
        job: the job's coordinator, the same on all workers.
        worker: the number of this worker.
        workers: number of workers of the slice.
        exchange: publishes the account.
    """

    def __init__(self, job: str, worker: int, workers: int, exchange: Exchange) -> None:
        self._job = job
        self._worker = worker
        self._workers = workers
        self._exchange = exchange
        self._beats = 0
        self._retired: set[int] = set()
        self._known: dict[int, pb.Account] = {}

    def beat(self) -> None:
        """Count a heartbeat, which the next exchange publishes."""
        self._beats += 1

    def exchange(self, is_full: bool) -> bool:
        """Publish this worker's account; return whether all devices of the slice have programs."""
        own = pb.Account(worker=self._worker, job=self._job, heartbeats=self._beats, is_full=is_full)
        # Threads of the engine add to the set; a copy is made in one step, an iteration is not.
        own.retired.extend(self._retired.copy())
        found = {account.worker: account for account in self._exchange(own)}
        # If worker 0 does not answer, the last accounts stay: a worker without news shows no heartbeat, and
        # does not vanish from the report.
        self._known |= found
        # A worker that has not begun the job has published nothing, and its devices have no program.
        return len(found) == self._workers and all(account.is_full for account in found.values())

    def heartbeats(self) -> dict[str, str]:
        """Return the heartbeats of all workers, as of the last exchange."""
        return {str(worker): str(account.heartbeats) for worker, account in self._known.items()}

    def retire(self, replica: int) -> None:  # noqa: D102  (see `DeviceProgress`)
        self._retired.add(replica)

    def retired(self) -> frozenset[int]:
        """Return the replicas of all workers that had returned by the last exchange."""
        known = [account.retired for account in self._known.values()]
        return frozenset(self._retired).union(*known)


PORT = BASE_PORT - 1
"""The port of the link, on the host of worker 0; libtpu's own is the next one."""
JOIN_S = 180.0
"""Longest wait for the other workers, in seconds."""
MARGIN_S = 5.0
"""How much longer the others wait, in seconds, so that worker 0 can name the missing workers."""
POLL_S = 0.2
"""Interval at which worker 0 asks whether the others have finished a job, in seconds."""
EXCHANGE_S = 5.0
"""Longest wait for worker 0's answer to an account of progress, in seconds."""
REPORT_S = 60.0
"""Interval at which worker 0 reports that it still waits for the others, in seconds."""
# The stream of a joined worker occupies a thread for as long as the slice lives, and its exchanges and the
# stream of its next process need threads beside it.
_CALLS_PER_WORKER = 4
_SERVER_OPTIONS = (
    *OPTIONS,
    # With a shared port, a process that has not quite ended would get a part of the calls for its successor.
    ("grpc.so_reuseport", 0),
)

_log = logging.getLogger("polyxla.worker")


class SliceLink:
    """This process's end of the link. Blocks until all workers have joined; keep it as long as the slice.

    Args:
        members: the workers of the slice.
        security: the credentials of all workers.
        environ: this process's environment.
        join_s: longest wait for the other workers, in seconds.

    Attributes:
        lost: completes, with the reason, when a worker is gone.

    Raises:
        UsageError: a worker has not come in time, refuses, or has another list of workers.
    """

    def __init__(
        self, members: SliceMembers, security: Security, environ: Mapping[str, str], join_s: float = JOIN_S
    ) -> None:
        self.lost: Future[str] = Future()
        self._table = AccountTable()
        self._channel: WorkerChannel | None = None
        self._members = members
        self._environ, self._token = security.as_client(environ), security.token
        self._address = link_address(members)
        _log.info("waiting for the other workers of the slice: %s", write_workers(members.workers))
        if members.own == 0:
            self._serve(security, join_s)
        else:
            self._join(join_s)

    def _serve(self, security: Security, join_s: float) -> None:
        """Serve the link as worker 0."""
        hub = _Hub(self._members, self.lost, self._table)
        server = grpc.server(
            ThreadPoolExecutor(_CALLS_PER_WORKER * len(self._members.workers), "polyxla-slice"),
            interceptors=[*security.interceptors(), MalformedRequests()],
            options=(*_SERVER_OPTIONS, *server_options(len(self._members.workers))),
        )
        worker_pb2_grpc.add_SliceServicer_to_server(hub, server)
        try:
            security.listen(server, self._address)
        except RuntimeError as error:
            raise _problem(
                f"the workers of the slice cannot meet at {self._address}: {error}",
                "Worker 0's host must be an address of this host, and the port must be free: ss -ltnp.",
            ) from None
        server.start()
        # `close` stops it, and grpcio itself stops a server that nothing refers to.
        self._server = server
        if missing := hub.wait(join_s):
            names = " and ".join(map(self._members.name, missing))
            text = f"{names} did not join within {join_s:g} s"
            hub.give_up(text)
            # The grace lets the others receive the reason, too.
            server.stop(MARGIN_S).wait(MARGIN_S)
            raise _problem(text, "Start the worker of each host with the same list.")

    def _join(self, join_s: float) -> None:
        """Join the link of worker 0."""
        channel = WorkerChannel(self._address, self._environ, token=self._token)
        request = pb.JoinRequest(
            protocol=PROTOCOL, workers=write_workers(self._members.workers), worker=self._members.own
        )
        first = self._members.name(0)
        try:
            # Worker 0 names the missing workers when its own wait ends, so this wait must end later.
            attendance = attend(lambda: channel.join(request), join_s + MARGIN_S)
        except TimeoutError:
            channel.close()
            text, fix = f"{first} did not answer within {join_s:g} s", "See its log."
            raise _problem(text, fix) from None
        except grpc.RpcError as error:
            channel.close()
            raise _explained(first, channel, error) from None
        self._channel = channel
        attendance.ended.add_done_callback(lambda ended: self.lost.set_result(_why(first, ended.result())))

    def progress(self, job: str) -> SliceProgress:
        """Return what exchanges the progress of a new job.

        Args:
            job: its coordinator, the same on all workers.
        """
        if self._members.own == 0:
            # Accounts that the others send before this are dropped, and their next exchange brings them
            # again.
            self._table.begin(job)
        return SliceProgress(job, self._members.own, len(self._members.workers), self._exchange)

    def _exchange(self, account: pb.Account) -> Sequence[pb.Account]:
        """Publish an account; return those of all workers, or none if worker 0 does not answer."""
        if self._channel is None:
            return self._table.exchange(account)
        try:
            return self._channel.exchange(account, EXCHANGE_S)
        except grpc.RpcError:
            # Either the link is lost as well, or the next exchange succeeds.
            return ()

    def wait_for_release(self) -> None:
        """On worker 0, wait until no other worker has a job, or the slice is lost; elsewhere, do nothing.

        Without a deadline: the job's other hosts may save or evaluate for as long as they like. A job that
        waits for the slice has a deadline of its own.
        """
        others = range(1, len(self._members.workers)) if self._members.own == 0 else ()
        report_at = time.monotonic() + REPORT_S
        for worker in others:
            # The link says only that a process lives. The worker itself knows whether a job still has its
            # cores.
            address = self._members.workers[worker].address
            channel = WorkerChannel(address, self._environ, token=self._token)
            while not self.lost.done() and _has_job(channel):
                if time.monotonic() > report_at:
                    _log.info("%s, still has the last job", self._members.name(worker))
                    report_at += REPORT_S
                time.sleep(POLL_S)
            channel.close()

    def close(self) -> None:
        """Leave the slice. All workers lose it."""
        if self._channel is None:
            self._server.stop(None)
        else:
            self._channel.close()


def link_address(members: SliceMembers) -> str:
    """Return ``host:port`` of the link of a slice's workers."""
    return join_address(members.workers[0].host, PORT)


class _Hub(worker_pb2_grpc.SliceServicer):
    """Answers the calls of `polyxla.xrt.worker.Slice` in the serving process of worker 0.

    Args:
        members: the workers of the slice.
        lost: completed here, with the reason, when one of them is gone.
        table: takes the accounts of the workers' progress.
    """

    def __init__(self, members: SliceMembers, lost: Future[str], table: AccountTable) -> None:
        self._members = members
        self._lost = lost
        self._table = table
        self._joined: dict[int, object] = {}
        self._is_complete = False
        self._problem = ""
        self._is_lost = False
        # The condition guards the four attributes above.
        self._changed = threading.Condition()

    def wait(self, timeout_s: float) -> list[int]:
        """Wait for all workers; return the missing ones at the end of the wait."""
        others = range(1, len(self._members.workers))
        with self._changed:
            self._is_complete = self._changed.wait_for(lambda: len(self._joined) == len(others), timeout_s)
            self._changed.notify_all()
            return [worker for worker in others if worker not in self._joined]

    def give_up(self, problem: str) -> None:
        """End the calls that wait, with the reason."""
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def Join(self, request: pb.JoinRequest, context: Any) -> Iterator[pb.JoinReply]:  # noqa: N802
        """Keep the stream open as long as all workers are there."""
        if problem := self._refusal(request):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        worker, ticket = request.worker, object()
        # The new process of a worker may come before the end of the old one's stream.
        self._leave(worker, self._joined.get(worker))
        with self._changed:
            # A slice that was complete cannot be joined again: libtpu's client has lost the old process.
            is_late = self._is_complete
            if not is_late:
                self._joined[worker] = ticket
                self._changed.notify_all()
        if is_late:
            # The worker tries again on this status, and then reaches the new process of worker 0.
            context.abort(grpc.StatusCode.UNAVAILABLE, "worker 0 replaces its process")
        # This is false if the call has ended already: then nothing would ever call `_leave`.
        if not context.add_callback(lambda: self._leave(worker, ticket)):
            self._leave(worker, ticket)
            return
        with self._changed:
            # `SliceLink` ends this wait: it waits with a deadline for all workers.
            self._changed.wait_for(
                lambda: self._is_complete or self._problem or self._joined.get(worker) is not ticket
            )
            problem = self._problem
        if problem:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, problem)
        yield pb.JoinReply()
        # The wait for the loss keeps the stream open. `_why` recognizes the status, whose text names the
        # worker that is gone.
        context.abort(grpc.StatusCode.ABORTED, self._lost.result())

    def Exchange(self, request: pb.Account, context: Any) -> pb.Accounts:  # noqa: N802
        """Take a worker's account of its progress, and return those of all."""
        # Worker 0 uses the table directly, so a call in its name comes from somebody else.
        if not 0 < request.worker < len(self._members.workers):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"there is no worker {request.worker}")
        return pb.Accounts(accounts=self._table.exchange(request))

    def _refusal(self, request: pb.JoinRequest) -> str | None:
        wanted = write_workers(self._members.workers)
        if request.protocol != PROTOCOL:
            return f"worker {request.worker} speaks protocol {request.protocol}, worker 0 {PROTOCOL}"
        if request.workers != wanted or not 0 < request.worker < len(self._members.workers):
            return (
                f"worker {request.worker} has the list of workers {request.workers[:500]}, worker 0 {wanted}"
            )
        return None

    def _leave(self, worker: int, ticket: object) -> None:
        """Record that a stream has ended, unless another one has replaced it."""
        with self._changed:
            if ticket is None or self._joined.get(worker) is not ticket:
                return
            del self._joined[worker]
            self._changed.notify_all()
            # Several workers may leave at once, and only the first completes the future.
            if not self._is_complete or self._is_lost:
                return
            self._is_lost = True
        # This is outside of the lock, because the future then runs the callbacks of others.
        self._lost.set_result(_gone(self._members.name(worker)))


def _gone(name: str) -> str:
    return f"{name}, has ended its process or is unreachable, and a slice needs all its workers"


def _why(first: str, ended: Any) -> str:
    is_told = isinstance(ended, grpc.RpcError) and ended.code() is grpc.StatusCode.ABORTED
    return str(ended.details()) if is_told else _gone(first)


def _explained(first: str, channel: WorkerChannel, error: Any) -> PolyxlaError:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _problem(error.details(), "Start the worker of each host with the same list.")
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return _problem(error.details(), "Start the same version on all hosts, with the same list.")
    found = channel.explain(error)
    return _problem(f"{first}, cannot be joined: {found.what}", str(found.fix))


def _problem(what: str, fix: str) -> UsageError:
    return UsageError(what, where="--slice", fix=fix)


def _has_job(channel: WorkerChannel) -> bool:
    try:
        return bool(channel.status().jobs)
    except WorkerError:
        # The process of that worker is being replaced, so the link will be lost soon.
        return True
