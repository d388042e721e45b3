"""Several replicas as threads of one process, on the bridge. Heavy: imported in that process.

It is torch_xla's own model for devices that share a process: a thread per device, whose default device
is its own. What they compute together runs in jaxlib's clients, which meet through gloo.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla._internal import pjrt

from polyxla import Job, UsageError, World
from polyxla.child import REPLICA_THREAD
from polyxla.replication import ReduceOp
from polyxla_pjrt.replication import XlaReplication

_OPS = {
    "sum": xm.REDUCE_SUM,
    "mean": xm.REDUCE_SUM,
    "min": xm.REDUCE_MIN,
    "max": xm.REDUCE_MAX,
    "mul": xm.REDUCE_MUL,
    "and": xm.REDUCE_AND,
    "or": xm.REDUCE_OR,
}


SWITCH_INTERVAL_S = 1e-4
"""How long a thread may keep Python to itself while others wait, in seconds. Every call of the bridge
needs Python for some microseconds; at Python's own 5 ms each would wait for the other replicas' tracing."""


class ThreadReplication(XlaReplication):
    """One of the replicas that are threads of this process."""

    def __init__(self, local_index: int) -> None:
        super().__init__("CPU", local_index)
        # The thread's own default device, which ordinals and random numbers go by.
        torch_xla._XLAC._xla_set_default_device(str(self.device))  # type: ignore[attr-defined]
        size = xr.world_size()
        self.world = World(size, xr.global_ordinal(), local_index, size)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Combine the replicas' tensors in the program of the current step."""
        scale = 1.0 / self.world.world_size if op == "mean" else 1.0
        return cast("torch.Tensor", xm.all_reduce(_OPS[op], tensor, scale=scale))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather the replicas' tensors in the program of the current step."""
        return list(xm.all_gather(tensor[None]).unbind())

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients in place, in the program of the current step."""
        xm.reduce_gradients(optimizer)

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


def run_replicas(job: Job) -> list[Any]:
    """Run every replica of `job` in this process and return their results in ordinal order.

    The first exception of one is raised at once: the others may wait for it in a collective for ever,
    and end with the process.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    pjrt.initialize_multiprocess(0, 1)
    outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
    for index in range(len(job.devices)):
        name = f"{REPLICA_THREAD}-{index}"
        threading.Thread(target=_replica, args=(job, index, outcomes), name=name, daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < len(job.devices):
        index, result, error = outcomes.get()
        if error is not None:
            raise error
        results[index] = result
    return [results[index] for index in sorted(results)]


_Outcome = tuple[int, Any, BaseException | None]


def _replica(job: Job, index: int, outcomes: queue.SimpleQueue[_Outcome]) -> None:
    try:
        outcomes.put((index, job.run(index), None))
    except BaseException as error:
        outcomes.put((index, None, error))
