"""Chips found by PCI ids, in a directory tree like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyxla.tpu.chips import AttachedChip, attached_chips


def add(root: Path, address: str, **files: str) -> Path:
    """Make a PCI device the way Linux does: a link to a directory of one-line files."""
    target = root.parent / "devices" / address
    target.mkdir(parents=True)
    for name, text in files.items():
        (target / name).write_text(f"{text}\n")
    root.mkdir(exist_ok=True)
    (root / address).symlink_to(target)
    return target


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "bus"
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("device", "subsystem", "generation"),
    [
        ("0x0027", "0x004e", "v2"),
        ("0x0027", "0x004f", "v3"),
        ("0x0027", "0x0001", None),
        ("0x0056", "0x0000", None),
        ("0x005e", "0x0000", "v4"),
        ("0x0062", "0x0000", "v5p"),
        ("0x0063", "0x0000", "v5e"),
        ("0x006f", "0x0000", "v6e"),
        ("0x006F", "0x0000", "v6e"),
        ("0x0076", "0x0000", "v7x"),
    ],
)
def test_pci_ids_identify_the_generation(
    root: Path, device: str, subsystem: str, generation: str | None
) -> None:
    add(root, "0000:00:04.0", vendor="0x1ae0", device=device, subsystem_device=subsystem)
    assert attached_chips(root) == (AttachedChip(generation, "0000:00:04.0"),)


def test_only_tpus_are_listed_in_the_order_of_their_addresses(root: Path) -> None:
    add(root, "0000:00:06.0", vendor="0x1ae0", device="0x005e")
    add(root, "0000:00:05.0", vendor="0x1ae0", device="0x005e")
    add(root, "0000:00:03.0", vendor="0x1ae0", device="0x0042")
    add(root, "0000:00:02.0", vendor="0x10de", device="0x005e")
    assert attached_chips(root) == (AttachedChip("v4", "0000:00:05.0"), AttachedChip("v4", "0000:00:06.0"))


def test_a_v2_or_v3_without_a_subsystem_id_is_listed(root: Path) -> None:
    add(root, "0000:00:04.0", vendor="0x1ae0", device="0x0027")
    assert attached_chips(root) == (AttachedChip(None, "0000:00:04.0"),)


def test_without_a_pci_list_there_are_no_chips(tmp_path: Path) -> None:
    assert attached_chips(tmp_path / "missing") == ()
    (tmp_path / "file").write_text("")
    assert attached_chips(tmp_path / "file") == ()


def test_devices_that_vanish_or_cannot_be_read_are_skipped(root: Path) -> None:
    add(root, "0000:00:01.0", vendor="0x1ae0")
    add(root, "0000:00:02.0", device="0x005e")
    (add(root, "0000:00:03.0", vendor="0x1ae0") / "device").mkdir()
    (add(root, "0000:00:04.0") / "vendor").write_bytes(b"\xff\xfe\x00")
    (root / "0000:00:05.0").symlink_to(root / "gone")
    (root / "0000:00:06.0").symlink_to(root / "0000:00:06.0")
    add(root, "0000:00:07.0", vendor="0x1ae0", device="0x0063")
    assert attached_chips(root) == (AttachedChip("v5e", "0000:00:07.0"),)
