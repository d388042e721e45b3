"""The interface between a worker and the cores that it serves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from polyxla_bridge.engine.engine import Engine
from polyxla_xrt.proto import worker_pb2 as pb

OnStall = Callable[[str], None]
"""Receives the positions of all replicas if one stalls."""


@dataclass(frozen=True)
class Served:
    """What a worker serves.

    Attributes:
        cores: number of cores.
        platform: their kind.
        memory_bytes: memory of all of them together.
    """

    cores: int
    platform: str
    memory_bytes: int


class JobEngines(Protocol):
    """The cores of a worker, and the engine of each job on them. At most one job has an engine at a time.

    Attributes:
        served: the cores.
        close_s: longest wait for an engine to finish what a job left behind, in seconds; the engine is then
            given up, and with it the serving process.
        lost: completes, with the reason, if no job can use the cores any more: then this process must be
            replaced.
    """

    served: Served
    close_s: float
    lost: Future[str]

    def refusal(self, request: pb.LeaseRequest) -> str | None:
        """Return why a job cannot have the cores; None if it can."""

    def wait_until_open(self) -> None:
        """Wait until an engine can be started; opening the cores has its own deadline."""

    def start(self, request: pb.LeaseRequest, coordinator: str, on_stall: OnStall) -> Engine:
        """Start the engine of a job.

        Args:
            request: the job's request.
            coordinator: ``host:port`` of the coordinator of its replicas.
            on_stall: called if a replica stalls.
        """
