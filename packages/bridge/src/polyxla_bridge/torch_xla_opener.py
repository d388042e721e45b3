"""torch_xla as the framework that opens the library."""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import logging
from typing import Any

import torch
import torch_xla
from torch_xla.core import xla_model

from polyxla_bridge import env, native
from polyxla_bridge.activation import Opener

_log = logging.getLogger("polyxla.bridge")
_LINKED_OTHERWISE = (
    "torch_xla %s is linked in another way than the wheels of 2.9.0: where it waits with Python's lock held, "
    "such as in x[i] with a tensor i, the program will hang; install torch_xla==2.9.0"
)
_LATE_SPMD = (
    "torch_xla.runtime.use_spmd() was called after the first tensor was moved to a device: torch_xla would "
    "crash at the next one; call it at the beginning of the program"
)


class TorchXla(Opener):
    """torch_xla, which has opened the library."""

    def __init__(self) -> None:
        if not native.LOCKED.polyxla_torch_xla_without_gil():
            _log.warning(_LINKED_OTHERWISE, importlib.metadata.version("torch_xla"))
        _refuse_late_spmd()
        # Exit functions run in reverse order, so torch_xla's would run after `_leave` and find the engine
        # closed. `release` calls it instead.
        atexit.unregister(torch_xla._prepare_to_exit)

    def wait(self) -> None:
        """Wait until all steps are submitted; raise the error of one that failed."""
        # This function releases the GIL while it waits; torch_xla._prepare_to_exit does not.
        xla_model.wait_device_ops()

    def release(self) -> None:
        """Release torch_xla's client."""
        torch_xla._prepare_to_exit()


def _refuse_late_spmd() -> None:
    """Refuse ``use_spmd()`` where torch_xla 2.9.0 would end the process (signal 11) at the next tensor.

    torch_xla chooses its devices once, when the first is used: one for all, or one for each.
    """
    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    force = native_part._xla_force_spmd_device

    @functools.wraps(force)
    def force_in_time() -> None:
        # If no device is used yet, this tensor makes torch_xla choose, and the variable makes it choose SPMD.
        # If torch_xla has chosen before, the description shows what.
        with env.as_under_spmd():
            described = native_part._get_xla_tensor_debug_info(torch.empty(0, device="xla:0"))
        if "Device: SPMD:0" not in described:
            raise RuntimeError(_LATE_SPMD)
        force()

    native_part._xla_force_spmd_device = force_in_time
