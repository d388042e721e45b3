"""Ending a fork of a prepared process in the order of Python's own end, in a fraction of the time.

Python takes all imported modules apart. For torch and JAX that is a second of computing, and a fork copies
most of their memory for it. Here, only what has come since the fork is taken apart.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import threading
import traceback
from typing import NoReturn

FLUSH_FAILED = 120
"""Exit code of a process whose output could not be written. Source: Python's ``Py_FinalizeEx``."""


def end(code: int, *, takes_apart: bool = True) -> NoReturn:
    """End this process after its threads and its exit hooks, with all open files written.

    Args:
        code: the exit code.
        takes_apart: whether the objects of ``__main__`` are this process's to delete, and not its parent's.
    """
    steps = [threading._shutdown, atexit._run_exitfuncs]  # type: ignore[attr-defined]  # noqa: SLF001
    for step in [*steps, *([_take_apart] if takes_apart else [])]:
        try:
            step()
        except BaseException:
            traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
    except Exception:
        code = FLUSH_FAILED
    finally:
        os._exit(code)


def _take_apart() -> None:
    """Delete the objects of the program, and write what it has left in open files of other modules."""
    # A thread that still runs misses what is deleted; at Python's own end it would not run any more.
    threading.excepthook = lambda _: None
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    # Objects that were frozen before the fork are not listed.
    for one in gc.get_objects():
        if isinstance(one, io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom) and not one.closed:
            one.flush()


def remove_remote_modules() -> None:
    """Remove the directory that torch makes when it is imported, and which a killed process would leave.

    Source: torch 2.9, ``torch/distributed/nn/jit/instantiator.py``. The module in it has been imported. torch
    2.15 makes none.
    """
    instantiator = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if directory := getattr(instantiator, "_TEMP_DIR", None):
        directory.cleanup()
