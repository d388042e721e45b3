"""torch's library, whose functions for the CPU the C library calls."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from importlib.metadata import version
from pathlib import Path

from polyxla_bridge import native
from polyxla_bridge.abi import Code
from polyxla_bridge.env import POLYXLA_CPU_KERNELS
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import hlo
from polyxla_bridge.programs.executable import Executable

NAME = f"torch {version('torch')}" if importlib.util.find_spec("torch") else ""
"""Its name and version; empty if torch is not installed."""
TARGETS = ("polyxla_convolution", "polyxla_product")
"""The C library's functions that call it."""
_FUNCTIONS = (
    *("aoti_torch_device_type_cpu", "aoti_torch_dtype_float32", "aoti_torch_create_tensor_from_blob"),
    *("aoti_torch_copy_", "aoti_torch_delete_tensor_object", "aoti_torch_cpu_convolution"),
    *("aoti_torch_cpu_convolution_backward", "aoti_torch_cpu_mm_out"),
    # at::get_num_threads()
    *("_ZN2at15get_num_threadsEv", "omp_get_max_threads", "omp_set_num_threads"),
)
"""In the order of `TorchLibrary` in native/torch_library.h."""


@cache
def is_open() -> bool:
    """Open the library, so that programs can call it; return whether they can."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        library = ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))
        functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _FUNCTIONS]
    except (OSError, AttributeError):
        return False
    native.LOCKED.polyxla_set_torch((ctypes.c_void_p * len(functions))(*functions))
    return True


def check(executable: Executable) -> None:
    """Open the library if a program calls it.

    Raises:
        PjrtError: this process cannot open it.
    """
    targets = hlo.called_targets(executable.optimized_hlo)
    if not targets.isdisjoint(TARGETS) and not is_open():
        raise PjrtError(
            Code.INVALID_ARGUMENT,
            f"{executable.name} calls torch's library, and this process cannot open it; compile it here, or "
            f"with {POLYXLA_CPU_KERNELS}=xla",
        )
