"""The TPU chips attached to this host, found by their PCI ids.

Only the kernel's list is read. Opening a device or calling libtpu would take the chips away from the
processes that are going to use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PCI_ROOT = Path("/sys/bus/pci/devices")
"""Where Linux lists PCI devices: a directory for each, named by its address."""

GOOGLE = "0x1ae0"
"""Google's PCI vendor id; its network cards and disks have the same. Source: torch_xla 2.9.0."""

GENERATION_BY_DEVICE: dict[str, str | None] = {
    "0x0027": None,
    "0x0056": None,
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
"""Generation by PCI device id. v2 and v3 share 0x0027; 0x0056 has no public name.

Source: ``torch_xla._internal.tpu`` of torch_xla 2.9.0, where 0x0062 is only a test id; as v5p it is in
    ``jax._src.hardware_utils`` of JAX and in ``tpu_info.device`` of tpu-info.
"""

_GENERATION_BY_SUBSYSTEM = {"0x004e": "v2", "0x004f": "v3"}
"""v2 and v3 by PCI subsystem device id. Source: ``tpu_info.device`` of tpu-info."""


@dataclass(frozen=True)
class AttachedChip:
    """A TPU chip attached to this host.

    Attributes:
        generation: such as ``v4``; None where the ids do not show it.
        pci_address: such as ``0000:00:05.0``.
    """

    generation: str | None
    pci_address: str


def attached_chips(pci_root: Path = PCI_ROOT) -> tuple[AttachedChip, ...]:
    """List the attached TPU chips by PCI address.

    Never raises: a missing list, and a device that vanishes or cannot be read, count as no chip.

    Args:
        pci_root: the directory where the kernel lists PCI devices.
    """
    # A container may have no such directory.
    try:
        addresses = sorted(entry.name for entry in pci_root.iterdir())
    except OSError:
        return ()
    found = (_chip(pci_root / address) for address in addresses)
    return tuple(chip for chip in found if chip is not None)


def may_have_chips(pci_root: Path = PCI_ROOT, dev: Path = Path("/dev")) -> bool:
    """Return whether libtpu may find a chip here, if only of a generation that is not known yet.

    Args:
        pci_root: the directory where the kernel lists PCI devices.
        dev: the directory of device files.

    Source: ``tpu_info.device`` of tpu-info, for the files by which libtpu opens chips.
    """
    return bool(attached_chips(pci_root)) or any(dev.glob("accel*")) or any(dev.glob("vfio/[0-9]*"))


def _chip(directory: Path) -> AttachedChip | None:
    if _read(directory / "vendor") != GOOGLE:
        return None
    device = _read(directory / "device")
    # Google's network cards and disks have the same vendor.
    if device not in GENERATION_BY_DEVICE:
        return None
    generation = GENERATION_BY_DEVICE[device]
    if device == "0x0027":
        # v2 and v3 differ in the subsystem only.
        generation = _GENERATION_BY_SUBSYSTEM.get(_read(directory / "subsystem_device"))
    return AttachedChip(generation, directory.name)


def _read(path: Path) -> str:
    # The device may have been removed since it was listed.
    try:
        return path.read_text(encoding="ascii", errors="replace").strip().lower()
    except OSError:
        return ""
