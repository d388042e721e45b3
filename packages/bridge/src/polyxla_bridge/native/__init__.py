"""The package's C library.

Call a function through `UNLOCKED`, which releases the GIL, if it blocks or runs torch_xla's callbacks. Call
it through `LOCKED`, which holds the GIL, if it is faster than releasing the GIL.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_int, c_long, c_size_t, c_void_p

from polyxla_bridge import LIBRARY, abi

UNLOCKED = ctypes.CDLL(str(LIBRARY))
LOCKED = ctypes.PyDLL(str(LIBRARY))

LOCKED.polyxla_set_api.argtypes = [c_void_p]
LOCKED.polyxla_error.argtypes = [c_int, c_char_p, c_size_t]
LOCKED.polyxla_error.restype = c_void_p
LOCKED.polyxla_event.restype = c_void_p
UNLOCKED.polyxla_events_complete.argtypes = [c_void_p, c_size_t, c_void_p]
LOCKED.polyxla_outputs.argtypes = [c_void_p, c_size_t, *[c_void_p] * 5]
UNLOCKED.polyxla_wait.restype = c_bool
LOCKED.polyxla_take.argtypes = [POINTER(abi.Record)]
LOCKED.polyxla_take.restype = c_bool
UNLOCKED.polyxla_free.argtypes = [c_void_p]
LOCKED.polyxla_drop.argtypes = [c_void_p]
LOCKED.polyxla_delete.argtypes = [c_void_p]
LOCKED.polyxla_set_local.argtypes = [c_void_p, c_size_t]
LOCKED.polyxla_torch_xla_without_gil.restype = c_bool
LOCKED.polyxla_torch_tpu_without_gil.restype = c_bool
LOCKED.polyxla_shared_size.argtypes = [c_int]
LOCKED.polyxla_shared_size.restype = c_size_t
LOCKED.polyxla_is_joined.restype = c_bool
LOCKED.polyxla_join.argtypes = [c_int, c_int, c_void_p, c_int]
LOCKED.polyxla_join.restype = c_bool
LOCKED.polyxla_set_torch.argtypes = [c_void_p]
LOCKED.polyxla_waits.restype = c_long
LOCKED.polyxla_naps.restype = c_long


def address(name: str) -> int | None:
    """Return the address of an exported function; None if the library has no such function."""
    function = getattr(UNLOCKED, name, None)
    return None if function is None else ctypes.cast(function, c_void_p).value
