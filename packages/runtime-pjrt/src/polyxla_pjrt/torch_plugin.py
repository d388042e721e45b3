"""What torch_xla imports of this runtime whenever it is imported itself: plain torch_xla programs come here.

Where the environment asks for bridged replicas, ``torch_xla.launch`` and ``xmp.spawn`` start them as
`polyxla.launch` does: prepared processes, real collectives, no silent hang. Else nothing is changed but
one thing: the place is remembered that first touches a device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.experimental import plugins

from polyxla.env import POLYXLA_DEVICES, POLYXLA_RUNTIME, add, snapshot
from polyxla.xla import first_device_use
from polyxla.xla.torch_xla_launch import Launched, serve
from polyxla_pjrt import discovery, env, torchrun
from polyxla_pjrt.launching import ReplicasOfProcess, run_plan, say_emulated, say_uncached
from polyxla_pjrt.layout import PREPARED, Plan


class EmulatedTpu(plugins.DevicePlugin):
    """An emulated TPU, as torch_xla's registry of plugins knows it."""

    def library_path(self) -> str:
        """Fill the bridge's table and return where its library is."""
        from polyxla_bridge.torch_xla_plugin import CpuPlugin

        # A replica's launcher has said it for all.
        if env.PJRT_LOCAL_PROCESS_COUNT not in snapshot() and (plan := prepared_plan()):
            say_emulated(plan)
        return CpuPlugin().library_path()

    def host_index(self) -> int:
        """Return the number of the emulated host."""
        return int(snapshot()[env.TPU_WORKER_ID])

    def physical_chip_count(self) -> int:
        """Return the number of processes of this host."""
        plan = prepared_plan()
        return plan.layout.processes if plan else 1

    def configure_single_process(self) -> None:
        """Leave everything as the environment has it."""


def prepared_plan() -> Plan | None:
    """Return where the replicas of a program in this environment are; None where torch_xla decides."""
    environ = snapshot()
    kind = environ.get(env.PJRT_DEVICE)
    # All of a host's TPU cores torch_xla launches itself; of some it knows nothing.
    some_cores = kind == "TPU" and environ.get(POLYXLA_DEVICES, "auto") != "auto"
    return discovery.asked_plan(environ) if kind in PREPARED.values() or some_cores else None


def prepare(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a plain torch_xla program needs in its environment, which asks for bridged replicas or not.

    Raises:
        UsageError: it asks for what cannot be.
    """
    if environ.get(POLYXLA_RUNTIME) not in (None, "", "pjrt"):
        return {}
    # What a launcher has prepared, for the bridge or for one replica, stays as it is.
    prepared = (env.POLYXLA_PJRT_LOCAL_DEVICE, env.PJRT_LOCAL_PROCESS_COUNT)
    if environ.get(env.PJRT_DEVICE) in PREPARED.values() or any(name in environ for name in prepared):
        return {}
    is_started_by_torchrun = torchrun.process_count(environ) is not None
    asks_for_cpu = environ.get(env.PJRT_DEVICE, "CPU" if is_started_by_torchrun else "") == "CPU"
    if not environ.get(env.POLYXLA_EMULATE) and not asks_for_cpu:
        return {}
    plan = discovery.asked_plan(environ)
    if plan is None:
        say_uncached(environ)
        return {}
    if is_started_by_torchrun:
        return torchrun.environment(plan, environ, os.cpu_count() or 1)
    return plan.whole(os.cpu_count() or 1)


def _run(plan: Plan, launched: Launched) -> list[Any]:
    work = ReplicasOfProcess(launched.call, plan, launched.function, launched.args, snapshot())
    return run_plan(work, launched.method)


def _join_torchrun() -> None:
    """Let one of torchrun's processes know that there are others, which torch_xla leaves to the script."""
    environ = snapshot()
    if torchrun.process_count(environ) is not None and environ.get(env.PJRT_DEVICE) in PREPARED.values():
        devices: Any = xm.get_xla_supported_devices()
        xm.set_replication(torch_xla.device(), devices)


def _install() -> None:
    add(prepare(snapshot()))
    serve(prepared_plan, _run)
    first_device_use.remember(_join_torchrun)
    if snapshot().get(env.PJRT_DEVICE) == PREPARED["TPU"]:
        register_emulated()


def register_emulated() -> None:
    """Let torch_xla's Python find the emulated TPU, which it looks for by the name of a real one."""
    plugins._plugin_registry["TPU"] = EmulatedTpu()


_install()
