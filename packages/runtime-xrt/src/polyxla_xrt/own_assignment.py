"""The assignment of a process that no launcher started: it leases the worker's cores itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polyxla.plugin import say
from polyxla_xrt.config.assignment import Assignment
from polyxla_xrt.config.resuming import read_resuming, refuse_resuming
from polyxla_xrt.config.timeouts import job_wait_s, stall_timeout_s
from polyxla_xrt.local_service import ensure_service
from polyxla_xrt.plan import NodePlan


def lease_cores(plan: NodePlan, environ: Mapping[str, str]) -> tuple[Assignment, Callable[[], None]]:
    """Lease all cores that this host drives for this process alone; no other replicas exist.

    Returns:
        The assignment, and the function that ends the lease.

    Raises:
        PolyxlaError: the worker is not available.
    """
    # The import waits until here, because the launcher imports this module and may fork, which the threads of
    # gRPC do not survive.
    from polyxla_xrt.client.lease import Lease

    refuse_resuming(plan.configuration, environ)
    ensure_service(plan.configuration, environ, say)
    address, cores = plan.worker.address, plan.cores
    lease = Lease(
        address,
        cores,
        environ,
        wait_s=job_wait_s(environ),
        stall_timeout_s=stall_timeout_s(environ),
        resuming=read_resuming(environ),
        revive=lambda: ensure_service(plan.configuration, environ, say),
        on_wait=say,
    )
    kind = plan.configuration.kind
    _own.assignment = Assignment(address, lease.job, tuple(range(cores)), kind, 0, cores, 0, 1)
    return _own.assignment, lease.close


@dataclass
class _OwnLease:
    assignment: Assignment | None = None


_own = _OwnLease()


def leased() -> Assignment | None:
    """Return the cores that this process itself has leased; None if it has not, or a launcher did."""
    return _own.assignment
