"""Setup of a replica process and of each replica in it, before the user's function runs.

Heavy: imported in replica processes, and in the fork server that makes them.
"""

from __future__ import annotations

import atexit
import sys
import warnings

import torch
import torch_xla
import torch_xla.runtime as xr

SWITCH_INTERVAL_S = 1e-4
"""Longest time for which a thread keeps the GIL while others wait, in seconds. Every call of the bridge needs
the GIL for some microseconds; with Python's default of 5 ms it would wait for the other replicas' tracing."""


def prepare(shares_gil: bool) -> None:
    """Prepare this process, whose threads may share the GIL all the time. Call it before a device is used."""
    # A fork of the launching process has lost the registration; any other process must not have it twice.
    atexit.unregister(torch_xla._prepare_to_exit)
    atexit.register(torch_xla._prepare_to_exit)
    # torch_xla calls its own deprecated functions, which ends a launch where warnings are errors. A program
    # that calls them still gets the warning.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch_xla\.")
    if shares_gil:
        sys.setswitchinterval(SWITCH_INTERVAL_S)


def use_device(thread: int, threads: int) -> None:
    """Make a device the calling thread's default, which determines ordinals and random numbers.

    Args:
        thread: the replica's number within its process, which is also its device's.
        threads: number of replicas of the process; a single replica runs in the main thread.
    """
    device = torch_xla.device(thread)
    torch_xla._XLAC._xla_set_default_device(str(device))  # type: ignore[attr-defined]
    # torch.compile's programs read the world size and the ordinal, and cannot ask the device.
    xr._init_world_size_ordinal()
    if threads > 1:
        # The backward pass must run in the replica's thread, too: torch.distributed's state, which gradient
        # hooks use, belongs to a thread.
        torch.autograd.set_multithreading_enabled(False)
