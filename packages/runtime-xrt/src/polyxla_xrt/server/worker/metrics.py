"""The worker's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from polyxla_xrt.proto import worker_pb2 as pb

_GAUGES: dict[str, tuple[str, Callable[[pb.StatusReply], float]]] = {
    "polyxla_worker_cores": ("Cores of this worker.", lambda status: status.cores),
    "polyxla_worker_cores_held": (
        "Cores that jobs hold.",
        lambda status: sum(job.cores for job in status.jobs),
    ),
    "polyxla_worker_jobs_running": ("Jobs that hold cores.", lambda status: len(status.jobs)),
    "polyxla_worker_sessions": (
        "Processes that drive cores.",
        lambda status: sum(job.sessions for job in status.jobs),
    ),
    "polyxla_worker_jobs_waiting": ("Jobs that wait for cores.", lambda status: status.waiting),
    "polyxla_worker_array_bytes": (
        "Memory of the jobs' arrays.",
        lambda status: sum(job.memory_bytes for job in status.jobs),
    ),
    "polyxla_worker_draining": (
        "Whether the worker refuses new jobs.",
        lambda status: float(status.draining),
    ),
}


class _Collector:
    """Reads the worker's status at each scrape."""

    def __init__(self, status: Callable[[], pb.StatusReply]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        """Yield every metric."""
        status = self._status()
        for name, (text, read) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=read(status))
        yield CounterMetricFamily("polyxla_worker_jobs", "Jobs that had the cores.", value=status.jobs_served)


def start(address: str, status: Callable[[], pb.StatusReply]) -> None:
    """Serve the metrics over HTTP, on a thread.

    Args:
        address: ``host:port`` to listen on.
        status: returns the worker's status.
    """
    host, _, port = address.rpartition(":")
    # The default registry would also export the metrics of the Python process.
    registry = CollectorRegistry()
    registry.register(_Collector(status))
    start_http_server(int(port), host.strip("[]"), registry)
