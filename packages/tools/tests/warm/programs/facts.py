"""Prints what a program sees of itself, as JSON."""

import atexit
import faulthandler
import gc
import json
import locale
import multiprocessing.process
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np

main = sys.modules["__main__"]


def stream(opened: Any) -> list[Any]:
    """Describe a standard stream."""
    buffering = [opened.line_buffering, opened.write_through]
    return [
        opened.name,
        opened.mode,
        opened.encoding,
        opened.errors,
        opened.isatty(),
        *buffering,
        opened.fileno(),
        opened.newlines,
    ]


facts = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "directory": str(Path.cwd()),
    "environ": dict(os.environ),
    "umask": os.umask(0o77),
    "limits": {
        name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT" in name
    },
    "priority": os.getpriority(os.PRIO_PROCESS, 0),
    "handlers": [str(signal.getsignal(number)).partition(" at ")[0] for number in signal.Signals],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "wakeup": signal.set_wakeup_fd(-1),
    "streams": [stream(opened) for opened in (sys.stdin, sys.stdout, sys.stderr)],
    "originals": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "descriptors": sorted(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()),
    "main": [
        main.__name__,
        main.__file__,
        getattr(main.__spec__, "name", None),
        main.__package__,
        globals() is vars(main),
    ],
    "flags": list(sys.flags),
    "locale": locale.setlocale(locale.LC_ALL),
    "filters": [str(entry) for entry in warnings.filters],
    "faulthandler": faulthandler.is_enabled(),
    "threads": [thread.name for thread in threading.enumerate()],
    "is_main_thread": threading.current_thread() is threading.main_thread(),
    "thresholds": gc.get_threshold(),
    "original_directory": vars(multiprocessing.process)["ORIGINAL_DIR"],
    "process": multiprocessing.current_process().name,
    "recursion": sys.getrecursionlimit(),
    "excepthook": sys.excepthook is sys.__excepthook__,
    "input": sys.stdin.read(),
}
drawn = {
    "python": random.random(),
    "numpy": float(np.random.default_rng(None).random()) + float(np.random.rand()),  # noqa: NPY002
    "key": bytes(multiprocessing.current_process().authkey).hex(),
}
atexit.register(print, "the exit function ran")
print(json.dumps({"facts": facts, "drawn": drawn}))
