"""Profiles of a replica's process. Heavy: imported in the replica."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import torch
from torch_tpu._internal.profiler import _impl, _profiler_backend

from polyxla.plugin import STEP_EVENT

_SHOW_OPERATIONS = "_ZN9torch_tpu20XProfCallbackHandler8RegisterEv"
"""Source: torch_tpu 0.2.0, whose torch.profiler calls it too, and then records every event twice."""


@contextlib.contextmanager
def profile(folder: str) -> Iterator[Callable[[int], None]]:
    """Trace torch's operations and the device's work; see `polyxla.contracts.replication.Replication`."""
    # TorchTPU's own trace is without torch's operations, and so without the marks of the steps.
    getattr(ctypes.PyDLL(_profiler_backend.__file__), _SHOW_OPERATIONS)()
    _impl.start_trace(folder)
    step = contextlib.ExitStack()

    def begin_step(number: int) -> None:
        step.close()
        # The stats are part of the name. Source: TraceMeEncode in tsl/profiler/lib/traceme_encode.h.
        name = f"{STEP_EVENT}#step_num={number},_r=1#"
        step.enter_context(torch.profiler.record_function(name))

    try:
        yield begin_step
    finally:
        step.close()
        _impl.stop_trace()
