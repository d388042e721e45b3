"""What a process that runs replicas, and each replica in it, sets up before the replica's own program.

Heavy: imported in replicas' processes, or in the fork server that makes them.
"""

from __future__ import annotations

import atexit
import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

SWITCH_INTERVAL_S = 1e-4
"""How long a thread may keep Python to itself while others wait, in seconds. Every call of the bridge
needs Python for some microseconds; at Python's own 5 ms each would wait for the other replicas' tracing."""


def prepare_to_exit() -> None:
    """Let torch_xla finish its work when this process ends; called before a device is touched."""
    # Forked with the parent's, which ended with it.
    atexit.unregister(torch_xla._prepare_to_exit)
    atexit.register(torch_xla._prepare_to_exit)


def take_turns() -> None:
    """Let the replicas that are threads of this process take turns at Python quickly."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def take(thread: int, threads: int) -> None:
    """Make a device the calling thread's default, which ordinals and random numbers go by.

    Args:
        thread: the number of this replica within its process, and of its device.
        threads: number of replicas of the process; the only one is its main thread.
    """
    device = xm.xla_device(thread)
    torch_xla._XLAC._xla_set_default_device(str(device))  # type: ignore[attr-defined]
    # Compiled programs ask for these, and cannot ask the device.
    xr._init_world_size_ordinal()
    if threads > 1:
        # Backwards too: what hooks ask of torch.distributed is of their thread.
        torch.autograd.set_multithreading_enabled(False)
