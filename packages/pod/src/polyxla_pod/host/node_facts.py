"""What the preflight needs to know of a host that drives a TPU node: its address, and its worker."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

CONNECT_S = 2.0
"""Longest wait for a worker to accept a connection, in seconds."""


def node_facts(address: str, first: str, worker_port: int | None, is_alone: bool) -> dict[str, Any]:
    """Return what is wrong with this host's address and worker, as the ends of sentences; None if nothing is.

    Args:
        address: the name or address of this host, as the other hosts know it.
        first: that of host 0, where the hosts meet.
        worker_port: the port at which a worker must listen; None if none has to.
        is_alone: whether there is no other host.
    """
    return {
        "address": _unknown(first) or _unbindable(address, is_alone=is_alone),
        "worker": None if worker_port is None else _unconnectable(address, worker_port),
    }


def _unknown(address: str) -> str | None:
    try:
        socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"does not know the address {address}: {error.strerror}"
    return None


def _unbindable(address: str, *, is_alone: bool) -> str | None:
    """Return why this host cannot listen where the others look for it."""
    if problem := _unknown(address):
        return problem
    family, kind, number, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, kind, number) as trial:
            trial.bind(where)
    except OSError as error:
        return f"does not have the address {address}: {error.strerror}"
    if not is_alone and address != where[0] and ipaddress.ip_address(where[0]).is_loopback:
        return f"takes its name {address} for {where[0]}, where other hosts cannot reach it"
    return None


def _unconnectable(address: str, port: int) -> str | None:
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return None
