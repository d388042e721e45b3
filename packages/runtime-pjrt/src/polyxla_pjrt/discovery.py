"""Device discovery, without importing torch or touching a device.

PCI ids show attached TPU chips; the environment or the metadata server describes their topology. torch_xla is
not asked, because its first answer starts the runtime.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from polyxla import UsageError
from polyxla.plugin import (
    FOR_TORCH_XLA,
    PCI_ROOT,
    POLYXLA_DEVICES,
    POLYXLA_EMULATE_NUMERICS,
    AttachedChip,
    Claim,
    Device,
    Discovery,
    EmulatedTpu,
    Setting,
    attached_chips,
    cores,
    from_environ,
    host_chips,
    import_problem,
    pick_devices,
    torchrun,
    tpu_env,
)
from polyxla_pjrt import env
from polyxla_pjrt.plan import BRIDGED_CPU, PjrtPlan, plan_for, this_slice

KINDS = ("CPU", "TPU")
"""The device types this runtime drives."""


def discover(environ: Mapping[str, str], accelerator: str, pci_root: Path = PCI_ROOT) -> Discovery:
    """Return what a launch on this machine can use.

    Args:
        environ: the environment to read.
        accelerator: ``"auto"``, or the required kind of device.
        pci_root: the directory where the kernel lists PCI devices.
    """
    claim, reason, kind = _claim(environ, accelerator, pci_root)
    # Without devices, the report still has the claim: a request that fails must not fall to another runtime.
    bare = Discovery(claim, reason, kind, variables=_variables(environ))
    try:
        _check_request(environ, accelerator, kind)
        if kind == "TPU":
            return with_chips(bare, environ, host_chips(environ, pci_root))
        # Without a fixed number, a launch gets as many devices as it requests.
        return replace(bare, devices=_cpus(environ), growable=not environ.get(env.CPU_NUM_DEVICES))
    except UsageError as error:
        return replace(bare, kind="", unavailable=error.what, fix=error.fix)


def requested_devices(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the devices that the environment requests.

    Raises:
        UsageError: they do not exist, or the environment is wrong.
    """
    return requested(environ)[1]


def requested_plan(environ: Mapping[str, str]) -> PjrtPlan | None:
    """Return the plan that the environment requests; None as in `plan_for`.

    Raises:
        UsageError: the environment requests something that cannot run.
    """
    found, devices = requested(environ)
    return plan_for(environ, found.kind, devices)


def requested(environ: Mapping[str, str]) -> tuple[Discovery, tuple[int, ...]]:
    """Return what is here, and the devices of it that the environment requests.

    Raises:
        UsageError: they do not exist, or the environment is wrong.
    """
    found = discover(environ, "auto")
    found.check()
    return found, pick_devices(from_environ(environ).devices, "pjrt", found.devices, found.growable)


def requested_kind(environ: Mapping[str, str]) -> str:
    """Return the kind of device in ``PJRT_DEVICE``, which torchrun's processes may have for the bridge's."""
    kind = environ.get(env.PJRT_DEVICE, "")
    return "CPU" if kind == BRIDGED_CPU else kind


def _claim(environ: Mapping[str, str], accelerator: str, pci_root: Path) -> tuple[Claim, str, str]:
    if text := environ.get(tpu_env.POLYXLA_EMULATE):
        return Claim.EXPLICIT, f"{tpu_env.POLYXLA_EMULATE}={text}", "TPU"
    if kind := requested_kind(environ):
        return Claim.EXPLICIT, f"{env.PJRT_DEVICE}={kind}", kind
    # Chips alone claim less than a variable: another runtime may be described for the same host.
    chips = attached_chips(pci_root)
    if chips and accelerator in ("auto", "tpu"):
        return Claim.ATTACHED, f"{len(chips)} TPU chip(s) attached", "TPU"
    if accelerator == "auto":
        why = "no TPU is attached and no variable says otherwise"
        return Claim.FALLBACK, f"the CPU, because {why}; {env.PJRT_DEVICE}=CPU is the same", "CPU"
    return Claim.FALLBACK, f"accelerator={accelerator!r}", accelerator.upper()


def _check_request(environ: Mapping[str, str], accelerator: str, kind: str) -> None:
    if accelerator != "auto" and accelerator.upper() not in KINDS:
        raise UsageError(
            f"accelerator={accelerator!r} is not a device that runtime 'pjrt' can drive",
            fix="Write accelerator='tpu' or accelerator='cpu', or leave it out.",
        )
    if kind not in KINDS:
        raise UsageError(
            f"{env.PJRT_DEVICE}={kind} is not a device that runtime 'pjrt' can drive",
            fix=f"Write {env.PJRT_DEVICE}=CPU or {env.PJRT_DEVICE}=TPU.",
        )
    if accelerator not in ("auto", kind.lower()):
        raise UsageError(
            f"accelerator={accelerator!r} and {env.PJRT_DEVICE}={kind} contradict each other",
            fix=f"Leave accelerator out, or set {env.PJRT_DEVICE}={accelerator.upper()}.",
        )
    if environ.get(tpu_env.POLYXLA_EMULATE) and requested_kind(environ) not in ("", "TPU"):
        raise UsageError(
            f"{tpu_env.POLYXLA_EMULATE}={environ[tpu_env.POLYXLA_EMULATE]} and "
            f"{env.PJRT_DEVICE}={environ[env.PJRT_DEVICE]} contradict each other",
            fix=f"Unset {env.PJRT_DEVICE}: an emulated TPU needs none.",
        )
    if kind == "CPU" and (text := environ.get(POLYXLA_EMULATE_NUMERICS)):
        # torch_xla's own client computes what a program does that launches no replicas.
        raise UsageError(
            f"{POLYXLA_EMULATE_NUMERICS}={text} is for an emulated TPU, and there is none",
            fix=f"Emulate one: {tpu_env.POLYXLA_EMULATE}=v5e-4; or unset {POLYXLA_EMULATE_NUMERICS}.",
        )
    if problem := import_problem():
        raise UsageError(problem.what, fix=problem.fix)


def with_chips(bare: Discovery, environ: Mapping[str, str], chips: tuple[AttachedChip, ...]) -> Discovery:
    """Complete a discovery with the chips of this host.

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
    # Last, because it may ask the metadata server, which takes seconds where there is none.
    tpu_slice = this_slice(environ)
    # A process that was prepared for one device must not offer the others, which other processes use.
    prepared = environ.get(env.POLYXLA_PJRT_DEVICE)
    variables = {
        **bare.variables,
        tpu_env.TPU_ACCELERATOR_TYPE: Setting(tpu_slice.accelerator.name, tpu_slice.origin),
    }
    return replace(
        bare,
        devices=tuple(
            device for device in cores(tpu_slice, chips, emulated) if prepared in (None, str(device.index))
        ),
        host_count=tpu_slice.host_count,
        topology=tpu_slice.topology,
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


def _has_libtpu(environ: Mapping[str, str]) -> bool:
    # torch_xla itself looks in these two places. Source: torch_xla/__init__.py, v2.9.0.
    return bool(environ.get(tpu_env.TPU_LIBRARY_PATH)) or importlib.util.find_spec("libtpu") is not None


def _cpus(environ: Mapping[str, str]) -> tuple[Device, ...]:
    text = environ.get(env.CPU_NUM_DEVICES, str(torchrun.process_count(environ) or 1))
    # torch_xla silently reads an invalid number as zero devices.
    count = int(text) if text.isascii() and text.isdecimal() else 0
    if count < 1:
        raise UsageError(
            f"{env.CPU_NUM_DEVICES}={text} is not a positive integer",
            fix=f"Write {env.CPU_NUM_DEVICES}=1, or unset it.",
        )
    return tuple(Device(index, "CPU", f"CPU device {index} of torch_xla") for index in range(count))


def _variables(environ: Mapping[str, str]) -> dict[str, Setting]:
    return {
        name: Setting(environ.get(name), "environment" if name in environ else "default")
        for name in (*env.READ, *tpu_env.READ)
    }


def prepared_plan(environ: Mapping[str, str], nprocs: int | None = None) -> PjrtPlan | None:
    """Return the plan of a plain torch_xla program in this environment; None where torch_xla decides.

    Args:
        environ: the program's environment.
        nprocs: the ``nprocs`` of ``xmp.spawn``, if given; torch_xla itself starts one process.

    Raises:
        UsageError: the environment has another number of devices.
    """
    kind = requested_kind(environ) or ("TPU" if attached_chips() else "")
    # With these bounds the program has chosen which chips a process drives.
    if kind not in KINDS or nprocs == 1 or (kind == "TPU" and environ.get(tpu_env.TPU_PROCESS_BOUNDS)):
        return None
    return requested_plan(environ) if nprocs is None else _plan_of(environ, nprocs)


def _plan_of(environ: Mapping[str, str], nprocs: int) -> PjrtPlan | None:
    """Return the plan of a program that asks for a number of processes, one for each replica."""
    count = len(requested_devices(environ))
    # On the CPU, a program's own number counts, unless a variable sets another.
    is_free = discover(environ, "auto").growable and environ.get(POLYXLA_DEVICES, "auto") == "auto"
    if nprocs != count and not (is_free and nprocs > 1):
        raise UsageError(
            f"the program asks for {nprocs} replicas, but there are {count} devices here",
            where=f"nprocs={nprocs}",
            fix=f"Write nprocs={count}, or leave it out to use all of them.",
        )
    return requested_plan({**environ, POLYXLA_DEVICES: str(nprocs)} if is_free else environ)
