"""Launches of plain torch_xla programs: ``torch_xla.launch`` and ``xmp.spawn`` use a runtime's plan.

Heavy: imported by the plugins that torch_xla imports.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla._internal import pjrt

from polyxla import presence
from polyxla.contracts.job import Job, ReplicaResult
from polyxla.env import Setting, snapshot
from polyxla.tracebacks import Folded, as_error, leave_replica
from polyxla.xla import first_device_use, launches
from polyxla.xla.main_module import for_new_process, refuse_while_importing

_LAUNCH, _SPAWN = "torch_xla.launch", "xmp.spawn"
_PlanT = TypeVar("_PlanT")


def run_replica(job: Job, place: Any) -> ReplicaResult:
    """Call a plain program's function in a replica, and wait until its device has finished.

    The result carries the ordinal: the order of the processes does not imply it.
    """
    ordinal = xr.global_ordinal()
    try:
        with presence.running(ordinal):
            value = job.function(*job.args)
            # For this device only: waiting takes a device's lock, and another replica may be using its.
            xm.wait_device_ops(xm.xla_real_devices([torch_xla.device()]))
            return ReplicaResult(ordinal, value)
    except BaseException as error:
        leave_replica(error, _named(ordinal))


@dataclass(frozen=True)
class Exited:
    """What the function of a replica returns that has called ``sys.exit(0)``.

    Attributes:
        error: what the launch raises, unless all replicas have called it.
    """

    error: BaseException


@dataclass(frozen=True)
class LaunchedFunction:
    """A program's function in a launch of torch_xla's own, whose ``sys.exit`` must not end the launch.

    Attributes:
        function: the function.
        is_alone: whether it runs in the process that launches, as the only replica.
    """

    function: Callable[..., Any]
    is_alone: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in a replica."""
        try:
            return self.function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                if self.is_alone:
                    raise
                return Exited(as_error(error, _named(xr.global_ordinal())))
            leave_replica(error, _named(xr.global_ordinal()))


def _ended(values: dict[int, Any]) -> dict[int, Any]:
    """Return the values of all replicas, by ordinal.

    Raises:
        SystemExit: all replicas have called ``sys.exit(0)``; torch_xla, too, then ends the program.
        ReplicaLostError: only some have.
    """
    exited = [value for value in values.values() if isinstance(value, Exited)]
    if exited and len(exited) == len(values):
        raise SystemExit(0)
    if exited:
        raise exited[0].error
    return values


def _named(ordinal: int) -> str:
    return f"the replica with ordinal {ordinal}"


def handle_launches(
    runtime: str,
    prepared: Callable[[int | None], _PlanT | None],
    run: Callable[[Job, _PlanT], Iterable[ReplicaResult]],
) -> None:
    """Handle the launches of plain programs from now on, if the runtime has a plan for them.

    Otherwise the previous handler does, which is another runtime's or torch_xla's. The order does not matter.

    Args:
        runtime: the runtime's name.
        prepared: returns the runtime's plan of the replicas in this environment; None to leave the launch to
            the previous handler. Its argument is the ``nprocs`` of ``xmp.spawn``, or None for all replicas;
            it raises `UsageError` if there cannot be so many.
        run: runs every replica of the job, placed by the plan, and returns what ``job.run`` returned in each,
            in any order.
    """
    previous: Callable[..., dict[int, Any]] = pjrt.run_multiprocess
    previous_spawn: Callable[..., Any] = pjrt.spawn

    def launch(plan: _PlanT, call: Callable[[], Any], method: str, nprocs: int | None) -> dict[int, Any]:
        with Folded():
            results = run(_job(runtime, call, method, nprocs), plan)
        ordered = sorted(results, key=operator.attrgetter("ordinal"))
        return _ended({result.ordinal: result.value for result in ordered})

    def run_multiprocess(
        function: Callable[..., Any], *args: Any, start_method: str = "spawn", **kwargs: Any
    ) -> dict[int, Any]:
        # A launch that fails counts too: `polyxla run` reports programs that never launch.
        launches.append(function)
        if _joined:
            return _ended({xr.global_ordinal(): LaunchedFunction(function)(*args, **kwargs)})
        # Before asking for the plan, which does not exist in a replica process.
        refuse_while_importing(_LAUNCH)
        plan = prepared(None)
        if plan is None:
            return _ended(previous(LaunchedFunction(function), *args, start_method=start_method, **kwargs))
        call = functools.partial(LaunchedFunction(function), *args, **kwargs)
        return launch(plan, call, start_method, None)

    @functools.wraps(previous_spawn)
    def spawn(
        fn: Callable[..., Any], nprocs: int | None = None, start_method: str = "spawn", args: Any = ()
    ) -> Any:
        if nprocs is not None and not _joined:
            refuse_while_importing(_SPAWN)
            if (plan := prepared(nprocs)) is not None:
                launches.append(fn)
                launch(plan, LaunchedFunction(pjrt._SpawnFn(fn, *args)), start_method, nprocs)
                return None
        # With nprocs, torch_xla calls the function itself; otherwise it calls `run_multiprocess`.
        function = fn if nprocs is None else LaunchedFunction(fn, is_alone=True)
        return previous_spawn(function, None if _joined else nprocs, start_method, args)

    pjrt.run_multiprocess = run_multiprocess  # type: ignore[assignment]
    pjrt.spawn = spawn


def join() -> None:
    """Make every launch by this process run its function here: the process is a replica already."""
    _joined.append(True)


_joined: list[bool] = []


def _job(runtime: str, call: Callable[[], Any], start_method: str, nprocs: int | None) -> Job:
    """Return the job; all methods but ``fork`` import the main module in each process.

    Raises:
        UsageError: this process already uses a device.
    """
    first_device_use.refuse(_LAUNCH)
    is_fork = start_method == "fork"
    # No device is in use: this is the number of replicas that a launch starts.
    function = call if is_fork else for_new_process(call, replicas=nprocs or xr.world_size())
    return Job(
        main=run_replica,
        # The arguments are in the call, which pickles both by the rules of multiprocessing.
        function=function,
        args=(),
        runtime=runtime,
        # The runtime's plan has chosen them.
        devices=(),
        environ=snapshot(),
        precision=Setting(None, "default"),
        start_method="fork" if is_fork else "forkserver",
    )
