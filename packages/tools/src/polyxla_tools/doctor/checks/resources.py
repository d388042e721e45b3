"""Shared memory, disk space, and memory for the replicas and their loader workers."""

from __future__ import annotations

from polyxla_tools.doctor.facts.host import HostFacts, Space
from polyxla_tools.doctor.findings import Finding, counted, note, ok, problem

SHARED_BYTES = 128 << 20
"""Least shared memory for the workers of a DataLoader, in bytes.

Docker gives a container 64 MiB, which a few batches of pictures fill; a worker then dies of a bus error.
Source: the documentation of ``docker run --shm-size`` for the 64 MiB.
"""
FREE_BYTES = 1 << 30
"""Least free space of a disk, in bytes; polyxla-pod requires the same of its hosts."""
REPLICA_BYTES = 640 << 20
"""Memory of a replica before its model, in bytes, where no trial has measured it.

Source: 631 MiB at most, by trials with torch_xla 2.9.0 on the CPU.
"""
WORKER_BYTES = 256 << 20
"""Memory of a loader worker with its batches, in bytes, before its dataset.

Source: 105 MB with torch 2.9.1, its share of libraries included, and as much again for batches.
"""


def check_system(host: HostFacts) -> list[Finding]:
    """List the operating system, and check that there is a working directory."""
    found = [ok("system", f"{host.system}; {counted(host.cores, 'core')}")]
    if host.is_lost:
        text = "it has been deleted: nothing can be launched from it"
        found.append(problem("working directory", text, "Change to a directory that exists."))
    return found


def check_shared_memory(host: HostFacts) -> list[Finding]:
    """Check that loader workers have shared memory for their batches."""
    space = host.shared_memory
    if space is None or not space.total:
        fix = "In a container, mount a tmpfs there: --tmpfs /dev/shm."
        return [problem("shared memory", "this machine has no /dev/shm, which loader workers need", fix)]
    found = f"{_size(space.free)} of {_size(space.total)} are free at {space.paths[0]}"
    if space.free >= SHARED_BYTES:
        return [ok("shared memory", found)]
    need = f"at least {_size(SHARED_BYTES)} are needed: a loader worker dies of a bus error"
    fix = f"Remove what fills {space.paths[0]}, or start the container with --shm-size=8g or --ipc=host."
    return [problem("shared memory", f"{found}; {need}", fix)]


def check_disks(host: HostFacts) -> list[Finding]:
    """Check that there is space for checkpoints, compiled programs and temporary files."""
    full = [one for one in host.disks if one.free < FREE_BYTES]
    if full:
        return [problem("disk", _free(one), f"Make {_size(FREE_BYTES)} free.") for one in full]
    return [ok("disk", "; ".join(_free(one) for one in host.disks))]


def _free(space: Space) -> str:
    return f"{_size(space.free)} are free at {' and '.join(space.paths)}"


def check_memory(
    host: HostFacts, replicas: int, loader_workers: int, replica_bytes: int = REPLICA_BYTES
) -> list[Finding]:
    """Compare the memory with what replicas and loader workers take before model and data.

    Args:
        host: this machine.
        replicas: how many replicas a launch starts on this host.
        loader_workers: how many workers the DataLoader of each replica has.
        replica_bytes: memory of one replica, in bytes.
    """
    if host.memory is None:
        return [note("memory", "the kernel does not say how much memory there is")]
    need = replicas * (replica_bytes + loader_workers * WORKER_BYTES)
    limit = ", the limit of this container" if host.memory.is_limited else ""
    found = f"{_size(host.memory.available)} of {_size(host.memory.total)} are available{limit}"
    who = f"{counted(replicas, 'replica')} with {counted(loader_workers, 'loader worker')} each"
    what = f"{_size(need)} before model and data for {who}"
    if need <= host.memory.available:
        return [ok("memory", f"{found}; {what}")]
    fix = "Use fewer workers (num_workers of the DataLoader), or a machine with more memory."
    return [problem("memory", f"{found}, too little: {what}", fix)]


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 1 << 30 else f"{number / 2**20:.0f} MiB"
