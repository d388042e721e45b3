"""This machine: system, memory, space, and the files that a TPU's programs need."""

from __future__ import annotations

import contextlib
import grp
import os
import platform
import pwd
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyxla.plugin import (
    DEV,
    LOCK_FILE,
    PCI_ROOT,
    POLYXLA_COMPILE_CACHE,
    AttachedChip,
    Holder,
    attached_chips,
    find_holders,
)

CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux mounts control groups. Source: cgroups(7)."""
PROC = Path("/proc")
"""Where Linux lists processes."""
SHM = Path("/dev/shm")  # noqa: S108
"""Where the workers of a DataLoader put batches. Source: ``shm_open`` of glibc."""
TPU_LOGS = Path("/tmp/tpu_logs")  # noqa: S108
"""Where libtpu writes its log, unless ``TPU_LOG_DIR`` names another directory. Source: libtpu 0.0.21."""
NVIDIA = Path("/proc/driver/nvidia")
"""Source: README.txt of NVIDIA's driver for Linux, chapter "The /proc file system interface"."""


@dataclass(frozen=True)
class HostMemory:
    """The memory that processes of this host share, in bytes.

    Attributes:
        total: all of it.
        available: what new processes can use without swapping.
        is_limited: whether a control group, such as a container's, sets `total`.
    """

    total: int
    available: int
    is_limited: bool = False


def read_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory | None:
    """Return this host's memory; None if the kernel does not list it.

    Args:
        proc: where the kernel lists processes.
        cgroups: where control groups are mounted.
    """
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE))
    if "MemTotal" not in found or "MemAvailable" not in found:
        return None
    memory = HostMemory(int(found["MemTotal"]) << 10, int(found["MemAvailable"]) << 10)
    for version in (_V2, _V1):
        for group in _groups(proc, cgroups, version):
            memory = _limited(memory, group, version)
    return memory


@dataclass(frozen=True)
class _Cgroups:
    """A version of the kernel's control groups.

    Attributes:
        line: a pattern of the process's line in ``/proc/self/cgroup``.
        mounted: where the groups with limits of memory are, below the mount point of all.
        limit: the file with a group's limit, in bytes.
        used: the file with what it uses, in bytes.
        cached: the number of ``memory.stat`` with the files that the kernel drops first, in bytes.
    """

    line: str
    mounted: str
    limit: str
    used: str
    cached: str


_V2 = _Cgroups(r"^0::/(.*)$", "", "memory.max", "memory.current", "inactive_file")
_V1 = _Cgroups(
    r"^\d+:(?:[\w,]+,)?memory(?:,[\w,]+)?:/(.*)$",
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def _groups(proc: Path, cgroups: Path, version: _Cgroups) -> list[Path]:
    """Return the control group of this process and its parents: each of them may have a limit."""
    root = cgroups / version.mounted
    # In a container, the mounted root is the process's own group.
    found = re.search(version.line, _text(proc / "self" / "cgroup"), re.MULTILINE)
    own = root / (found[1] if found else "")
    return [own, *(group for group in own.parents if group.is_relative_to(root))]


def _limited(memory: HostMemory, group: Path, version: _Cgroups) -> HostMemory:
    limit, used = _text(group / version.limit).strip(), _text(group / version.used).strip()
    # Without a limit, the file contains `max`, or more than any machine has; the root group may have none.
    if not limit.isdecimal() or not used.isdecimal():
        return memory
    # The kernel drops cached files before it refuses memory, so they count as free.
    cached = re.search(rf"^{version.cached} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    left = max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))
    is_less = int(limit) < memory.total
    return HostMemory(
        min(memory.total, int(limit)), min(memory.available, left), memory.is_limited or is_less
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class HostPaths:
    """Where to look.

    Attributes:
        pci_root: where the kernel lists PCI devices.
        dev: where device files are.
        lock_file: libtpu's lock file.
        tpu_logs: the directory of libtpu's logs.
        nvidia: where NVIDIA's driver lists its GPUs.
        shm: the file system of shared memory.
        disks: directories whose free space matters.
    """

    pci_root: Path = PCI_ROOT
    dev: Path = DEV
    lock_file: Path = LOCK_FILE
    tpu_logs: Path = TPU_LOGS
    nvidia: Path = NVIDIA
    shm: Path = SHM
    disks: tuple[Path, ...] = ()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> HostPaths:
        """Return the places of this machine; some are named by variables."""
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyxla"
        named = environ.get(POLYXLA_COMPILE_CACHE, "on")
        # A training writes to the working directory, the temporary directory and the cache of programs.
        disks = [*_working_directory(), _temporary_directory(environ)]
        if named not in ("off", ""):
            disks.append(cache if named == "on" else Path(named))
        logs = environ.get("TPU_LOG_DIR")
        return cls(tpu_logs=Path(logs) if logs and logs != "disabled" else TPU_LOGS, disks=tuple(disks))


@dataclass(frozen=True)
class Access:
    """A file or directory, and whether this user may use it.

    Attributes:
        path: its path.
        owner: its user and group, such as ``root:root``.
        mode: its permissions, such as ``0o660``.
        is_usable: whether this user may read and write it.
    """

    path: str
    owner: str
    mode: str
    is_usable: bool


@dataclass(frozen=True)
class Space:
    """The space of a file system, in bytes.

    Attributes:
        paths: directories of it.
        total: its size.
        free: what this user may still write.
    """

    paths: tuple[str, ...]
    total: int
    free: int


@dataclass(frozen=True)
class HostFacts:
    """This machine.

    Attributes:
        system: the operating system with its C library.
        user: the name of the user that runs this process.
        cores: the number of CPU cores that this process may use.
        memory: the host's memory; None if the kernel does not say.
        chips: the attached TPU chips.
        device_files: the files of TPU chips.
        holders: the processes that have chips open.
        lock_file: libtpu's lock file; None if there is none.
        tpu_logs: the directory of libtpu's logs; None if there is none.
        gpus: the models of the NVIDIA GPUs.
        nvidia_driver: the version of NVIDIA's driver; empty if there is none.
        shared_memory: the file system of shared memory; None if there is none.
        disks: the file systems that a training writes to.
        is_lost: whether the working directory has been deleted.
    """

    system: str
    user: str
    cores: int
    memory: HostMemory | None
    chips: tuple[AttachedChip, ...]
    device_files: tuple[Access, ...]
    holders: tuple[Holder, ...]
    lock_file: Access | None
    tpu_logs: Access | None
    gpus: tuple[str, ...]
    nvidia_driver: str
    shared_memory: Space | None
    disks: tuple[Space, ...]
    is_lost: bool = False


def gather_host(places: HostPaths) -> HostFacts:
    """Look at this machine; never raises for what is missing or forbidden."""
    return HostFacts(
        system=_system(),
        user=_user(os.geteuid()),
        cores=len(os.sched_getaffinity(0)),
        memory=read_memory(),
        chips=attached_chips(places.pci_root),
        device_files=_device_files(places.dev),
        holders=find_holders(dev=places.dev, lock_file=places.lock_file),
        lock_file=_access(places.lock_file),
        tpu_logs=_access(places.tpu_logs),
        gpus=tuple(
            _found(r"Model:\s*(.+)", path) for path in sorted(places.nvidia.glob("gpus/*/information"))
        ),
        nvidia_driver=_found(r"Module.*?\s(\d+\.[\d.]+)\s", places.nvidia / "version"),
        shared_memory=_space(places.shm),
        disks=_disks(places.disks),
        is_lost=not _working_directory(),
    )


def _working_directory() -> list[Path]:
    """Return the working directory, if it exists."""
    try:
        return [Path.cwd()]
    except FileNotFoundError:
        return []


def _temporary_directory(environ: Mapping[str, str]) -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        # Python writes a file to each candidate, and raises if all file systems are full.
        return Path(environ.get("TMPDIR") or "/tmp")  # noqa: S108


def _system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        name = "Linux"
    return f"{name}, kernel {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}"


def _device_files(dev: Path) -> tuple[Access, ...]:
    # Older drivers of TPUs make accel files, newer ones use vfio.
    patterns = ("accel[0-9]*", "accel/accel[0-9]*", "vfio/*")
    paths: Sequence[Path] = [path for pattern in patterns for path in sorted(dev.glob(pattern))]
    return tuple(file for path in paths if (file := _access(path)))


def _found(pattern: str, path: Path) -> str:
    """Return what a pattern captures in a file; empty if it is not there."""
    try:
        match = re.search(pattern, path.read_text())
    except OSError:
        return ""
    return match[1].strip() if match else ""


def _access(path: Path) -> Access | None:
    try:
        status = path.stat()
    except OSError:
        return None
    owner = f"{_user(status.st_uid)}:{_group(status.st_gid)}"
    # Directories also need execute permission. Effective ids decide what the kernel allows.
    how = os.R_OK | os.W_OK | (os.X_OK if path.is_dir() else 0)
    # `os.access` asks the kernel: ACLs and capabilities count, which the mode alone does not show.
    return Access(str(path), owner, oct(status.st_mode & 0o777), os.access(path, how, effective_ids=True))


def _disks(paths: Sequence[Path]) -> tuple[Space, ...]:
    """Return the file systems of directories, or of their nearest parents that exist."""
    # Directories on one file system share its space, so it is listed and checked once.
    found: dict[int, list[Path]] = {}
    for path in paths:
        for parent in (path, *path.parents, Path("/")):
            # What another user has closed is as good as not there.
            with contextlib.suppress(OSError):
                same = found.setdefault(parent.stat().st_dev, [])
                if parent not in same:
                    same.append(parent)
                break
    spaces = ((_space(same[0]), same) for same in found.values())
    return tuple(replace(space, paths=tuple(map(str, same))) for space, same in spaces if space)


def _space(path: Path) -> Space | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space((str(path),), usage.total, usage.free)


def _user(uid: int) -> str:
    try:
        # A container often runs under a number that its /etc/passwd does not list.
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
