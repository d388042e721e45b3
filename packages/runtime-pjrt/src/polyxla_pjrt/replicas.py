"""One of several replicas, on TPU cores or on the bridge.

Heavy: imported in their processes, or in the fork server that makes them. It is torch_xla's own model: a
process has as many devices as replicas, each replica a thread whose default device is its own; the only one
of a process is its main thread.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla._internal import pjrt

from polyxla import UsageError, World
from polyxla.launcher import failures
from polyxla.launcher.child import REPLICA_THREAD
from polyxla.xla import replica_process
from polyxla.xla.replication import CollectiveReplication
from polyxla_pjrt.emulated_tpu import register_emulated
from polyxla_pjrt.layout import Place, Plan


class SeveralReplication(CollectiveReplication):
    """One of several replicas, of which all take part in whatever they do together."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.plan.kind, place.thread)
        self.world = _world(place)
        if place.plan.is_bridged:
            from polyxla_bridge.torch_xla_plugin import CACHE_COUNTERS

            self.cache_counters = CACHE_COUNTERS

    def rendezvous(self, tag: str, payload: bytes, replicas: Sequence[int] = ()) -> list[bytes]:
        """Exchange payloads through a gather of their bytes.

        Raises:
            UsageError: only some of the replicas take part.
        """
        if replicas and sorted(replicas) != list(range(self.world.world_size)):
            raise UsageError(
                f"rendezvous {tag!r} of replicas {list(replicas)} out of {self.world.world_size}",
                where="replicas",
                fix="Let all replicas take part: leave replicas out.",
            )
        payloads: list[bytes] = xm.rendezvous(tag, payload)
        return payloads


def _world(place: Place) -> World:
    """Return where this replica stands. Everything that is divided among replicas goes by it."""
    world = place.plan.layout.world(place.process, place.thread)
    if not place.plan.is_bridged:
        # libtpu numbers processes by where their chips are, not by how they were started.
        world = replace(world, ordinal=xr.global_ordinal(), process_index=xr.process_index())
    told = (xr.global_ordinal(), xr.global_device_count())
    if told != (world.ordinal, world.world_size):
        raise RuntimeError(f"torch_xla says {told}, the plan {world}")
    return world


def run_replicas(replica: Callable[[Place], Any], plan: Plan, process: int) -> list[Any]:
    """Run every replica of this process and return their results in ordinal order.

    The first exception of one is raised at once: the others may wait for it in a collective for ever,
    and end with the process.
    """
    if plan.is_bridged:
        _watch(plan)
    replica_process.prepare_to_exit()
    pjrt.initialize_multiprocess(process % plan.layout.processes, plan.layout.processes)
    if plan.layout.threads == 1:
        return [_on_own_device(replica, Place(plan, process, 0))]
    replica_process.take_turns()
    # In a forked process torch makes its autograd engine anew at the first use, which no two threads may be;
    # with a queue for each of the devices that there are by then.
    torch.zeros((), requires_grad=True).backward()
    _wait_for_own_device()
    _give_threads_a_world_each()
    return _run_threads(
        [
            functools.partial(_on_own_device, replica, Place(plan, process, i))
            for i in range(plan.layout.threads)
        ]
    )


def _watch(plan: Plan) -> None:
    from polyxla_bridge.engine import stall_watchdog

    stall_watchdog.on_stall(failures.report_stall)
    failures.describe_with(stall_watchdog.describe_here)
    if plan.kind == "TPU":
        # The fork server may have imported torch_xla for a launch on the CPU.
        register_emulated()


def _on_own_device(replica: Callable[[Place], Any], place: Place) -> Any:
    replica_process.take(place.thread, place.plan.layout.threads)
    return replica(place)


def _give_threads_a_world_each() -> None:
    """Let ``torch.distributed`` be set up by each replica that is a thread, as on TPU v2 and v3.

    Source: torch_xla 2.9.0 does the first in pjrt_backend.py where such chips are attached; torch 2.9 needs
    the second too, since names of groups repeat in every thread.
    """
    from torch.testing._internal.distributed import multi_threaded_pg

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]


def _wait_for_own_device() -> None:
    """Let ``xm.wait_device_ops()`` mean, in a replica's thread, that replica's device.

    torch_xla takes the locks of all devices for it. Another replica that cannot begin its step meanwhile is
    missed in the collective that is waited for: both would wait for ever.
    """
    native: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    wait = native._xla_wait_device_ops

    @functools.wraps(wait)
    def wait_device_ops(devices: Sequence[str] = ()) -> None:
        own = threading.current_thread().name.startswith(REPLICA_THREAD)
        wait(devices=list(devices) or (xm.xla_real_devices([torch_xla.device()]) if own else []))

    native._xla_wait_device_ops = wait_device_ops


def _run_threads(replicas: Sequence[Callable[[], Any]]) -> list[Any]:
    outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()

    def be(index: int) -> None:
        try:
            outcomes.put((index, replicas[index](), None))
        except BaseException as error:
            outcomes.put((index, None, error))

    for index in range(len(replicas)):
        threading.Thread(target=be, args=(index,), name=f"{REPLICA_THREAD}-{index}", daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < len(replicas):
        index, result, error = outcomes.get()
        if error is not None:
            raise error
        results[index] = result
    return [results[index] for index in sorted(results)]


_Outcome = tuple[int, Any, BaseException | None]
