"""The TPU part of discovery: which cores are here, and what one replica's process needs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import replace

from polyxla import Device, Discovery, Setting, UsageError
from polyxla_pjrt import env
from polyxla_pjrt.accelerators import AcceleratorType
from polyxla_pjrt.chips import Chip
from polyxla_pjrt.metadata import MetadataClient
from polyxla_pjrt.slices import Slice, read_slice
from polyxla_pjrt.topology import single_core_environment


def with_devices(bare: Discovery, environ: Mapping[str, str], chips: tuple[Chip, ...]) -> Discovery:
    """Complete a discovery with the cores of this host.

    Raises:
        UsageError: a TPU is asked for that is not here, or its topology cannot be read.
    """
    if not chips:
        raise UsageError(
            "no TPU chip is attached to this machine",
            fix=f"Run on a TPU VM, or set {env.PJRT_DEVICE}=CPU to train on this machine's CPU.",
        )
    if not _has_libtpu(environ):
        raise UsageError(
            "TPU chips are attached, but libtpu is not installed",
            fix="Install it: pip install 'torch_xla[tpu]==2.9.0'",
        )
    slice_ = this_slice(environ)
    variables = {**bare.variables, env.TPU_ACCELERATOR_TYPE: Setting(slice_.accelerator.name, slice_.origin)}
    return replace(
        bare,
        devices=_cores(slice_, chips),
        host_count=slice_.accelerator.hosts,
        topology=slice_.accelerator.name,
        variables=variables,
        notes=tuple(f"{name} has no effect: the metadata server is asked" for name in slice_.ignored),
    )


def core_environment(environ: Mapping[str, str], device: int) -> dict[str, str]:
    """Return the variables of a process that uses one core of this host and nothing else.

    Raises:
        UsageError: ``polyxla run`` has prepared this process for another core.
    """
    if prepared := environ.get(env.POLYXLA_PJRT_DEVICE):
        _check_same(int(prepared), device)
        return {}
    slice_ = this_slice(environ)
    # The type's own bounds: the slice's may speak of fewer chips than the host has.
    accelerator = AcceleratorType.parse(slice_.accelerator.name, slice_.origin)
    variables, local_device = single_core_environment(_core_of(slice_, device), accelerator)
    if slice_.origin == "environment":
        # torch_xla would ask the metadata server again, which had nothing to say.
        variables[env.TPU_SKIP_MDS_QUERY] = "1"
    return {
        env.PJRT_DEVICE: "TPU",
        **variables,
        env.POLYXLA_PJRT_DEVICE: str(device),
        env.POLYXLA_PJRT_LOCAL_DEVICE: str(local_device),
    }


def _core_of(slice_: Slice, device: int) -> int:
    """Return the core's number on its host: devices are counted over the visible chips only."""
    if slice_.visible_chips is None:
        return device
    chip, core = divmod(device, slice_.accelerator.threads_per_process)
    return slice_.visible_chips[chip] * slice_.accelerator.threads_per_process + core


def _check_same(prepared: int, device: int) -> None:
    if prepared != device:
        raise UsageError(
            f"this process was prepared for device {prepared}, and device {device} is asked for in the code",
            where=f"devices=[{device}]",
            fix=f"Leave devices= out of the code, or run it with polyxla run --devices '[{device}]'.",
        )


def this_slice(environ: Mapping[str, str]) -> Slice:
    """Return the slice this host belongs to.

    Raises:
        UsageError: neither the environment nor the metadata server describes it.
    """
    slice_ = read_slice(environ, _metadata(environ.get(env.GCE_METADATA_HOST)))
    if slice_ is None:
        raise UsageError(
            "TPU chips are attached, but neither the environment nor the metadata server says what they "
            "are part of",
            fix=f"Set {env.TPU_SKIP_MDS_QUERY}=1 and {env.TPU_ACCELERATOR_TYPE}=v4-8 (your type).",
        )
    return slice_


@functools.cache
def _metadata(host: str | None) -> MetadataClient:
    return MetadataClient.from_environ({env.GCE_METADATA_HOST: host} if host else {})


def _cores(slice_: Slice, chips: tuple[Chip, ...]) -> tuple[Device, ...]:
    visible = range(len(chips)) if slice_.visible_chips is None else slice_.visible_chips
    places = [(chip, core) for chip in visible for core in range(slice_.accelerator.threads_per_process)]
    return tuple(
        Device(index, "TPU", f"{slice_.accelerator.name} chip {chip} core {core}", slice_.worker_id)
        for index, (chip, core) in enumerate(places)
    )


def _has_libtpu(environ: Mapping[str, str]) -> bool:
    # The two ways torch_xla itself finds it. Source: torch_xla/__init__.py, v2.9.0.
    return bool(environ.get(env.TPU_LIBRARY_PATH)) or importlib.util.find_spec("libtpu") is not None
