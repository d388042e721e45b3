"""Helpers of the programs that use torch_xla. The server imports it, and with it all that programs need."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch_xla._internal import pjrt
from torch_xla.core import xla_model

from polyxla_bridge.engine.jax_engine import JaxEngine

T = TypeVar("T")
xm: Any = xla_model
"""Typed as Any, because torch_xla's annotations do not tell a tensor from a list of tensors."""


def everywhere(function: Callable[[], T]) -> list[T]:
    """Call a function on a thread for each local replica; return the results by ordinal."""
    process, processes = (int(os.environ[f"POLYXLA_BRIDGE_{name}"]) for name in ("PROCESS", "PROCESSES"))
    pjrt.initialize_multiprocess(process, processes)
    # In a forked process, torch makes its autograd engine again at the first use, which must not happen in
    # two threads at once. It gets a queue for each device that exists by then.
    torch.zeros((), requires_grad=True).backward()
    results = pjrt._run_thread_per_device(process, processes, function, pjrt.initialize_multiprocess)
    return [results[ordinal] for ordinal in sorted(results)]


def engine() -> JaxEngine:
    """Return the engine of this process."""
    (found,) = [found for found in gc.get_objects() if type(found) is JaxEngine]
    return found


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
