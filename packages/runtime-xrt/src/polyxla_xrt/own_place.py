"""The place of a process that no launcher has started: it holds the worker's cores itself."""

from __future__ import annotations

from collections.abc import Mapping

from polyxla.console import say
from polyxla_xrt.client.lease import Lease
from polyxla_xrt.lease_holder import stall_timeout_s, wait_s
from polyxla_xrt.local_service import ensure_service
from polyxla_xrt.place import Place
from polyxla_xrt.plan import Plan


def own_place(plan: Plan, environ: Mapping[str, str]) -> tuple[Place, Lease]:
    """Get all cores that this host drives, for this process; its replicas know of no others.

    Raises:
        PolyxlaError: the worker cannot be had.
    """
    ensure_service(plan.configuration, environ, say)
    address, cores = plan.worker.address, plan.cores
    lease = Lease(
        address,
        cores,
        environ,
        wait_s=wait_s(environ),
        stall_timeout_s=stall_timeout_s(environ),
        on_wait=say,
    )
    return Place(address, lease.job, tuple(range(cores)), plan.configuration.kind, 0, cores, 0, 1), lease
