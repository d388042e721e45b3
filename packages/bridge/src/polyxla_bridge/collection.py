"""Python's collection of garbage cycles, in the main thread only.

Python collects in whichever thread allocates. TorchTPU's own threads call the bridge, hence allocate; and
TorchTPU ends the process (signal 6) when one of them destroys a tensor, as a collection may.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from typing import Any

TICK_S = 0.05
"""How often to look whether there is something to collect, in seconds."""


def only_in_main_thread() -> None:
    """Collect in the main thread from now on; a program that has switched collection off is left alone.

    ``gc.disable()`` and ``gc.enable()`` keep their meaning. Forked processes collect as Python does.
    """
    thresholds = gc.get_threshold()
    if not thresholds[0]:
        return
    # Python now collects only on request.
    gc.set_threshold(0)
    os.register_at_fork(after_in_child=lambda: gc.set_threshold(*thresholds))
    threading.Thread(target=_watch, args=(thresholds,), name="polyxla-collect", daemon=True).start()


def _watch(thresholds: tuple[int, int, int]) -> None:
    def collect(argument: Any) -> int:
        gc.collect(_generation(thresholds, gc.get_count()))
        return 0

    # Python runs it in the main thread, between two instructions.
    pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(collect)
    while True:
        time.sleep(TICK_S)
        if gc.isenabled() and gc.get_count()[0] > thresholds[0]:
            ctypes.pythonapi.Py_AddPendingCall(pending, None)


def _generation(thresholds: tuple[int, int, int], counts: tuple[int, int, int]) -> int:
    """Return the oldest generation that is due."""
    if counts[1] <= thresholds[1]:
        return 0
    return 1 if counts[2] <= thresholds[2] else 2
