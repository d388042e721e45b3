"""A complete runtime without XLA: replicas are threads of this process, every device is torch's CPU.

The threads exchange real tensors in its collectives, so code that uses `polyxla.Replica` can be tested with
several replicas at little cost.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyxla import UsageError, hookimpl
from polyxla.plugin import (
    Claim,
    Device,
    Discovery,
    ReduceOp,
    Replication,
    Setting,
    World,
    run_processes,
    temporary_environ,
)

if TYPE_CHECKING:
    import torch

    from polyxla.plugin import Job

FAKE_DEVICES = "FAKE_DEVICES"
"""Number of devices of the fake runtime; setting it also chooses that runtime.
Default: 1.
"""

FAKE_NUMBERING = "FAKE_NUMBERING"
"""Ordinals of the replicas in the order in which they are started, host by host, such as ``0,1,4,5;2,3,6,7``:
libtpu numbers replicas by their chips' coordinates. The launch is that of host `FAKE_HOST`: all replicas run,
and it returns the results of that host's.
Default: in the order in which they are started, on one host.
"""

FAKE_HOST = "FAKE_HOST"
"""Number of the host that launches, with `FAKE_NUMBERING`.
Default: 0.
"""

MEETING_TIMEOUT_S = 30.0
"""Longest wait in a collective, in seconds: a test in which a replica is missing must not hang."""


class FakeRuntime:
    """The runtime's plugin; its entry point is ``polyxla_testing.fake:runtime``."""

    @hookimpl
    def polyxla_discover_devices(self, environ: Mapping[str, str]) -> Discovery:
        """Return `FAKE_DEVICES` devices."""
        text = environ.get(FAKE_DEVICES)
        count = int(text or 1) if (text or "1").isdecimal() else 0
        return Discovery(
            claim=Claim.EXPLICIT if text else Claim.NONE,
            reason=f"{FAKE_DEVICES}={text}" if text else f"{FAKE_DEVICES} is not set",
            kind="FAKE",
            devices=tuple(Device(index, "FAKE", f"fake device {index}") for index in range(count)),
            unavailable=None if count else f"{FAKE_DEVICES}={text} is not a number from 1",
            fix=f"Write {FAKE_DEVICES}=1.",
            variables={FAKE_DEVICES: Setting(text, "environment" if text else "default")},
        )

    @hookimpl
    def polyxla_environment(self, devices: tuple[int, ...]) -> dict[str, str]:
        """Return the variable that names the job's devices."""
        return {"FAKE_VISIBLE_DEVICES": ",".join(map(str, devices))}

    @hookimpl
    def polyxla_launch(self, job: Job) -> list[Any]:
        """Run one thread per device, or one process if `start_method` requires a process."""
        if job.process_method is None:
            with temporary_environ(job.environ):
                return _run_threads(job)
        if len(job.devices) > 1:
            raise UsageError(
                "the fake runtime starts a process for a single replica only",
                where="start_method",
                fix="Write devices=1.",
            )
        place = _Place(World(), _Meeting(1))
        return run_processes(job, [place], [job.environ], method=job.process_method)

    @hookimpl
    def polyxla_replication(self, place: _Place) -> Replication:
        """Connect one thread."""
        return _FakeReplication(place)


runtime = FakeRuntime()


class _Meeting:
    """The rendezvous of the replicas of one job."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: dict[tuple[int, ...], tuple[threading.Barrier, dict[int, Any]]] = {}
        self._lock = threading.Lock()
        self._is_aborted = False

    def __reduce__(self) -> tuple[object, ...]:
        # Locks cannot be pickled. Only a job of one replica is sent to a process, so nobody else meets here.
        return (_Meeting, (self.size,))

    def exchange(self, ordinal: int, value: Any, members: Sequence[int] = ()) -> list[Any]:
        """Wait for all members; return their values in ordinal order."""
        who = tuple(sorted(members)) or tuple(range(self.size))
        with self._lock:
            # Under the lock, so that `abort` misses no barrier that is made at the same time.
            barrier, values = self._slots.setdefault(who, (threading.Barrier(len(who)), {}))
            if self._is_aborted:
                barrier.abort()
        values[ordinal] = value
        barrier.wait(MEETING_TIMEOUT_S)
        gathered = [values[member] for member in who]
        # A second wait: no member may write the next exchange's value before all have read this one's.
        barrier.wait(MEETING_TIMEOUT_S)
        return gathered

    def abort(self) -> None:
        """Make every member that waits, or will wait, fail at once."""
        with self._lock:
            self._is_aborted = True
            for barrier, _ in self._slots.values():
                barrier.abort()


class _Place:
    def __init__(self, world: World, meeting: _Meeting) -> None:
        self.world, self.meeting = world, meeting


def _worlds(job: Job) -> list[World]:
    """Return the replicas' places in the world, in the order in which they are started."""
    size = len(job.devices)
    text = job.environ.get(FAKE_NUMBERING) or ",".join(map(str, range(size)))
    hosts = [[int(ordinal) for ordinal in host.split(",")] for host in text.split(";")]
    return [
        World(size, ordinal, local, len(ordinals), index, len(hosts), index, len(hosts))
        for index, ordinals in enumerate(hosts)
        for local, ordinal in enumerate(ordinals)
    ]


def _run_threads(job: Job) -> list[Any]:
    meeting = _Meeting(len(job.devices))
    results: dict[World, Any] = {}
    failures: list[BaseException] = []

    def replica(world: World) -> None:
        try:
            results[world] = job.run(_Place(world, meeting))
        except BaseException as error:
            # This includes SystemExit: the other replicas must not wait for one that has ended.
            failures.append(error)
            meeting.abort()

    worlds = _worlds(job)
    threads = [threading.Thread(target=replica, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        # The first failure is the cause; the others follow from the aborted meeting.
        raise failures[0]
    host = int(job.environ.get(FAKE_HOST) or 0)
    return [results[world] for world in worlds if world.host_index == host]


class _FakeReplication(Replication):
    kind = "FAKE"

    def __init__(self, place: _Place) -> None:
        # Imported here, because discovery must not cost the time.
        import torch

        self.device = torch.device("cpu")
        self.world = place.world
        self._meeting = place.meeting
        # Its own, because replicas are threads and share torch's generator.
        self._generator = torch.Generator()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        result: torch.Tensor = _REDUCE[op](self.all_gather(tensor))
        return result

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        # Cloned, because the others may read it after this replica has gone on and changed it.
        return self._meeting.exchange(self.world.ordinal, tensor.clone())

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(self.all_reduce(tensor, "mean"))

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        tagged = self._meeting.exchange(self.world.ordinal, (tag, payload), replicas)
        # Replicas that meet at different places would otherwise exchange values that do not belong together.
        if {other for other, _ in tagged} != {tag}:
            raise RuntimeError(f"replicas met under different tags: {[other for other, _ in tagged]}")
        return [other for _, other in tagged]

    def sync(self, wait: bool = False) -> None:
        pass

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def rng_state(self) -> int:
        return self._generator.initial_seed()

    def report(self) -> str:
        return f"fake runtime: replica {self.world.ordinal} of {self.world.world_size}"

    def close(self) -> None:
        pass


def _fold(function: Callable[[Any, Any], Any]) -> Callable[[list[torch.Tensor]], Any]:
    return lambda tensors: functools.reduce(function, tensors)


def _smaller(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return value.minimum(other)


def _larger(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return value.maximum(other)


_REDUCE: Mapping[ReduceOp, Callable[[list[torch.Tensor]], Any]] = {
    "sum": _fold(operator.add),
    "mean": lambda tensors: functools.reduce(operator.add, tensors) / len(tensors),
    "min": _fold(_smaller),
    "max": _fold(_larger),
    "mul": _fold(operator.mul),
    "and": _fold(operator.and_),
    "or": _fold(operator.or_),
}
