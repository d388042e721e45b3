"""The TPU cores of this host: for discovery, and for a process that uses one of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace

from polyxla import UsageError
from polyxla.plugin import (
    FOR_TORCH_XLA,
    AcceleratorType,
    AttachedChip,
    Discovery,
    EmulatedTpu,
    Setting,
    TpuSlice,
    cores,
    host_core,
    single_core_environment,
    skip_metadata,
    tpu_env,
)
from polyxla.plugin import (
    this_slice as described_slice,
)
from polyxla_pjrt import env

_GIVEN_TO_PROCESSES = (
    tpu_env.TPU_PROCESS_BOUNDS,
    tpu_env.TPU_CHIPS_PER_PROCESS_BOUNDS,
    tpu_env.TPU_VISIBLE_CHIPS,
    tpu_env.CLOUD_TPU_TASK_ID,
)


def with_devices(bare: Discovery, environ: Mapping[str, str], chips: tuple[AttachedChip, ...]) -> Discovery:
    """Complete a discovery with the cores of this host.

    Raises:
        UsageError: no TPU is attached, libtpu is missing or does not fit torch_xla, or the slice's topology
            cannot be read.
    """
    if not chips:
        raise no_chip()
    emulated = EmulatedTpu.read(environ)
    if emulated:
        emulated.require_library(environ)
    else:
        _check_libtpu(environ)
    tpu_slice = this_slice(environ)
    prepared = environ.get(env.POLYXLA_PJRT_DEVICE)
    variables = {
        **bare.variables,
        tpu_env.TPU_ACCELERATOR_TYPE: Setting(tpu_slice.accelerator.name, tpu_slice.origin),
    }
    return replace(
        bare,
        devices=tuple(one for one in cores(tpu_slice, chips, emulated) if prepared in (None, str(one.index))),
        host_count=tpu_slice.accelerator.hosts,
        topology=tpu_slice.accelerator.name,
        variables=variables,
        notes=tuple(f"{name} has no effect: the metadata server is asked" for name in tpu_slice.ignored),
    )


def no_chip(where: str | None = None) -> UsageError:
    """Return the error for a TPU that is asked for on a machine without chips."""
    return UsageError(
        "no TPU chip is attached to this machine",
        where=where,
        fix=f"Run on a TPU VM, set {tpu_env.POLYXLA_EMULATE}=v5e-8 to emulate a TPU, or set "
        f"{env.PJRT_DEVICE}=CPU to train on this machine's CPU.",
    )


def _check_libtpu(environ: Mapping[str, str]) -> None:
    if not _has_libtpu(environ):
        raise UsageError("TPU chips are attached, but libtpu is not installed", fix=FOR_TORCH_XLA.fix)
    if problem := FOR_TORCH_XLA.problem(environ):
        raise UsageError(problem, fix=FOR_TORCH_XLA.fix)


def core_environment(environ: Mapping[str, str], device: int) -> dict[str, str]:
    """Return the variables of a process that uses one core of this host and no other.

    Raises:
        UsageError: ``polyxla run`` has prepared this process for another core.
    """
    if prepared := environ.get(env.POLYXLA_PJRT_DEVICE):
        _check_same(int(prepared), device)
        return {}
    tpu_slice, emulated = this_slice(environ), EmulatedTpu.read(environ)
    # The default bounds of the type: the slice's own may have fewer chips than the host.
    accelerator = AcceleratorType.parse(tpu_slice.accelerator.name, tpu_slice.origin)
    variables, local_device = single_core_environment(host_core(tpu_slice, device), accelerator)
    return {
        env.PJRT_DEVICE: "TPU",
        **variables,
        **skip_metadata(tpu_slice),
        **(emulated.library_environment(emulated.devices(environ)) if emulated else {}),
        env.POLYXLA_PJRT_DEVICE: str(device),
        env.POLYXLA_PJRT_LOCAL_DEVICE: str(local_device),
    }


def this_slice(environ: Mapping[str, str]) -> TpuSlice:
    """Return the slice that this host belongs to, also in a process that a launch has prepared.

    Raises:
        UsageError: neither the environment nor the metadata server describes it.
    """
    if is_prepared(environ):
        # These variables describe the process's part of the host.
        environ = {name: value for name, value in environ.items() if name not in _GIVEN_TO_PROCESSES}
    return described_slice(environ)


def is_prepared(environ: Mapping[str, str]) -> bool:
    """Return whether a launch has prepared this process for some of the host's chips."""
    return env.PJRT_LOCAL_PROCESS_COUNT in environ or env.POLYXLA_PJRT_DEVICE in environ


def _check_same(prepared: int, device: int) -> None:
    if prepared != device:
        raise UsageError(
            f"this process was prepared for device {prepared}, but the code requests device {device}",
            where=f"devices=[{device}]",
            fix=f"Leave devices= out of the code, or run it with polyxla run --devices '[{device}]'.",
        )


def _has_libtpu(environ: Mapping[str, str]) -> bool:
    # torch_xla itself looks in these two places. Source: torch_xla/__init__.py, v2.9.0.
    return bool(environ.get(tpu_env.TPU_LIBRARY_PATH)) or importlib.util.find_spec("libtpu") is not None
