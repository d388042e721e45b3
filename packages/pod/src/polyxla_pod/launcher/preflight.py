"""The preflight: compares the hosts' facts, before anything starts. Pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyxla.plugin import BASE_PORT
from polyxla.plugin import tpu_env as env
from polyxla_pod import tpu_nodes
from polyxla_pod.job import PodJob

FREE_BYTES = 1 << 30
"""Least free space in the working and the temporary directory, in bytes."""
CLOCK_S = 5.0
"""Largest difference of a host's clock from the hosts' median, in seconds."""
CHIPS_PER_HOST = 8
"""Most chips of one host, hence ports of libtpu."""


@dataclass(frozen=True)
class HostProblem:
    """Why a host cannot take part.

    Attributes:
        host: its number; None for a host that is missing.
        text: what is wrong, and what to do.
    """

    host: int | None
    text: str


def questions(job: PodJob, host: int) -> dict[str, Any]:
    """Return what a host is asked for: the content of the message ``check``."""
    environ = job.environ_of(host)
    common = {"environ": environ, "directory": job.directory}
    if job.uses_workers:
        return {**common, "ports": _node_ports(job, host), "node": _node(job, host)}
    return {**common, "ports": ports(environ), "node": None}


def ports(environ: Mapping[str, str]) -> list[int]:
    """Return the ports that must be free on a TPU host: the launches' monitor's and libtpu's."""
    text = environ.get(env.POLYXLA_MONITOR_PORT, "")
    monitor = int(text) if text.isdecimal() else env.DEFAULT_MONITOR_PORT
    return [monitor, *range(BASE_PORT, BASE_PORT + CHIPS_PER_HOST)]


def _node_ports(job: PodJob, host: int) -> list[int]:
    """Return the ports that must be free on a host that drives a TPU node."""
    # Only host 0 serves the mesh, and only if the user has not named another address.
    is_mesh = tpu_nodes.XRT_MESH_SERVICE_ADDRESS not in job.environ and host == 0 and len(job.hosts) > 1
    return [job.worker_port] * job.starts_workers + [tpu_nodes.MESH_PORT] * is_mesh


def _node(job: PodJob, host: int) -> dict[str, Any] | None:
    if tpu_nodes.describes_workers(job.environ):
        # The user's variables have addresses of other machines, which this host cannot check.
        return None
    return {
        "address": job.addresses[host],
        "first": job.addresses[0],
        "worker_port": None if job.starts_workers else job.worker_port,
        "is_alone": len(job.hosts) == 1,
    }


def find_problems(
    facts: Sequence[Mapping[str, Any]], clock_differences_s: Sequence[float], version: str
) -> list[HostProblem]:
    """Return everything that is wrong, by host.

    Args:
        facts: what `polyxla_pod.host.facts.gather` returned on each host, by its number.
        clock_differences_s: how far each host's clock is ahead of this machine's.
        version: polyxla's version on this machine.
    """
    found = [
        *_versions(facts, version),
        *_held_chips(facts),
        *_workers(facts),
        *_nodes(facts),
        *_used_ports(facts),
        *_full_disks(facts),
        *_wrong_clocks(clock_differences_s),
    ]
    # A missing host comes first, because the others cannot train without it.
    return sorted(found, key=lambda problem: -1 if problem.host is None else problem.host)


def _versions(facts: Sequence[Mapping[str, Any]], version: str) -> list[HostProblem]:
    installed = [host_facts["versions"] for host_facts in facts]
    found = []
    for name in sorted({name for versions in installed for name in versions}):
        versions = [own.get(name) for own in installed]
        # A host must speak with this machine's polyxla; for the others, the majority is most likely right.
        usual = version if name == "polyxla-core" else Counter(versions).most_common(1)[0][0]
        others = "this machine has" if name == "polyxla-core" else "most hosts have"
        for host, own_version in enumerate(versions):
            if own_version != usual:
                has = f"has {name} {own_version}" if own_version else f"does not have {name}"
                want = f"{others} {usual}" if usual else f"{others} none"
                fix = f"Install {name}=={usual} on it" if usual else f"Uninstall {name} there"
                found.append(HostProblem(host, f"{has}, {want}. {fix}."))
    return found


def _held_chips(facts: Sequence[Mapping[str, Any]]) -> list[HostProblem]:
    fix = "End it, or wait until it has ended."
    return [
        HostProblem(host, f"the chips are in use: {holder}. {fix}")
        for host, host_facts in enumerate(facts)
        for holder in host_facts["holders"]
    ]


def _workers(facts: Sequence[Mapping[str, Any]]) -> list[HostProblem]:
    workers = [host_facts["worker"] for host_facts in facts]
    if not any(workers):
        return []
    without = "has no TPU chips, other hosts have. Leave it out of --hosts."
    found = [
        HostProblem(host, worker["error"] if worker else without)
        for host, worker in enumerate(workers)
        if not worker or "error" in worker
    ]
    if found:
        return found
    # Only complete facts can be compared.
    count, kind = workers[0]["hosts"], workers[0]["type"]
    first: dict[int, int] = {}
    for host, worker in enumerate(workers):
        if (worker["hosts"], worker["type"]) != (count, kind):
            text = f"belongs to a {worker['type']}, w0 to a {kind}. Name the hosts of one slice."
            found.append(HostProblem(host, text))
        elif (same := first.setdefault(worker["id"], host)) != host:
            text = (
                f"is worker {worker['id']} of its slice, and so is w{same}. Name each host of one slice once."
            )
            found.append(HostProblem(host, text))
    # A slice trains only as a whole: its chips wait for those of all hosts.
    missing = sorted(set(range(count)) - first.keys())
    if missing and not found:
        names = ", ".join(map(str, missing))
        text = f"the {kind} has {count} hosts, and worker {names} is missing. Add its host to --hosts."
        found.append(HostProblem(None, text))
    return found


def _used_ports(facts: Sequence[Mapping[str, Any]]) -> list[HostProblem]:
    return [
        HostProblem(
            host,
            f"port {', '.join(map(str, host_facts['used_ports']))} is in use. End what listens there: "
            f"`ss -ltnp` on the host lists it.",
        )
        for host, host_facts in enumerate(facts)
        # On a host without chips, these ports are free for others.
        if host_facts["used_ports"] and (host_facts["worker"] or host_facts["node"])
    ]


def _nodes(facts: Sequence[Mapping[str, Any]]) -> list[HostProblem]:
    found = []
    for host, host_facts in enumerate(facts):
        if not (node := host_facts["node"]):
            continue
        if tpu_nodes.DISTRIBUTION not in host_facts["versions"]:
            fix = f"Install {tpu_nodes.DISTRIBUTION} on it."
            found.append(HostProblem(host, f"does not have runtime {tpu_nodes.RUNTIME}. {fix}"))
        elif node["address"]:
            fix = "Name the hosts by addresses that all of them know, such as --hosts 10.0.0.2,10.0.0.3."
            found.append(HostProblem(host, f"{node['address']}. {fix}"))
        elif node["worker"]:
            fix = "Start one there with `polyxla worker`, or pass --workers."
            found.append(HostProblem(host, f"no worker listens at {node['worker']}. {fix}"))
    return found


def _full_disks(facts: Sequence[Mapping[str, Any]]) -> list[HostProblem]:
    need = f"{FREE_BYTES / 2**30:g} GiB"
    return [
        HostProblem(host, f"{free / 2**30:.2f} GiB are free in {directory}. Make {need} free.")
        for host, host_facts in enumerate(facts)
        for directory, free in host_facts["free_bytes"].items()
        if free < FREE_BYTES
    ]


def _wrong_clocks(differences_s: Sequence[float]) -> list[HostProblem]:
    # This machine's clock does not matter: only the hosts compare times with each other.
    median = statistics.median(differences_s)
    fix = "Synchronise it: `timedatectl set-ntp true` on the host."
    ahead_s = {host: difference_s - median for host, difference_s in enumerate(differences_s)}
    return [
        HostProblem(
            host, f"its clock is {abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} the others. {fix}"
        )
        for host, by in ahead_s.items()
        if abs(by) > CLOCK_S
    ]
