"""The signals of a replica's process, whose main thread may be in C++ when they come."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
"""Source: ``linux/prctl.h``."""


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends.

    C++ code that hangs with the GIL held would live on, and keep its TPU chip.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def sigterm_ends_quietly() -> Iterator[None]:
    """Keep libtpu, which starts in the context, from printing its stack at a SIGTERM of the launcher.

    libtpu 0.0.21 sets a handler of its own when it is initialized, in place of the default only. A
    handler in C ends the process even while the main thread is in C++.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before = libc.signal(signal.SIGTERM, ctypes.cast(libc["_exit"], ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGTERM, before)
