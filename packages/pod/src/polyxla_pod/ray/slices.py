"""The TPU slices of a Ray cluster, from the nodes' labels and resources. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyxla import UsageError
from polyxla.plugin import AcceleratorType

SLICE_LABEL = "ray.io/tpu-slice-name"
WORKER_LABEL = "ray.io/tpu-worker-id"
TYPE_LABEL = "ray.io/tpu-pod-type"
NODE_LABEL = "ray.io/node-id"
"""Labels of nodes. Source: ``ray._raylet`` and ``ray._private.accelerators.tpu`` of Ray 2.60."""
CHIPS = "TPU"
"""The resource that counts a node's chips. Source: the same."""


@dataclass(frozen=True)
class Host:
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
        name: the TPU's name; that of a host without one is the node's id.
        type: such as ``v4-16``; empty if the nodes do not say it.
        hosts: its nodes, in the order of their worker ids.
    """

    name: str
    type: str
    hosts: tuple[Host, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.type or 'unknown type'}, {len(self.hosts)} host(s))"

    def problem(self) -> str | None:
        """Return what is missing or there twice; None for a whole slice."""
        workers = [one.worker for one in self.hosts]
        if twice := sorted({one for one in workers if workers.count(one) > 1}):
            return f"several nodes say that they are worker {', '.join(map(str, twice))}"
        if missing := sorted(set(range(max(self._host_count(), max(workers) + 1))) - set(workers)):
            return f"no node is worker {', '.join(map(str, missing))}"
        return None

    def _host_count(self) -> int:
        try:
            return AcceleratorType.parse(self.type, TYPE_LABEL).hosts
        except UsageError:
            # A type that is newer than this release, or none.
            return 1


def find_slices(nodes: Iterable[Mapping[str, Any]]) -> list[Slice]:
    """Return the slices that the living nodes of a cluster form, by name.

    Args:
        nodes: what ``ray.nodes()`` returned.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        if node["Alive"] and node["Resources"].get(CHIPS):
            found.setdefault(node["Labels"].get(SLICE_LABEL) or node["NodeID"], []).append(node)
    return [_slice(name, found[name]) for name in sorted(found)]


def choose(slices: Sequence[Slice], name: str | None, kind: str | None) -> Slice:
    """Return the only slice that has this name and this type, as far as they are given.

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
    fitting = [one for one in slices if name in (None, one.name) and kind in (None, one.type)]
    if not fitting:
        raise UsageError("the Ray cluster has no such TPU", where=where, fix=f"It has {there}.")
    if whole := [one for one in fitting if not one.problem()]:
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
    hosts = sorted(map(_host, nodes), key=lambda one: one.worker)
    return Slice(name, nodes[0]["Labels"].get(TYPE_LABEL, ""), tuple(hosts))


def _host(node: Mapping[str, Any]) -> Host:
    labels = node["Labels"]
    own = {label: labels[label] for label in (SLICE_LABEL, WORKER_LABEL) if label in labels}
    # A node that replaces one of a slice has its labels; one without labels cannot be replaced.
    chosen = own if len(own) == 2 else {NODE_LABEL: node["NodeID"]}
    address, chips = node["NodeManagerAddress"], node["Resources"][CHIPS]
    return Host(address, chips, int(labels.get(WORKER_LABEL, 0)), chosen)
