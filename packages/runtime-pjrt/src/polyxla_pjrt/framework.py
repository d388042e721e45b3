"""What torch_xla loads with itself, in plain programs too, and what is changed in torch_xla then.

Where the environment asks for several replicas, ``torch_xla.launch`` and ``xmp.spawn`` start them as
`polyxla.launch` does: prepared processes, real collectives, no silent hang. A program that launches nothing,
such as an SPMD program, keeps torch_xla's own client for the CPU; only the line is recorded that first uses a
device. torch_xla's questions about its TPU host are answered here.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch.overrides import TorchFunctionMode
from torch_xla._internal import tpu
from torch_xla.experimental import plugins

from polyxla.plugin import (
    POLYXLA_DEVICES,
    POLYXLA_RUNTIME,
    EmulatedTpu,
    TpuSlice,
    attached_chips,
    ended_by_errors,
    first_device_use,
    handle_launches,
    join,
    may_have_chips,
    mend_torch_xla,
    say_once,
    snapshot,
    torchrun,
    tpu_env,
    unknown_variables,
    update_environ,
)
from polyxla_pjrt import discovery, env
from polyxla_pjrt.launching import run_job, say_uncached
from polyxla_pjrt.plan import BRIDGED_CPU, PjrtPlan, is_prepared, plan_for, replica_environment, this_slice

# They are kept here, before `_answer` replaces them.
_own_answers = (tpu.num_available_chips, tpu.get_tpu_env, tpu.get_worker_ips)
"""torch_xla's functions, which answer on a machine without TPUs."""


class NoDevice(plugins.DevicePlugin):
    """An entry in torch_xla's registry of plugins, by which torch_xla imports this module. Never opened."""


def _through_bridge(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put the bridge between torch_xla and a PJRT plugin; none if none is named."""
    if importlib.util.find_spec("polyxla_bridge") is None:
        return {}
    import polyxla_bridge
    from polyxla_bridge import env as bridge

    if not environ.get(bridge.POLYXLA_PJRT_PLUGIN) or environ.get(tpu_env.POLYXLA_EMULATE):
        return {}
    return {tpu_env.TPU_LIBRARY_PATH: str(polyxla_bridge.LIBRARY)}


def prepare(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put a plain torch_xla program on the bridge; none where it is not needed.

    It is needed on an emulated TPU, and in the processes of torchrun on the CPU.

    Raises:
        UsageError: the environment asks for replicas that cannot run.
    """
    if environ.get(POLYXLA_RUNTIME) not in (None, "", "pjrt"):
        return {}
    # Variables that a launcher has set, for the bridge or for one replica, stay as they are.
    prepared = (env.POLYXLA_PJRT_LOCAL_DEVICE, env.PJRT_LOCAL_PROCESS_COUNT)
    if environ.get(env.PJRT_DEVICE) == BRIDGED_CPU or any(name in environ for name in prepared):
        return {}
    if environ.get(tpu_env.RANK, "0") == "0" and multiprocessing.parent_process() is None:
        # Once per job: not in each of torchrun's processes, and not in the program's own.
        for warning in unknown_variables(environ):
            say_once(warning)
    if EmulatedTpu.read(environ):
        return _prepare_emulated(environ)
    is_started_by_torchrun = torchrun.process_count(environ) is not None
    # Without a variable, torchrun's processes on a machine without chips mean the CPU.
    by_default = "CPU" if is_started_by_torchrun and not attached_chips() else ""
    if environ.get(env.PJRT_DEVICE, by_default) != "CPU":
        return {}
    plan = discovery.requested_plan(environ)
    if plan is None:
        say_uncached(environ)
    return torchrun.environment(plan, environ, os.cpu_count() or 1) if plan and is_started_by_torchrun else {}


def _prepare_emulated(environ: Mapping[str, str]) -> dict[str, str]:
    found, devices = discovery.requested(environ)
    plan = plan_for(environ, found.kind, devices)
    if plan and torchrun.process_count(environ) is not None:
        return torchrun.environment(plan, environ, os.cpu_count() or 1)
    return replica_environment(environ, found, devices)


def _launch_plan(nprocs: int | None = None) -> PjrtPlan | None:
    """Return the plan of a launch in this process; None where torch_xla decides, as for an SPMD program."""
    return None if xr.is_spmd() else discovery.prepared_plan(snapshot(), nprocs)


def _replicas() -> int | None:
    """Return how many replicas a launch by this process starts; None if it is one, or another runtime's."""
    environ = snapshot()
    # In a replica, and under torchrun, the replicas exist already: nothing is left to launch.
    is_replica = env.PJRT_LOCAL_PROCESS_COUNT in environ or torchrun.process_count(environ) is not None
    if is_replica or discovery.requested_kind(environ) not in discovery.KINDS:
        return None
    # `polyxla run` has prepared this process for one device, whatever the environment asks for.
    plan = None if env.POLYXLA_PJRT_LOCAL_DEVICE in environ else discovery.requested_plan(environ)
    return plan.layout.replicas if plan else 1


def _check_chips() -> None:
    """Refuse to open libtpu where it cannot find a TPU: it would look for one for a minute, without a word.

    Raises:
        UsageError: this machine has no chip.
    """
    environ = snapshot()
    # With `TPU_LIBRARY_PATH`, the user or the emulator has chosen the library, which answers for itself.
    is_libtpus = environ.get(env.PJRT_DEVICE) == "TPU" and not environ.get(tpu_env.TPU_LIBRARY_PATH)
    if is_libtpus and not may_have_chips():
        raise discovery.no_chip(f"{env.PJRT_DEVICE}=TPU")


def _join_torchrun() -> None:
    """Set up replication in a process that torchrun started, which torch_xla leaves to the script."""
    environ = snapshot()
    is_ours = environ.get(env.PJRT_DEVICE) == BRIDGED_CPU or tpu_env.POLYXLA_EMULATE in environ
    if torchrun.process_count(environ) is not None and is_ours:
        devices: Any = xm.get_xla_supported_devices()
        xm.set_replication(torch_xla.device(), devices)


def _say_emulated() -> None:
    """Print that the TPU is emulated, in a program that uses it without a launch."""
    environ = snapshot()
    emulated = EmulatedTpu.read(environ)
    if emulated and not is_prepared(environ):
        here = len(emulated.chips) * emulated.accelerator.threads_per_process
        if xr.is_spmd():
            devices = xr.global_runtime_device_count()
            of_all = (
                f"{devices} devices, {here} of them on this host" if devices > here else f"{here} devices"
            )
            emulated.say(f"{of_all}, one SPMD program")
        else:
            emulated.say(f"{here} devices, {_unlaunched(emulated)}")


def _unlaunched(emulated: EmulatedTpu) -> str:
    """Say that a program uses a TPU without a launch, and how to launch a replica on each device."""
    fix = "to train on all of them, write torch_xla.launch(train) or polyxla.launch(train)"
    # The cores of a chip share a process.
    each = (
        ", or run the script by polyxla run --each" if emulated.accelerator.threads_per_process == 1 else ""
    )
    return f"and no replicas launched ({fix}{each})"


def _may_launch_on_cpu(environ: Mapping[str, str]) -> bool:
    prepared = (env.POLYXLA_PJRT_LOCAL_DEVICE, env.PJRT_LOCAL_PROCESS_COUNT, tpu_env.POLYXLA_EMULATE)
    is_on_cpu = environ.get(env.PJRT_DEVICE) in (None, "", "CPU") and not any(map(environ.get, prepared))
    numbers = (environ.get(name) for name in (POLYXLA_DEVICES, env.CPU_NUM_DEVICES))
    return is_on_cpu and any(number not in (None, "", "auto", "1") for number in numbers)


class TensorWatch(TorchFunctionMode):
    """Reports the first call of torch with ``"xla"`` as a device to `polyxla.xla.first_device_use`.

    torch_xla's own client for the CPU starts inside C++, without a plugin that could report it. This mode
    sees every call of torch in the main thread until then, so it is only for processes that may launch
    several replicas: these compute nothing themselves.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, after reporting a device."""
        given = kwargs or {}
        if any(_is_xla(argument) for argument in (*args, given.get("device"))):
            first_device_use.before_use()
        return func(*args, **given)

    def stop(self) -> None:
        """See no more calls; a mode that the program has entered since stays, and this one below it."""
        if torch.overrides._get_current_function_mode() is self:
            self.__exit__(None, None, None)


def _is_xla(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "xla"
    return isinstance(value, str) and value.partition(":")[0] == "xla"


_tensors = TensorWatch()


# Called once torch_xla has opened its devices: only then are their number and SPMD mode known.
def _follow() -> None:
    _say_emulated()
    _join_torchrun()
    _tensors.stop()


def apply_environment() -> None:
    """Act on this process's environment: at import, and again in a fork with an environment of its own.

    Watches for tensors on torch_xla's own client for the CPU, too, where the environment asks for several.
    """
    update_environ(_through_bridge(snapshot()) | prepare(snapshot()))
    # The import of torch_xla has looked for this variable, in another environment if this is a fork.
    if tpu_env.TPU_LIBRARY_PATH in snapshot():
        torch_xla._found_libtpu = True
    # A fork inherits the mode, and its own environment may not need it.
    _tensors.stop()
    if _may_launch_on_cpu(snapshot()):
        _tensors.__enter__()  # type: ignore[no-untyped-call]


def _answer() -> None:
    """Answer torch_xla's questions about its TPU host from now on.

    torch_xla counts PCI devices, and asks the metadata server in every process. It cannot read all answers of
    that server, and where variables describe the slice it takes a process's number for the host's.
    """
    tpu.num_available_chips = _num_available_chips
    tpu.get_tpu_env = _get_tpu_env
    tpu.get_worker_ips = _get_worker_ips


def _num_available_chips() -> int:
    emulated = EmulatedTpu.read(snapshot())
    return len(emulated.chips) if emulated else _own_answers[0]()


def _get_tpu_env() -> Any:
    tpu_slice = _slice()
    if tpu_slice is None:
        return _own_answers[1]()
    return {
        "ACCELERATOR_TYPE": tpu_slice.accelerator.name,
        "TPU_PROCESS_BOUNDS": join(tpu_slice.bounds.hosts),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": join(tpu_slice.bounds.chips_per_host),
        "WORKER_ID": str(tpu_slice.worker_id),
    }


def _get_worker_ips() -> list[str]:
    tpu_slice = _slice()
    if tpu_slice is None:
        return _own_answers[2]()
    return list(tpu_slice.hostnames) if len(tpu_slice.hostnames) > 1 else ["localhost"]


def _slice() -> TpuSlice | None:
    environ = snapshot()
    return this_slice(environ) if EmulatedTpu.read(environ) or attached_chips() else None


def _install() -> None:
    _answer()
    with ended_by_errors():
        apply_environment()
    handle_launches("pjrt", _launch_plan, run_job)
    mend_torch_xla()
    first_device_use.watch(_replicas, _check_chips, _follow)


_install()
