"""Device discovery, without importing torch or touching a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from polyxla import UsageError
from polyxla.plugin import (
    PCI_ROOT,
    Claim,
    Device,
    Discovery,
    EmulatedTpu,
    Setting,
    attached_chips,
    check_device_variables,
    cores,
    from_environ,
    host_chips,
    pick_devices,
    pip_install,
    torchrun,
    tpu_env,
)
from polyxla_torchtpu import env
from polyxla_torchtpu.plan import TorchTpuPlan, host_slice, plan_for

PJRT_DEVICE = "PJRT_DEVICE"
"""torch_xla's variable, which TorchTPU does not read."""
NAME = "torchtpu"
"""The runtime's name."""


def discover(environ: Mapping[str, str], accelerator: str, pci_root: Path = PCI_ROOT) -> Discovery:
    """Return what a launch on this machine can use.

    Args:
        environ: the environment to read.
        accelerator: ``"auto"``, or the required kind of device.
        pci_root: the directory where the kernel lists PCI devices.
    """
    claim, reason, kind = _claim(environ, accelerator, pci_root)
    bare = Discovery(claim, reason, kind, variables=_variables(environ), notes=_notes(environ))
    try:
        _check_frameworks()
        return _with_chips(bare, environ, pci_root) if kind == "TPU" else _with_cpu(bare, environ, kind)
    except UsageError as error:
        return replace(bare, kind="", unavailable=error.what, fix=error.fix)


def requested_plan(environ: Mapping[str, str]) -> TorchTpuPlan:
    """Return the plan that the environment requests.

    Raises:
        UsageError: the environment requests something that cannot run.
    """
    found = discover(environ, "auto")
    found.check()
    devices = pick_devices(from_environ(environ).devices, NAME, found.devices, found.growable)
    return plan_for(environ, found.kind, devices)


def _claim(environ: Mapping[str, str], accelerator: str, pci_root: Path) -> tuple[Claim, str, str]:
    if text := environ.get(tpu_env.POLYXLA_EMULATE):
        return Claim.EXPLICIT, f"{tpu_env.POLYXLA_EMULATE}={text}", "TPU"
    # A variable that describes a topology claims more than chips do, but it does not make chips.
    chips = attached_chips(pci_root)
    # The first two variables describe a topology; the others say how its processes meet.
    described = next((name for name in env.READ[:2] if environ.get(name)), None)
    if described and chips and accelerator in ("auto", "tpu"):
        return Claim.CONFIGURED, f"{described}={environ[described]}", "TPU"
    if chips and accelerator in ("auto", "tpu"):
        return Claim.ATTACHED, f"{len(chips)} TPU chip(s) attached", "TPU"
    if described:
        return Claim.CONFIGURED, f"{described}={environ[described]}", "CPU"
    if accelerator == "auto":
        why = f"no TPU is attached and {tpu_env.POLYXLA_EMULATE} is not set"
        return Claim.FALLBACK, f"emulated devices on the CPU, because {why}", "CPU"
    return Claim.FALLBACK, f"accelerator={accelerator!r}", accelerator.upper()


def _check_frameworks() -> None:
    if importlib.util.find_spec("torch_xla"):
        raise UsageError(
            "torch_xla and torch_tpu are installed in one environment, and need different releases of torch",
            fix="Make an environment for each: pip uninstall torch_xla here.",
        )


def _notes(environ: Mapping[str, str]) -> tuple[str, ...]:
    if value := environ.get(PJRT_DEVICE):
        return (f"{PJRT_DEVICE}={value} chooses torch_xla's devices, which TorchTPU does not read: unset it",)
    return ()


def _with_chips(bare: Discovery, environ: Mapping[str, str], pci_root: Path) -> Discovery:
    emulated = EmulatedTpu.read(environ)
    chips = host_chips(environ, pci_root)
    if not chips:
        raise UsageError(
            "no TPU chip is attached to this machine",
            fix=f"Run on a TPU VM, or set {tpu_env.POLYXLA_EMULATE}=v5e-8 to emulate one.",
        )
    if emulated:
        emulated.require_library(environ)
    tpu_slice = host_slice(environ)
    return replace(
        bare,
        devices=cores(tpu_slice, chips, emulated),
        host_count=tpu_slice.host_count,
        topology=tpu_slice.topology,
    )


def _with_cpu(bare: Discovery, environ: Mapping[str, str], kind: str) -> Discovery:
    if kind != "CPU":
        raise UsageError(
            f"accelerator={kind.lower()!r} is not a device that runtime {NAME!r} can drive",
            fix="Write accelerator='tpu' or accelerator='cpu', or leave it out.",
        )
    if importlib.util.find_spec("polyxla_bridge") is None:
        raise UsageError(
            "no TPU is attached, and emulated devices on the CPU need polyxla-bridge, which is not installed",
            fix=f"Install it: {pip_install('polyxla-bridge')}",
        )
    check_device_variables(environ)
    # Under torchrun each process is a replica with a device of its own.
    count = torchrun.process_count(environ) or 1
    devices = tuple(Device(index, "CPU", f"emulated device {index} on the CPU") for index in range(count))
    return replace(bare, devices=devices, growable=True)


def _variables(environ: Mapping[str, str]) -> dict[str, Setting]:
    names = (*env.READ, tpu_env.POLYXLA_EMULATE, tpu_env.POLYXLA_EMULATE_HOST)
    return {
        name: Setting(environ.get(name), "environment" if name in environ else "default") for name in names
    }
