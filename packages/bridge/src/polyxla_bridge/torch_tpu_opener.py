"""TorchTPU as the framework that opens the library, while ``import torch_tpu`` runs."""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import sys

from polyxla_bridge import collection, native
from polyxla_bridge.activation import Opener

_log = logging.getLogger("polyxla.bridge")
_LINKED_OTHERWISE = (
    "torch_tpu %s is linked in another way than the wheels of 0.2.0: where it waits with Python's lock held, "
    "such as in tensor.cpu(), the program may hang; install torch_tpu==0.2.0"
)


class TorchTpu(Opener):
    """TorchTPU, which has opened the library."""

    # Modules made by nanobind, such as triton's, report every object that is not destroyed.
    has_late_objects = False

    def __init__(self) -> None:
        if not native.LOCKED.polyxla_torch_tpu_without_gil():
            _log.warning(_LINKED_OTHERWISE, importlib.metadata.version("torch_tpu"))

    def before_client(self) -> None:
        """Keep collections, which may destroy tensors, out of TorchTPU's own threads."""
        collection.only_in_main_thread()

    def release(self) -> None:
        """Release TorchTPU's client, as its own exit function would, which is left out."""
        # Only now: while the library is opened, TorchTPU's modules are being imported.
        device_module = sys.modules.get("torch_tpu._internal.device._device_module")
        if device_module is not None:
            shut_down = device_module.TpuDeviceModule._shutdown_runtime
            atexit.unregister(shut_down)
            shut_down()


lookups = [0, 0]
"""Hits and misses of the cache of compiled programs."""


def count_lookup(is_hit: bool) -> None:
    """Count a look into the cache."""
    lookups[0 if is_hit else 1] += 1
