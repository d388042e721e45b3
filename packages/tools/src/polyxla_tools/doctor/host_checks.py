"""Checks of this machine: its chips, the PJRT plugin, shared memory, disks, and memory for replicas."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from polyxla.plugin import POLYXLA_PJRT_PLUGIN, Holder
from polyxla_tools.doctor.findings import Finding, counted, note, ok, problem
from polyxla_tools.doctor.host import Access, HostFacts, Space

LIBTPU, CUDA = "libtpu", "cuda"
"""Names of plugins. Source: ``polyxla_bridge.pjrt_plugin``, which need not be installed to look for them."""
_SUBJECT = "plugin"
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


def check_chips(host: HostFacts) -> list[Finding]:
    """Check that the chips that the kernel lists can be opened."""
    if not host.chips:
        return [ok("chips", "no TPU chip is attached")]
    kinds = ", ".join(sorted({chip.generation or "unknown generation" for chip in host.chips}))
    found = f"{counted(len(host.chips), 'TPU chip')} attached ({kinds})"
    # The kernel lists PCI devices in a container, too, but the device files must be passed to it.
    if not host.device_files:
        fix = "In a container, pass --privileged, or each chip with --device; else install the TPU's driver."
        return [problem("chips", f"{found}, and /dev has no file of one", fix)]
    shut = [file for file in host.device_files if not file.is_usable]
    return [_shut(file, host.user) for file in shut] or [ok("chips", f"{found}, which {host.user} may open")]


def _shut(file: Access, user: str) -> Finding:
    group = file.owner.partition(":")[2]
    found = f"{user} may not open {file.path} (mode {file.mode}, owner {file.owner})"
    fix = f"Add the user to its group (sudo usermod -aG {group} {user}), or run as root."
    return problem("chips", found, fix)


def check_holders(host: HostFacts) -> list[Finding]:
    """Check that no process has the chips: a second one fails, or waits."""
    return [
        problem(
            "holders",
            f"the TPU is in use: {short(holder)}",
            f"Wait until it ends, or end it: kill {holder.pid}.",
        )
        for holder in host.holders
    ]


def short(holder: Holder) -> str:
    """Describe a holder by program and first argument; later arguments may be secret."""
    program = " ".join(holder.command.split()[:2])
    return f"process {holder.pid} ({program}) has {', '.join(holder.files)} open"


def check_libtpu_files(host: HostFacts) -> list[Finding]:
    """Check that this user may write libtpu's lock file and logs, which another user may have made."""
    found = []
    # Without chips, libtpu only compiles, for `polyxla fits`, and needs neither file.
    make = problem if host.chips else note
    if host.lock_file and not host.lock_file.is_usable:
        text = f"{host.user} may not write {host.lock_file.path} (owner {host.lock_file.owner})"
        fix = f"If no program uses the TPU: sudo rm {host.lock_file.path}."
        found.append(make("libtpu", f"{text}; libtpu then reports that the TPU is in use", fix))
    if host.tpu_logs and not host.tpu_logs.is_usable:
        text = f"{host.user} may not write {host.tpu_logs.path} (owner {host.tpu_logs.owner})"
        fix = "Set TPU_LOG_DIR to a directory of yours."
        found.append(note("libtpu", f"{text}; libtpu prints an error for each line of its log", fix))
    return found


def check_plugin(environ: Mapping[str, str], host: HostFacts) -> list[Finding]:
    """Check that the plugin that the environment names can be opened; nothing if it names none."""
    named = environ.get(POLYXLA_PJRT_PLUGIN)
    where = f"{POLYXLA_PJRT_PLUGIN}={named}"
    if not named:
        return []
    # Loading a plugin takes the GPU or the TPU, so this only looks for its file.
    if importlib.util.find_spec("polyxla_bridge") is None:
        return [problem(_SUBJECT, f"{where} needs polyxla-bridge, which is not installed", "Install it.")]
    if named == CUDA:
        return [_check_gpus(where, host)]
    if named != LIBTPU and not Path(named).is_file():
        fix = f"Write the path of a PJRT plugin's library, {CUDA} or {LIBTPU}."
        return [problem(_SUBJECT, f"{where} is not a file", fix)]
    return [ok(_SUBJECT, where)]


def _check_gpus(where: str, host: HostFacts) -> Finding:
    from polyxla_bridge import pjrt_plugin

    library = pjrt_plugin.cuda_library()
    if library is None:
        fix = f"Install it: pip install {pjrt_plugin.CUDA_PACKAGE!r}"
        return problem(_SUBJECT, f"{where}, and XLA's plugin for NVIDIA GPUs is not installed", fix)
    if not host.gpus:
        fix = "Install NVIDIA's driver; in a container, pass --gpus all."
        return problem(_SUBJECT, f"{where}, and NVIDIA's driver lists no GPU", fix)
    kinds = ", ".join(sorted(set(host.gpus)))
    gpus = f"{counted(len(host.gpus), 'GPU')} ({kinds}), driver {host.nvidia_driver}"
    return ok(_SUBJECT, f"{where}: {library.parent.name}, {gpus}")


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
    full = [space for space in host.disks if space.free < FREE_BYTES]
    if full:
        return [problem("disk", _free(space), f"Make {_size(FREE_BYTES)} free.") for space in full]
    return [ok("disk", "; ".join(_free(space) for space in host.disks))]


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
    # A trial measures the replica; nothing can measure the workers of a DataLoader that does not exist yet.
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
