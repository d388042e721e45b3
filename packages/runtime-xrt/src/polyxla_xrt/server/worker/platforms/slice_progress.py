"""How the workers of a slice tell each other what a job's replicas do, so that each notices a stall."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from polyxla_bridge.engine.plugin_engine.device_progress import DeviceProgress
from polyxla_xrt.proto import worker_pb2 as pb

Exchange = Callable[[pb.Account], Sequence[pb.Account]]
"""Publishes a worker's account and returns those of all workers that take part in the same job."""


class AccountTable:
    """The accounts of all workers in the running job, kept by worker 0. Any thread may use it."""

    def __init__(self) -> None:
        self._job = ""
        self._accounts: dict[int, pb.Account] = {}
        self._lock = threading.Lock()

    def begin(self, job: str) -> None:
        """Forget the last job: an account of it that comes late must not count in this one."""
        with self._lock:
            self._job = job
            self._accounts.clear()

    def exchange(self, account: pb.Account) -> list[pb.Account]:
        """Take a worker's account, and return all; none if it is of another job."""
        with self._lock:
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
        own.retired.extend(self._retired.copy())
        found = {account.worker: account for account in self._exchange(own)}
        self._known |= found
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
