"""The host's memory, or what its control groups leave of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux mounts control groups. Source: cgroups(7)."""
PROC = Path("/proc")
"""Where Linux lists processes."""


@dataclass(frozen=True)
class Memory:
    """The memory that processes of this host share, in bytes.

    Attributes:
        total: all of it.
        available: what new processes can use without swapping.
        is_limited: whether a control group, such as a container's, sets `total`.
    """

    total: int
    available: int
    is_limited: bool = False


def read_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> Memory | None:
    """Return this host's memory; None if the kernel does not list it.

    Args:
        proc: where the kernel lists processes.
        cgroups: where control groups are mounted.
    """
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE))
    if "MemTotal" not in found or "MemAvailable" not in found:
        return None
    memory = Memory(int(found["MemTotal"]) << 10, int(found["MemAvailable"]) << 10)
    for group in _groups(proc, cgroups):
        memory = _limited(memory, group)
    return memory


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Return the control group of this process and those around it; in a container, its own is the root."""
    found = re.search(r"^0::/(.*)$", _text(proc / "self" / "cgroup"), re.MULTILINE)
    own = cgroups / (found[1] if found else "")
    return [own, *(one for one in own.parents if one.is_relative_to(cgroups))]


def _limited(memory: Memory, group: Path) -> Memory:
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return memory
    # The kernel drops cached files before it refuses memory.
    cached = re.search(r"^inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    left = max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))
    is_less = int(limit) < memory.total
    return Memory(min(memory.total, int(limit)), min(memory.available, left), memory.is_limited or is_less)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
