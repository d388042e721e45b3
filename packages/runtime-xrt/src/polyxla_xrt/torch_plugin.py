"""What torch_xla imports of this runtime whenever it is imported itself: plain torch_xla programs come here.

Where the environment describes a TPU node, torch_xla's devices are its cores, and ``torch_xla.launch`` and
``xmp.spawn`` start a process for each. Else nothing is changed.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch_xla._internal import pjrt
from torch_xla.experimental import plugins

import polyxla.env
from polyxla.env import POLYXLA_RUNTIME, snapshot
from polyxla.launcher import child
from polyxla.xla import first_device_use, torch_xla_launch
from polyxla_bridge.engine import stall_watchdog
from polyxla_bridge.engine.engine import Engine, Position
from polyxla_bridge.table.abi import Code
from polyxla_bridge.torch_xla_plugin import EnginePlugin
from polyxla_xrt import env
from polyxla_xrt.config.configuration import Configuration, read
from polyxla_xrt.config.cores import process_count
from polyxla_xrt.errors import WorkerError
from polyxla_xrt.launching import ReplicaOfProcess, run_plan, wants_node
from polyxla_xrt.plan import Plan, asked_plan

GRACE_S = 10.0
"""How long a program may take to end by itself, in seconds, once its worker is gone."""
DEATH_S = 3.0
"""How long to leave the launcher, in seconds, to see itself which replica's process has died."""


class Node(EnginePlugin):
    """A TPU node, as torch_xla's registry of plugins knows it."""

    def make_engine(self) -> Engine:
        """Connect to the worker, with the cores that a launcher has for this process, or with all of them."""
        from polyxla_xrt.client.engine import RemoteEngine
        from polyxla_xrt.own_place import own_place
        from polyxla_xrt.place import read_place

        environ = snapshot()
        if place := read_place(environ):
            _here.engine = RemoteEngine(place, environ, _lose)
        else:
            place, lease = own_place(_plan(environ), environ)
            _here.held_address = place.address
            _here.engine = RemoteEngine(place, environ, _lose, lease.close)
        return _here.engine

    def host_index(self) -> int:
        """Return the number of this host among those of the job."""
        return int(snapshot().get(env.TPU_WORKER_ID, "0"))

    def physical_chip_count(self) -> int:
        """Return the number of processes of this host."""
        return _plan(snapshot()).cores

    def configure_single_process(self) -> None:
        """Leave everything as the environment has it."""


@dataclass
class _Here:
    """What this process knows of itself."""

    engine: Engine | None = None
    held_address: str | None = None
    waits_at: str | None = None
    since: float = field(default_factory=time.monotonic)


_here = _Here()


def held_address() -> str | None:
    """Return the worker whose cores this process itself has; None if it has none, or a launcher has them."""
    return _here.held_address


def enter(what: str) -> None:
    """Note that this replica waits for others outside of its device."""
    _here.waits_at, _here.since = what, time.monotonic()


def leave() -> None:
    """Note that it waits no longer."""
    _here.waits_at = None


def position() -> Position:
    """Return what this process's first replica does."""
    if _here.engine is None:
        return Position(0, None, (), 0.0)
    at = _here.engine.positions()[0]
    if _here.waits_at is None:
        return at
    return Position(at.device, _here.waits_at, (), time.monotonic() - _here.since)


def describe() -> str:
    """Return what this process's replica does, and where each of its threads is."""
    return f"  {position()}\n{stall_watchdog.stacks()}"


def _lose(error: WorkerError, code: int) -> None:
    """End this process when its worker is gone or has ended its job, whatever its program does."""
    threading.Thread(target=_end, args=(error, code), name="polyxla-end", daemon=True).start()


def _end(error: WorkerError, code: int) -> None:
    if not child.has_parent():
        # The program meets the error where it next uses the device, and may end in its own way.
        time.sleep(GRACE_S)
    elif code == Code.DEADLINE_EXCEEDED:
        child.report_stall(f"polyxla: {error.what}\n{describe()}")
        return
    elif code == Code.ABORTED:
        time.sleep(DEATH_S)
    child.give_up(error)


def prepared_plan() -> Plan | None:
    """Return where the replicas of a program in this environment are; None where it has no TPU node."""
    environ = snapshot()
    return _plan(environ) if wants_node(environ) and not environ.get(env.POLYXLA_XRT_PLACE) else None


def _plan(environ: Mapping[str, str]) -> Plan:
    return asked_plan(_configuration(environ), environ)


def _configuration(environ: Mapping[str, str]) -> Configuration:
    configuration = read(environ)
    assert configuration is not None, "this runtime is chosen by a configuration"
    return configuration


def prepare(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a plain torch_xla program needs in its environment, which describes a TPU node or not.

    Raises:
        UsageError: it describes one wrongly.
    """
    runtime = environ.get(POLYXLA_RUNTIME)
    if runtime not in (None, "", "xrt") or wants_node(environ) or environ.get(env.POLYXLA_XRT_PLACE):
        return {}
    if not runtime and environ.get(env.PJRT_DEVICE):
        return {}
    configuration = read(environ)
    return asked_plan(configuration, environ).whole() if configuration else {}


def _run(plan: Plan, launched: torch_xla_launch.Launched) -> list[Any]:
    work = ReplicaOfProcess(launched.call, plan, launched.function, launched.args, snapshot())
    return run_plan(work, launched.method)


def _allow_all_processes() -> None:
    """Let ``xmp.spawn`` be asked for as many processes as there are cores, as scripts of that time do."""
    own: Callable[..., Any] = pjrt.spawn

    @functools.wraps(own)
    def spawn(
        fn: Callable[..., Any], nprocs: int | None = None, start_method: str = "spawn", args: Any = ()
    ) -> Any:
        plan = prepared_plan()
        if plan and nprocs is not None:
            configuration = replace(plan.configuration, devices_per_worker=plan.cores)
            nprocs = 1 if process_count(configuration, nprocs) == 1 < plan.cores else None
        return own(fn, nprocs, start_method, args)

    pjrt.spawn = spawn


def register() -> None:
    """Let torch_xla's Python find the node, which it looks for by the name of a TPU."""
    plugins._plugin_registry["TPU"] = Node()


def _install() -> None:
    polyxla.env.add(prepare(snapshot()))
    torch_xla_launch.serve(prepared_plan, _run)
    _allow_all_processes()
    first_device_use.remember()
    if wants_node(snapshot()):
        register()


_install()
