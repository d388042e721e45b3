"""The TPU slices of a Ray cluster, and the connection that reserves the chips of one together."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from polyxla import UsageError
from polyxla.plugin import AcceleratorType
from polyxla_pod.ray import env

SLICE_LABEL = "ray.io/tpu-slice-name"
WORKER_LABEL = "ray.io/tpu-worker-id"
TYPE_LABEL = "ray.io/tpu-pod-type"
NODE_LABEL = "ray.io/node-id"
"""Labels of nodes. Source: ``ray._raylet`` and ``ray._private.accelerators.tpu`` of Ray 2.60."""
CHIPS = "TPU"
"""The resource that counts a node's chips. Source: the same."""
CONNECT_S = 15.0
"""Longest wait for the cluster's answer, in seconds. Ray itself waits for minutes."""
REACH_S = 5.0
"""Longest wait for a connection to the address, in seconds."""
RESERVE_S = 15.0
"""Longest wait for the chips, in seconds."""


@dataclass(frozen=True)
class SliceHost:
    """A node with TPU chips.

    Attributes:
        address: the node's address.
        chips: how many chips it has, as Ray counts them.
        worker: its number in the slice.
        labels: the labels that only this node has, and a node that takes its place.
    """

    address: str
    chips: float
    worker: int
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Slice:
    """A TPU slice.

    Attributes:
        name: the TPU's name; if the nodes do not have one, the node's id.
        type: such as ``v4-16``; empty if the nodes do not say it.
        hosts: its nodes, in the order of their worker ids.
    """

    name: str
    type: str
    hosts: tuple[SliceHost, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.type or 'unknown type'}, {len(self.hosts)} host(s))"

    def problem(self) -> str | None:
        """Return which nodes are missing or duplicated; None for a whole slice."""
        workers = [host.worker for host in self.hosts]
        if twice := sorted({worker for worker in workers if workers.count(worker) > 1}):
            return f"several nodes say that they are worker {', '.join(map(str, twice))}"
        if missing := sorted(set(range(max(self._host_count(), max(workers) + 1))) - set(workers)):
            return f"no node is worker {', '.join(map(str, missing))}"
        return None

    def _host_count(self) -> int:
        try:
            return AcceleratorType.parse(self.type, TYPE_LABEL).hosts
        except UsageError:
            # The nodes name no type, or one that is newer than this release.
            return 1


def find_slices(nodes: Iterable[Mapping[str, Any]]) -> list[Slice]:
    """Return the slices that the living nodes of a cluster form, by name.

    Args:
        nodes: what ``ray.nodes()`` returned.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        # Ray also lists the nodes that have left the cluster.
        if node["Alive"] and node["Resources"].get(CHIPS):
            found.setdefault(node["Labels"].get(SLICE_LABEL) or node["NodeID"], []).append(node)
    return [_slice(name, found[name]) for name in sorted(found)]


def choose(slices: Sequence[Slice], name: str | None, kind: str | None) -> Slice:
    """Return the only slice with this name and this type; None allows any.

    Raises:
        UsageError: there is none, there are several, or the only one is not whole.
    """
    asked = [f"--tpu {name}"] * bool(name) + [f"type={kind}"] * bool(kind)
    where = " ".join(asked) or "the Ray cluster"
    there = "; ".join(map(str, slices))
    if not slices:
        raise UsageError(
            "no node of the Ray cluster has TPU chips",
            where=where,
            fix="Add the TPU hosts to the cluster: `ray status` must list the resource TPU.",
        )
    fitting = [found for found in slices if name in (None, found.name) and kind in (None, found.type)]
    if not fitting:
        raise UsageError("the Ray cluster has no such TPU", where=where, fix=f"It has {there}.")
    # An incomplete slice counts only if no other fits; the error then says what is missing.
    if whole := [found for found in fitting if not found.problem()]:
        fitting = whole
    if len(fitting) > 1:
        fix = f"Name one with --tpu NAME: {'; '.join(map(str, fitting))}."
        raise UsageError(f"the Ray cluster has {len(fitting)} such TPUs", where=where, fix=fix)
    if problem := fitting[0].problem():
        raise UsageError(
            f"the slice {fitting[0]} is not whole: {problem}",
            where=where,
            fix="Start Ray on its other hosts: `ray status` must list the chips of all of them.",
        )
    return fitting[0]


def _slice(name: str, nodes: Sequence[Mapping[str, Any]]) -> Slice:
    hosts = sorted(map(_host, nodes), key=lambda host: host.worker)
    return Slice(name, nodes[0]["Labels"].get(TYPE_LABEL, ""), tuple(hosts))


def _host(node: Mapping[str, Any]) -> SliceHost:
    labels = node["Labels"]
    own = {label: labels[label] for label in (SLICE_LABEL, WORKER_LABEL) if label in labels}
    # A replacement in a slice gets the same labels, so they are preferred to the node's id.
    chosen = own if len(own) == 2 else {NODE_LABEL: node["NodeID"]}
    address, chips = node["NodeManagerAddress"], node["Resources"][CHIPS]
    return SliceHost(address, chips, int(labels.get(WORKER_LABEL, 0)), chosen)


def connect(address: str | None, environ: Mapping[str, str]) -> None:
    """Connect this process to a cluster, unless the program has done so.

    Args:
        address: as for ``ray.init``; None for the environment's, or else this machine's cluster.
        environ: this process's environment.

    Raises:
        UsageError: there is no cluster, or it does not answer.
    """
    import ray

    if ray.is_initialized():
        return
    where = f"address={address}" if address else f"{env.RAY_ADDRESS}={environ.get(env.RAY_ADDRESS, '')}"
    chosen = address or environ.get(env.RAY_ADDRESS) or "auto"
    if problem := _unreachable(chosen) or _init(chosen):
        raise UsageError(
            f"there is no Ray cluster: {problem}",
            where=where,
            fix=f"Set {env.RAY_ADDRESS} to the head's address, such as 10.0.0.1:6379 or ray://10.0.0.1:10001.",
        )


def reserve(slice_: Slice) -> Any:
    """Return a placement group of all chips of a slice, a bundle for each host in the order of the hosts.

    Raises:
        UsageError: another job holds chips of it.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(
        [{CHIPS: host.chips} for host in slice_.hosts],
        # STRICT_SPREAD puts each bundle on a node of its own: a host is a node.
        strategy="STRICT_SPREAD",
        bundle_label_selector=[dict(host.labels) for host in slice_.hosts],
    )
    is_given = False
    try:
        is_given = group.wait(RESERVE_S)
    finally:
        # A group that waits would take the chips later, also for a driver that was interrupted.
        if not is_given:
            remove_placement_group(group)
    if not is_given:
        raise UsageError(
            f"Ray did not give all chips of {slice_} within {RESERVE_S:g} s: other jobs hold some",
            where="the Ray cluster",
            fix="End those jobs, or wait for them, or for a node that was just lost: see `ray status`.",
        )
    return group


def _unreachable(address: str) -> str | None:
    """Return why nothing answers at the address, if it has a host and a port."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        if not parts.hostname or not parts.port:
            return None
        # A quick check first: Ray retries an address without a listener for minutes.
        socket.create_connection((parts.hostname, parts.port), REACH_S).close()
    except (OSError, ValueError) as error:
        return f"{address} cannot be reached: {error}"
    return None


def _init(address: str) -> str | None:
    """Connect; return why that is not possible. The thread of a cluster that hangs is left behind."""
    import ray

    problems: list[str | None] = []

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            problems.append(None)
        except Exception as error:
            problems.append(str(error).partition("\n")[0])

    # `ray.init` has no deadline of its own, and waits for minutes.
    thread = threading.Thread(target=init, name="polyxla-ray-init", daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return problems[0] if problems else f"{address} did not answer within {CONNECT_S:g} s"
