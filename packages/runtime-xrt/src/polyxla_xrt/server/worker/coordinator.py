"""The address at which the replicas of a job on CPU cores meet."""

from __future__ import annotations

import socket
from contextlib import closing

from polyxla.plugin import LOCALHOST
from polyxla_xrt.config.addresses import join_address
from polyxla_xrt.proto import worker_pb2 as pb


def coordinator_address(request: pb.LeaseRequest) -> str:
    """Return the coordinator of a job's replicas, ``host:port``: the one in the request, or a free port here.

    The first worker of a job chooses it, and the request to the others contains it.

    Raises:
        ValueError: the requested address is not ``host:port``.
        OSError: the requested host is not an address of this machine.
        TypeError: the requested host contains a null character.
    """
    if request.coordinator:
        host, _, port = request.coordinator.rpartition(":")
        if not (host and port.isdecimal() and host.isprintable()):
            raise ValueError("the coordinator is not host:port")
        return request.coordinator
    host = request.host if request.workers > 1 else LOCALHOST
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as probe:
        probe.bind((host, 0))
        return join_address(host, probe.getsockname()[1])
