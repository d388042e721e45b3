"""The replicas of one process: their replication, and the process around them.

Heavy: imported in the replicas' processes, or in the fork server that forks them. The model is torch_xla's
own: a process has one device per replica, and each replica is a thread with its device as the default; a
process's only replica is the main thread.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla._internal import pjrt
from torch_xla.core import dynamo_bridge
from torch_xla.distributed.parallel_loader import ParallelLoader

from polyxla import UsageError
from polyxla.plugin import (
    REPLICA_THREAD,
    CollectiveReplication,
    EmulatedTpu,
    Job,
    OnlyReplica,
    Place,
    World,
    XlaReplication,
    end_with_parent,
    naming_holders,
    padded,
    prepare_process,
    report_stalls,
    require_all,
    share_cores,
    sigterm_ends_quietly,
    snapshot,
    torchrun,
    use_device,
    watch_replicas,
)
from polyxla_pjrt.plan import PjrtPlace, PjrtPlan

_LENGTH_BYTES = 8
_ENDED = ("ExecuteTime", "CompileTime")
"""Metrics that get a sample when a program ends, or its compilation.
Source: torch_xla 2.9.0, ``runtime/pjrt_computation_client.cpp``.
"""
_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


class SingleReplication(OnlyReplica, XlaReplication):
    """The replication of a job's only replica, on the CPU, a TPU or an emulated one."""

    def __init__(self, kind: str, local_index: int, environ: Mapping[str, str]) -> None:
        with naming_holders():
            super().__init__(kind, local_index, environ)
        if EmulatedTpu.read(environ):
            from polyxla_bridge.torch_xla_plugin import CACHE_COUNTERS

            self.cache_counters = CACHE_COUNTERS
        self._check_autograd()

    def _check_autograd(self) -> None:
        """Refuse a process whose autograd engine was created before the device.

        torch creates a queue for each device at a process's first ``backward()``, and never again. With a
        device that was opened later, every ``backward()`` fails with an internal assertion.
        """
        try:
            torch.zeros((), device=self.device, requires_grad=True).backward()
        except RuntimeError as error:
            raise UsageError(
                f"this process called backward() before it had {self.device}, so torch's autograd cannot use "
                "that device",
                where="start_method",
                fix="Launch with start_method='forkserver', which starts a fresh process, or call backward() "
                "after the launch.",
            ) from error


class MultiReplication(CollectiveReplication):
    """The replication of one of several replicas; all of them take part in every collective."""

    def __init__(self, place: PjrtPlace, environ: Mapping[str, str]) -> None:
        super().__init__(place.plan.kind, place.thread, environ)
        self.world = _world(place)
        if place.plan.is_bridged:
            from polyxla_bridge.torch_xla_plugin import CACHE_COUNTERS

            self.cache_counters = CACHE_COUNTERS

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Exchange payloads by gathering their bytes.

        Raises:
            UsageError: `replicas` names only some of the replicas.
        """
        require_all(tag, replicas, self.world.world_size)
        return [_without_padding(other) for other in xm.rendezvous(tag, _padded(payload))]


def _padded(payload: bytes) -> bytes:
    """Return a payload with its length in front, so that the padding can be removed."""
    if not payload:
        # A barrier has no payload. torch_xla then exchanges the sizes only, which costs no second program.
        return payload
    sized = len(payload).to_bytes(_LENGTH_BYTES, "big") + payload
    return padded(sized, len(sized))


def _without_padding(received: bytes) -> bytes:
    end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "big")
    return received[_LENGTH_BYTES:end]


def _world(place: PjrtPlace) -> World:
    """Return this replica's place in the world, by which data and devices are divided among replicas."""
    world = place.plan.layout.world(place.process, place.thread)
    if place.plan.kind == "TPU":
        # libtpu numbers processes by the coordinates of their chips, not in the order of their start.
        world = replace(world, ordinal=xr.global_ordinal(), process_index=xr.process_index())
    actual = (xr.global_ordinal(), xr.global_device_count())
    if actual != (world.ordinal, world.world_size):
        raise RuntimeError(f"torch_xla has the ordinal and world size {actual}, the plan {world}")
    return world


class TorchXlaProbe:
    """The `polyxla.tpu.monitor.replica_watch.DeviceProbe` of the default device of the calling thread."""

    def __init__(self) -> None:
        # The device is looked up here, in the replica's thread: other threads have another default device.
        self._devices = xm.xla_real_devices([torch_xla.device()])

    def ended(self) -> int:
        """Return how many programs and compilations of this process have ended."""
        # A metric that has no sample yet is None.
        metrics = (_native._xla_metric_data(name) for name in _ENDED)
        return sum(metric[0] for metric in metrics if metric)

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        _native._xla_wait_device_ops(devices=self._devices)


def run_replicas(job: Job, plan: PjrtPlan, process: int) -> list[Any]:
    """Run every replica of this process and return their results, in the order of the threads.

    Raises the first exception of a replica at once: the other replicas may wait for that one in a collective
    forever. They end with the process.
    """
    if torchrun.process_count(snapshot()) is None:
        end_with_parent()
    if plan.is_bridged:
        from polyxla_bridge.engine import stall_watchdog

        report_stalls(stall_watchdog, lambda position: stall_watchdog.retire(position.ordinal))
    # Before torch_xla starts: if a host fails during the start, this process must end too.
    watch_replicas(snapshot(), TorchXlaProbe)
    prepare_process(shares_gil=plan.layout.threads > 1)
    share_cores(plan, job.environ)
    # This opens the devices, where libtpu may find them held by another process.
    with naming_holders(), sigterm_ends_quietly():
        pjrt.initialize_multiprocess(process % plan.layout.processes, plan.layout.processes)
    if plan.layout.threads == 1:
        return [_on_own_device(job, Place(plan, process))]
    # A forked process creates torch's autograd engine again at the first use. Two threads must not do that at
    # once, and the engine has queues only for the devices that exist by then.
    torch.zeros((), requires_grad=True).backward()
    _wait_only_for_own_device()
    _isolate_process_groups()
    _refuse_torch_compile()
    _refuse_full_graph()
    _give_loaders_their_replica()
    places = [Place(plan, process, thread) for thread in range(plan.layout.threads)]
    return _run_threads([functools.partial(_on_own_device, job, place) for place in places])


def _on_own_device(job: Job, place: PjrtPlace) -> Any:
    use_device(place.thread, place.plan.layout.threads)
    return job.run(place)


def _isolate_process_groups() -> None:
    """Give each thread its own state of ``torch.distributed``, as on TPU v2 and v3.

    Source: torch_xla 2.9.0 makes the first call in pjrt_backend.py where such chips are attached. torch 2.9
    needs the second too, because each thread uses the same names of groups.
    """
    from torch.testing._internal.distributed import multi_threaded_pg

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]


def _refuse_torch_compile() -> None:
    """Refuse ``torch.compile`` for the device, before it trains with wrong numbers.

    Dynamo shares compiled functions among the threads of a process. torch_xla writes one replica's graphs
    into them while another replica uses them.
    """

    def extract_compiled_graph(xla_model: Any, xla_args: Any) -> Any:
        raise UsageError(
            "torch.compile(backend='openxla') would mix the programs of replicas that are threads of one "
            "process",
            where="torch.compile",
            fix="Use torch_xla.compile, or run each replica in a process of its own.",
        )

    # Where torch's backend looks it up.
    dynamo_bridge.extract_compiled_graph = extract_compiled_graph


def _refuse_full_graph() -> None:
    """Refuse ``torch_xla.compile(full_graph=True)``: its switch stops the programs of the whole process."""
    allow = _native._set_allow_execution

    def set_allow_execution(is_allowed: bool) -> None:
        if not is_allowed:
            raise UsageError(
                "torch_xla.compile(full_graph=True) would forbid the programs of all replicas in threads "
                "of this process",
                where="full_graph=True",
                fix="Leave full_graph out, or run each replica in a process of its own.",
            )
        allow(is_allowed)

    _native._set_allow_execution = set_allow_execution


def _give_loaders_their_replica() -> None:
    """Let the threads in which torch_xla reads a loader know whose it is: the ordinal and process groups.

    Both belong to a thread: a stream that asks for its ordinal while it is read would get the first
    replica's. A DataLoader's workers are forks of such a thread, or of the replica's own.
    """
    make: Any = ParallelLoader.__init__
    read: Any = ParallelLoader._loader_worker
    worlds: Any = dist.distributed_c10d._world

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # The threads are started by it.
        self._polyxla_world = worlds._get_world()
        make(self, *args, **kwargs)

    @functools.wraps(read)
    def loader_worker(self: Any) -> None:
        worlds._world.world = self._polyxla_world
        if len(self._devices) == 1:
            _native._xla_set_default_device(str(self._devices[0]))
        read(self)

    any_loader: Any = ParallelLoader
    any_loader.__init__, any_loader._loader_worker = init, loader_worker


def _wait_only_for_own_device() -> None:
    """Make ``xm.wait_device_ops()`` in a replica's thread wait only for that replica's device.

    torch_xla's own takes the locks of all devices. If the awaited work is a collective, the other replicas
    cannot take the lock they need to join it: a deadlock.
    """
    wait = _native._xla_wait_device_ops

    @functools.wraps(wait)
    def wait_device_ops(devices: Sequence[str] = ()) -> None:
        own = threading.current_thread().name.startswith(REPLICA_THREAD)
        wait(devices=list(devices) or (xm.xla_real_devices([torch_xla.device()]) if own else []))

    _native._xla_wait_device_ops = wait_device_ops


def _run_threads(replicas: Sequence[Callable[[], Any]]) -> list[Any]:
    outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()

    def run(index: int) -> None:
        try:
            outcomes.put((index, replicas[index](), None))
        except BaseException as error:
            outcomes.put((index, None, error))

    # Daemons: after an error, the others may wait in a collective forever, and must not keep the process.
    for index in range(len(replicas)):
        threading.Thread(target=run, args=(index,), name=f"{REPLICA_THREAD}-{index}", daemon=True).start()
    results: dict[int, Any] = {}
    # In the order of their ends, not of their numbers: the first error must be raised at once.
    while len(results) < len(replicas):
        index, result, error = outcomes.get()
        if error is not None:
            raise error
        results[index] = result
    return [results[index] for index in sorted(results)]


_Outcome = tuple[int, Any, BaseException | None]
