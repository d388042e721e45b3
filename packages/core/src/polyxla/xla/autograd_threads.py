"""The threads in which torch computes gradients on XLA's devices. Heavy.

torch starts one for each device when it first computes a gradient. torch_xla has no devices until a program
uses one, so a program that has computed a gradient on the CPU before gets "device_ready_queues_.size()
INTERNAL ASSERT FAILED" for all others, also on a real TPU. Here, such a program gets its threads later.

Source: Engine::start_device_threads and Engine::thread_init in torch/csrc/autograd/engine.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch_xla

_START = "_ZN5torch8autograd6Engine20start_device_threadsEv"
_ENGINE = "_ZN5torch8autograd6Engine18get_default_engineEv"
_MISSING = "device_ready_queues_"
"""A part of torch's error where a device has no such thread."""
_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


def start_for_late_devices() -> None:
    """Have torch start these threads before the first gradient that it computes while a device is in use."""
    modules: Any = (torch.autograd, torch.autograd.graph)
    run_backward = torch.autograd.graph._engine_run_backward
    lock, is_served = threading.Lock(), threading.Event()

    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_served.is_set() and _native._xla_runtime_is_initialized():
            with lock:
                if not is_served.is_set():
                    _start(run_backward)
                    is_served.set()
                    for module in modules:
                        if module._engine_run_backward is run:
                            module._engine_run_backward = run_backward
        return run_backward(*args, **kwargs)

    for module in modules:
        module._engine_run_backward = run


def _start(run_backward: Callable[..., Any]) -> None:
    # A thread of its own has none of torch's modes and transforms.
    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(_differentiate, run_backward).exception()
    # torch may have started them here, as for its first gradient. It must not start them twice.
    if error and _MISSING in str(error):
        library = ctypes.CDLL(torch._C.__file__)
        engine = ctypes.CFUNCTYPE(ctypes.c_void_p)((_ENGINE, library))()
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)((_START, library))(engine)


def _differentiate(run_backward: Callable[..., Any]) -> None:
    x = torch.ones((), device="xla", requires_grad=True)
    run_backward((x,), (x.detach(),), False, False, (), allow_unreachable=True, accumulate_grad=True)
