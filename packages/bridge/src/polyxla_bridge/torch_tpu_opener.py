"""TorchTPU as the framework that opens the library, while ``import torch_tpu`` runs."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import gc
import importlib.metadata
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from polyxla_bridge import env, native
from polyxla_bridge.activation import Opener
from polyxla_bridge.programs.cache import context

if TYPE_CHECKING:
    from polyxla_bridge.engine.engine import Engine


TICK_S = 0.05
"""Interval between two looks whether a collection is due, in seconds."""
OLDEST = 2
"""The generation of which a collection looks through all objects."""
REST = 50
"""Least time between two such collections, as a multiple of the time of the first."""


def only_in_main_thread() -> None:
    """Collect in the main thread from now on; a program that has switched collection off is left alone.

    Python collects in whichever thread allocates. TorchTPU's own threads call the bridge, and so allocate.
    TorchTPU ends the process (signal 6) when one of them destroys a tensor, as a collection may.

    ``gc.disable()`` and ``gc.enable()`` keep their meaning. Forked processes collect as Python does.
    """
    thresholds = gc.get_threshold()
    if not thresholds[0]:
        return
    # A threshold of 0 leaves collection enabled for `gc.isenabled`, but Python collects only on request.
    gc.set_threshold(0)
    # A forked process lacks the thread below, so nothing would collect there.
    os.register_at_fork(after_in_child=lambda: gc.set_threshold(*thresholds))
    threading.Thread(target=_watch, args=(thresholds,), name="polyxla-collect", daemon=True).start()


def _watch(thresholds: tuple[int, int, int]) -> None:
    rests_until = 0.0

    def collect(argument: Any) -> int:
        nonlocal rests_until
        generation, began = _generation(thresholds, gc.get_count()), time.monotonic()
        # Python looks through all objects only if a quarter of them is new, which it does not tell.
        if generation == OLDEST and began < rests_until:
            generation -= 1
        gc.collect(generation)
        if generation == OLDEST:
            ended = time.monotonic()
            rests_until = ended + REST * (ended - began)
        return 0

    # This thread must not collect itself. Python runs pending calls in the main thread, between two
    # instructions.
    pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(collect)
    while True:
        time.sleep(TICK_S)
        if gc.isenabled() and gc.get_count()[0] > thresholds[0]:
            ctypes.pythonapi.Py_AddPendingCall(pending, None)


def _generation(thresholds: tuple[int, int, int], counts: tuple[int, int, int]) -> int:
    """Return the oldest generation that is due."""
    # This is Python's own rule: a generation is due when the younger ones were collected often enough.
    if counts[1] <= thresholds[1]:
        return 0
    return 1 if counts[2] <= thresholds[2] else 2


_log = logging.getLogger("polyxla.bridge")
_LINKED_OTHERWISE = (
    "torch_tpu %s is linked in another way than the wheels of 0.2.0: where it waits with Python's lock held, "
    "such as in tensor.cpu() or new_group(), the program may hang; install torch_tpu==0.2.0"
)


class TorchTpu(Opener):
    """TorchTPU, which has opened the library."""

    # nanobind's modules, such as triton's, report every object that is not destroyed, so the last garbage
    # collections must run.
    has_late_objects = False

    def __init__(self) -> None:
        if not native.LOCKED.polyxla_torch_tpu_without_gil():
            _log.warning(_LINKED_OTHERWISE, importlib.metadata.version("torch_tpu"))
        from polyxla_bridge import torch_tpu_store

        # TorchTPU opens the library while it is imported, before it registers what this replaces.
        torch_tpu_store.give_stores()

    def before_client(self) -> None:
        """Keep collections, which may destroy tensors, out of TorchTPU's own threads."""
        only_in_main_thread()
        # `release` takes the place of TorchTPU's exit function, which did not exist yet in `__init__`.
        if self._devices:
            atexit.unregister(self._devices.TpuDeviceModule._shutdown_runtime)

    def after_client(self, engine: Engine) -> None:
        """Keep the programs of other jobs apart in the cache of torch.compile.

        TorchTPU's keys name neither the number of devices that a program was compiled for, nor its compiler.
        torch would print a traceback for each cached program that cannot be loaded here.
        """
        from torch.compiler import config

        # The replicas are those of the engine: the variables of a TPU's slice do not set the bridge's number.
        settings = dataclasses.replace(env.current(), replicas=len(engine.devices))
        config.cache_key_tag += f" polyxla {context(settings, {'engine': type(engine).__name__})}"

    def release(self) -> None:
        """Wait for TorchTPU's threads, and release its client.

        TorchTPU's own exit function first waits for the job's other processes in a collective, which would
        be one of theirs if they have not ended. When the engine is closed, the process that serves the others
        waits for them, with a deadline.
        """
        if self._devices:
            self._devices._device_ops_backend._shutdown_runtime()

    @property
    def _devices(self) -> Any:
        """Return TorchTPU's module of devices; it is not imported yet while the library is opened."""
        return sys.modules.get("torch_tpu._internal.device._device_module")


lookups = [0, 0]
"""Hits and misses of the cache of compiled programs."""


def count_lookup(is_hit: bool) -> None:
    """Count a look into the cache."""
    lookups[0 if is_hit else 1] += 1
