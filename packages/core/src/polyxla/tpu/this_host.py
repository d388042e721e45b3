"""The TPU that this host belongs to, and its cores."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from polyxla.contracts.discovery import Device
from polyxla.errors import UsageError
from polyxla.tpu import env
from polyxla.tpu.chips import PCI_ROOT, AttachedChip, attached_chips
from polyxla.tpu.emulated import EmulatedTpu
from polyxla.tpu.metadata import MetadataClient
from polyxla.tpu.slices import TpuSlice, read_slice


def host_chips(environ: Mapping[str, str], pci_root: Path = PCI_ROOT) -> tuple[AttachedChip, ...]:
    """Return the TPU chips of this host, which may be an emulated one.

    Args:
        environ: with the TPU to emulate, if there is one.
        pci_root: sysfs's directory of PCI devices, for tests.

    Raises:
        UsageError: there is no such TPU to emulate.
    """
    emulated = EmulatedTpu.read(environ)
    return emulated.chips if emulated else attached_chips(pci_root)


def this_slice(environ: Mapping[str, str]) -> TpuSlice:
    """Return the slice that this host belongs to.

    Args:
        environ: without the variables that a launch gives to processes: they describe a part of the host.

    Raises:
        UsageError: neither the environment nor the metadata server describes it.
    """
    if emulated := EmulatedTpu.read(environ):
        environ = emulated.describe(environ)
    tpu_slice = read_slice(environ, _metadata(environ.get(env.GCE_METADATA_HOST)))
    if tpu_slice is None:
        raise UsageError(
            "TPU chips are attached, but neither the environment nor the metadata server says which slice "
            "they belong to",
            fix=f"Set {env.TPU_SKIP_MDS_QUERY}=1 and {env.TPU_ACCELERATOR_TYPE}=v4-8 (your type).",
        )
    return tpu_slice


def cores(
    tpu_slice: TpuSlice, chips: tuple[AttachedChip, ...], emulated: EmulatedTpu | None
) -> tuple[Device, ...]:
    """Return the cores that one launch can use: this host's, or those of all hosts that it emulates."""
    visible = range(len(chips)) if tpu_slice.visible_chips is None else tpu_slice.visible_chips
    hosts = emulated.hosts_here if emulated else 1
    kind = f"emulated {tpu_slice.accelerator.name}" if emulated else tpu_slice.accelerator.name
    places = [
        (host, chip, core)
        for host in range(tpu_slice.worker_id, tpu_slice.worker_id + hosts)
        for chip in visible
        for core in range(tpu_slice.accelerator.threads_per_process)
    ]
    return tuple(
        Device(index, "TPU", f"{kind} chip {chip} core {core}", host)
        for index, (host, chip, core) in enumerate(places)
    )


def host_core(tpu_slice: TpuSlice, device: int) -> int:
    """Return a device's core number on its host: devices count only the visible chips."""
    if tpu_slice.visible_chips is None:
        return device
    chip, core = divmod(device, tpu_slice.accelerator.threads_per_process)
    return tpu_slice.visible_chips[chip] * tpu_slice.accelerator.threads_per_process + core


def skip_metadata(tpu_slice: TpuSlice) -> dict[str, str]:
    """Return the variable that stops torch_xla from asking a metadata server that had no answer before."""
    return {env.TPU_SKIP_MDS_QUERY: "1"} if tpu_slice.origin == "environment" else {}


@functools.cache
def _metadata(host: str | None) -> MetadataClient:
    return MetadataClient.from_environ({env.GCE_METADATA_HOST: host} if host else {})
