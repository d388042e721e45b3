"""A replica on a core of a worker. Heavy: imported in its process, or in the fork server that makes it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch_xla.core.xla_model as xm
from torch_xla._internal import pjrt

from polyxla.plugin import (
    POLYXLA_SECRET,
    CollectiveReplication,
    Job,
    World,
    failures,
    prepare_process,
    rendezvous_alone,
    snapshot,
    use_device,
)
from polyxla_bridge.torch_xla_plugin import CACHE_COUNTERS
from polyxla_xrt import env, node
from polyxla_xrt.client.mesh import MeshClient
from polyxla_xrt.config.timeouts import stall_timeout_s
from polyxla_xrt.errors import MissingError, ParticipantLostError
from polyxla_xrt.plan import NodePlace


class NodeReplication(CollectiveReplication):
    """The replication of a TPU node: torch_xla's collectives, and rendezvous through the mesh service.

    Args:
        place: the replica's place in the plan.
        environ: the job's environment.
    """

    def __init__(self, place: NodePlace, environ: Mapping[str, str]) -> None:
        super().__init__(place.plan.configuration.kind, 0, environ)
        self.cache_counters = CACHE_COUNTERS
        self.world = place.plan.world(place.process)
        if self.world.world_size == 1:
            xm.rendezvous = rendezvous_alone

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Meet the other replicas at the mesh service; work queued on the device goes on."""
        payloads: list[bytes] = xm.rendezvous(tag, payload, list(replicas))
        return payloads


def run_replica(job: Job, place: NodePlace) -> Any:
    """Run the replica of this process and return its result.

    Args:
        job: the job.
        place: the replica's place in the plan.
    """
    # This comes first, so that a stall during the preparation can be described, too.
    failures.describe_with(node.describe)
    prepare_process(shares_gil=True)
    # The fork server may have imported torch_xla in an environment without a node.
    node.register()
    world = place.plan.world(place.process)
    pjrt.initialize_multiprocess(world.local_ordinal, world.local_world_size)
    with _rendezvous_through_mesh(world):
        use_device(0, 1)
        return job.run(place)


@contextlib.contextmanager
def _rendezvous_through_mesh(world: World) -> Iterator[None]:
    """Route ``xm.rendezvous``, and everything built on it, through the mesh service."""
    environ = snapshot()
    address = environ.get(env.XRT_MESH_SERVICE_ADDRESS)
    if world.world_size == 1 or not address:
        yield
        return
    limit_s = stall_timeout_s(environ)
    secret = environ[POLYXLA_SECRET]
    with MeshClient(address, world.ordinal, world.world_size, secret, environ=environ) as mesh:
        xm.rendezvous = functools.partial(_meet, mesh, limit_s)
        yield


def _meet(
    mesh: MeshClient, limit_s: float, tag: str, payload: bytes = b"", replicas: Sequence[int] = ()
) -> list[bytes]:
    node.enter_wait(f"rendezvous {tag!r}")
    try:
        return list(mesh.rendezvous(tag, payload, replicas or (), timeout_s=limit_s))
    except MissingError as error:
        # The launching process collects the positions of the others, which this error alone does not have.
        failures.report_stall(
            f"polyxla: a replica stalls: it waits for others at a rendezvous ({node.position()}). "
            f"{error}\n{node.describe()}"
        )
        raise
    except ParticipantLostError:
        # The launching process names the process that died with its signal, which says more than this error.
        failures.defer_to_launcher()
        raise
    finally:
        node.leave_wait()
