"""What this machine offers through PJRT, found out without importing torch or touching a device.

A TPU is seen by its PCI ids, its topology in the environment or at the metadata server; torch_xla is
asked nothing, because its first answer starts the runtime.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from polyxla import Claim, Device, Discovery, Setting, UsageError
from polyxla.env import POLYXLA_DEVICES, from_environ
from polyxla.plugins.device_request import pick_devices
from polyxla_pjrt import env, torchrun
from polyxla_pjrt.layout import PREPARED, Plan, cpu_layout, require_bridge, tpu_layout
from polyxla_pjrt.tpu import plan as tpu
from polyxla_pjrt.tpu.accelerators import AcceleratorType
from polyxla_pjrt.tpu.chips import PCI_ROOT, Chip, attached_chips
from polyxla_pjrt.tpu.versions import RIGHT_PAIR, versions_problem

KINDS = ("CPU", "TPU")
"""The device types this runtime drives."""


def discover(environ: Mapping[str, str], accelerator: str, pci_root: Path = PCI_ROOT) -> Discovery:
    """Say what a launch from here could use.

    Args:
        environ: the environment to judge by.
        accelerator: ``"auto"``, or the kind of device that is insisted on.
        pci_root: where the kernel lists PCI devices.
    """
    chips = attached_chips(pci_root)
    claim, reason, kind = _claim(environ, accelerator, chips)
    bare = Discovery(claim, reason, kind, variables=_variables(environ))
    try:
        _check(environ, accelerator, kind)
        if emulated := emulated_type(environ):
            return _emulate(bare, emulated)
        if kind == "TPU":
            return tpu.with_devices(bare, environ, chips)
        # Unless a number was fixed, as many can be had as are asked for.
        return replace(bare, devices=_cpus(environ), growable=not environ.get(env.CPU_NUM_DEVICES))
    except UsageError as error:
        return replace(bare, kind="", unavailable=error.what, fix=error.fix)


def replica_environment(
    environ: Mapping[str, str], discovery: Discovery, devices: tuple[int, ...]
) -> dict[str, str]:
    """Return what is laid over the environment of a job; `Plan.each` adds what is each process's own.

    Raises:
        UsageError: these TPU cores cannot be used together, or several replicas need the bridge.
    """
    if plan := plan_for(environ, discovery.kind, devices):
        return plan.whole(os.cpu_count() or 1)
    if discovery.kind == "TPU":
        return tpu.core_environment(environ, devices[0])
    return {env.PJRT_DEVICE: "CPU", env.POLYXLA_PJRT_LOCAL_DEVICE: str(devices[0])}


def plan_for(environ: Mapping[str, str], kind: str, devices: tuple[int, ...]) -> Plan | None:
    """Return where several replicas are to be; None where torch_xla's own client has one.

    Raises:
        UsageError: they cannot be laid out so, or the bridge is not installed.
    """
    emulated = emulated_type(environ)
    if emulated is None and kind == "TPU":
        return tpu.plan(environ, devices) if len(devices) > 1 else None
    started = torchrun.process_count(environ)
    if emulated is None and len(devices) == 1 and started in (None, 1):
        return None
    require_bridge(len(devices))
    layout = tpu_layout(emulated, devices) if emulated else cpu_layout(len(devices), environ, started)
    plan = Plan("TPU" if emulated else "CPU", layout, emulated)
    torchrun.check(plan, environ)
    return plan


def asked_devices(environ: Mapping[str, str], found: Discovery) -> tuple[int, ...]:
    """Return the devices that the environment alone asks for.

    Raises:
        DevicesError: they are not there.
    """
    return pick_devices(from_environ(environ).devices, "pjrt", found.devices, found.growable)


def asked_plan(environ: Mapping[str, str]) -> Plan | None:
    """Return what the environment alone asks for, as `plan_for` does.

    Raises:
        UsageError: it asks for what cannot be.
    """
    found = discover(environ, "auto")
    if found.unavailable:
        raise UsageError(found.unavailable, fix=found.fix)
    return plan_for(environ, found.kind, asked_devices(environ, found))


def asked_kind(environ: Mapping[str, str]) -> str:
    """Return what ``PJRT_DEVICE`` asks for; `polyxla run` may have prepared the process for the bridge."""
    kind = environ.get(env.PJRT_DEVICE, "")
    return {prepared: plain for plain, prepared in PREPARED.items()}.get(kind, kind)


def emulated_type(environ: Mapping[str, str]) -> AcceleratorType | None:
    """Return the type of TPU that is to be emulated, if any.

    Raises:
        UsageError: there is no such type.
    """
    text = environ.get(env.POLYXLA_EMULATE)
    return AcceleratorType.parse(text, f"{env.POLYXLA_EMULATE}={text}") if text else None


def _emulate(bare: Discovery, accelerator: AcceleratorType) -> Discovery:
    cores = range(accelerator.devices)
    return replace(
        bare,
        devices=tuple(Device(i, "TPU", f"emulated core {i} of a {accelerator.name}") for i in cores),
        host_count=accelerator.hosts,
        topology=accelerator.name,
    )


def _claim(environ: Mapping[str, str], accelerator: str, chips: tuple[Chip, ...]) -> tuple[Claim, str, str]:
    if text := environ.get(env.POLYXLA_EMULATE):
        return Claim.EXPLICIT, f"{env.POLYXLA_EMULATE}={text}", "TPU"
    if kind := asked_kind(environ):
        return Claim.EXPLICIT, f"{env.PJRT_DEVICE}={kind}", kind
    if chips and accelerator in ("auto", "tpu"):
        return Claim.ATTACHED, f"{len(chips)} TPU chip(s) attached", "TPU"
    if accelerator == "auto":
        why = "no TPU is attached and no variable says otherwise"
        return Claim.FALLBACK, f"the CPU, because {why}; {env.PJRT_DEVICE}=CPU is the same", "CPU"
    return Claim.FALLBACK, f"accelerator={accelerator!r}", accelerator.upper()


def _check(environ: Mapping[str, str], accelerator: str, kind: str) -> None:
    if kind not in KINDS:
        asked = (
            f"{env.PJRT_DEVICE}={kind}" if environ.get(env.PJRT_DEVICE) else f"accelerator={accelerator!r}"
        )
        raise UsageError(
            f"{asked} is not a device that runtime 'pjrt' can drive",
            fix=f"Write {env.PJRT_DEVICE}=CPU or {env.PJRT_DEVICE}=TPU.",
        )
    if accelerator not in ("auto", kind.lower()):
        raise UsageError(
            f"accelerator={accelerator!r} and {env.PJRT_DEVICE}={kind} contradict each other",
            fix=f"Leave accelerator out, or set {env.PJRT_DEVICE}={accelerator.upper()}.",
        )
    if environ.get(env.POLYXLA_EMULATE) and asked_kind(environ) not in ("", "TPU"):
        raise UsageError(
            f"{env.POLYXLA_EMULATE}={environ[env.POLYXLA_EMULATE]} and "
            f"{env.PJRT_DEVICE}={environ[env.PJRT_DEVICE]} contradict each other",
            fix=f"Unset {env.PJRT_DEVICE}: an emulated TPU needs none.",
        )
    if problem := versions_problem():
        raise UsageError(problem, fix=f"Install a pair that fits: {RIGHT_PAIR}")


def _cpus(environ: Mapping[str, str]) -> tuple[Device, ...]:
    text = environ.get(env.CPU_NUM_DEVICES, str(torchrun.process_count(environ) or 1))
    # torch_xla reads a wrong number as zero devices and says nothing.
    count = int(text) if text.isascii() and text.isdecimal() else 0
    if count < 1:
        raise UsageError(
            f"{env.CPU_NUM_DEVICES}={text} is not a whole number from 1",
            fix=f"Write {env.CPU_NUM_DEVICES}=1, or unset it.",
        )
    return tuple(Device(index, "CPU", f"CPU device {index} of torch_xla") for index in range(count))


def _variables(environ: Mapping[str, str]) -> dict[str, Setting]:
    return {
        name: Setting(environ.get(name), "environment" if name in environ else "default") for name in env.READ
    }


def prepared_plan(environ: Mapping[str, str]) -> Plan | None:
    """Return the plan of a plain torch_xla program in this environment; None where torch_xla decides."""
    kind = environ.get(env.PJRT_DEVICE)
    # torch_xla itself launches on all of a host's TPU cores, but knows nothing of a part of them.
    some_cores = kind == "TPU" and environ.get(POLYXLA_DEVICES, "auto") != "auto"
    return asked_plan(environ) if kind in PREPARED.values() or some_cores else None
