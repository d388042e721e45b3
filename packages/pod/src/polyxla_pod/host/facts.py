"""What the preflight needs to know of a host. Nothing is opened for writing, started or changed."""

from __future__ import annotations

import contextlib
import ipaddress
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from polyxla import UsageError
from polyxla.plugin import EmulatedTpu, attached_chips, find_holders, this_slice
from polyxla.plugin import tpu_env as env
from polyxla_pod.tpu_nodes import DISTRIBUTION as NODE_DISTRIBUTION

DISTRIBUTIONS = ("polyxla-core", NODE_DISTRIBUTION, "torch", "torch_xla", "torch_tpu", "libtpu")
"""Distributions that must have the same versions on all hosts."""
_ANY = IPv4Address(0)
_LISTENS = "0A"
"""A listening socket's state in ``/proc/net/tcp``. Source: ``include/net/tcp_states.h`` of Linux."""
WORKER_CONNECT_S = 2.0
"""Longest wait for a worker to accept a connection, in seconds."""


def gather(
    environ: Mapping[str, str],
    directory: str | None,
    ports: Collection[int],
    node: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the facts of this host as JSON-compatible values.

    Blocks for as long as the metadata server takes, at most about 2 s, and only if there are chips.

    Args:
        environ: the command's environment.
        directory: the command's working directory; None for this process's.
        ports: which ports must be free.
        node: the arguments of `node_facts` if the command drives TPU nodes; None if it drives chips.
    """
    return {
        "versions": {name: found for name in DISTRIBUTIONS if (found := _version(name))},
        "holders": [str(holder) for holder in find_holders()],
        "worker": None if node else _worker(environ),
        "node": node_facts(**node) if node else None,
        "used_ports": sorted(_listening(_own_address(environ)) & set(ports)),
        "free_bytes": _free_bytes([directory or str(Path.cwd()), tempfile.gettempdir()]),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _worker(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return this host's place in its slice; None if it has no chips."""
    if not attached_chips() and not environ.get(env.POLYXLA_EMULATE):
        return None
    try:
        emulated = EmulatedTpu.read(environ)
        if emulated and emulated.host is None:
            # Without a host's number, one launch emulates all hosts of the slice on this machine.
            return None
        found = this_slice(environ)
    except UsageError as error:
        return {"error": str(error)}
    return {"id": found.host_index, "hosts": found.host_count, "type": found.topology}


def _own_address(environ: Mapping[str, str]) -> IPv4Address | None:
    """Return the address of an emulated host; None if all of this machine's addresses are the host's."""
    number = environ.get(env.POLYXLA_EMULATE_HOST, "")
    names = environ.get(env.TPU_WORKER_HOSTNAMES, "").split(",")
    try:
        # The hosts count through the slices, and the names are those of the own slice.
        return IPv4Address(names[int(number) % len(names)])
    except (ValueError, IndexError):
        return None


def _listening(address: IPv4Address | None) -> set[int]:
    """Return the ports on which something listens: at any address, or so that `address` has them."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            _, *rows = Path("/proc/net", table).read_text().splitlines()
        except OSError:
            continue
        cells = [row.split() for row in rows]
        for at, port in (cell[1].split(":") for cell in cells if cell[3] == _LISTENS):
            # The kernel writes an address as words of 32 bits in the machine's byte order. The last word is
            # the IPv4 address, also in an IPv6 address that maps one.
            own = IPv4Address(int.from_bytes(bytes.fromhex(at[-8:]), sys.byteorder))
            if address is None or own in (address, _ANY):
                found.add(int(port, 16))
    return found


def _free_bytes(directories: Collection[str]) -> dict[str, int]:
    """Return the free space at each directory, or at its nearest parent that exists."""
    found = {}
    for directory in directories:
        path = Path(directory)
        for parent in (path, *path.parents, Path("/")):
            # What another user has closed is as good as not there.
            with contextlib.suppress(OSError):
                found[directory] = shutil.disk_usage(parent).free
                break
    return found


def node_facts(address: str, first: str, worker_port: int | None, is_alone: bool) -> dict[str, Any]:
    """Return what is wrong with this host's address and worker, as the ends of sentences; None if nothing is.

    Args:
        address: the name or address of this host, as the other hosts know it.
        first: the address of host 0, where the hosts meet.
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
    # Binding is the test: only the kernel knows which addresses are this host's.
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
        socket.create_connection((address, port), WORKER_CONNECT_S).close()
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return None
