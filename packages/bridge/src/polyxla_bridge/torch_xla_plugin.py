"""The bridge as torch_xla sees it: a plugin whose library's table is filled here.

torch_xla imports this whenever it is imported itself, so nothing is started before it asks for the
library, and a process may still be forked until then.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch_xla
from torch_xla.experimental.plugins import DevicePlugin

from polyxla_bridge import env
from polyxla_bridge.errors import as_pjrt_error

if TYPE_CHECKING:
    from polyxla_bridge.engine.engine import Engine

FINISH_TIMEOUT_S = 60
"""Longest wait, at the end of the program, for what its devices still do, in seconds."""
FAILED = 1
"""Exit code of a process whose last step failed after its end."""
UNFINISHED = 4
"""Exit code of a process whose devices did not finish, or could not be let go of."""


class EnginePlugin(DevicePlugin):
    """Shows the engine that `make_engine` returns to torch_xla."""

    def make_engine(self) -> Engine:
        """Start the engine; called once, when torch_xla creates its client."""
        raise NotImplementedError

    def library_path(self) -> str:
        """Fill the library's table and return where the library is."""
        from polyxla_bridge import native

        activate(self.make_engine)
        return str(native.PATH)

    def configure_single_process(self) -> None:
        """Leave everything as the environment has it."""


CACHE_COUNTERS = ("polyxla.ProgramCacheHit", "polyxla.ProgramCacheMiss")
"""torch_xla counters of programs that an earlier job had compiled, and of those that none had. Neither exists
where no programs are cached."""


def _count_lookup(is_hit: bool) -> None:
    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    native_part._xla_increment_counter(CACHE_COUNTERS[0 if is_hit else 1], 1)


class CpuPlugin(EnginePlugin):
    """Replicas on this machine's CPU, through jaxlib."""

    def make_engine(self) -> Engine:
        """Start jaxlib's clients for this process's share of the replicas."""
        from polyxla_bridge.engine.jax_engine import JaxEngine

        return JaxEngine(env.current(), _count_lookup)

    def physical_chip_count(self) -> int:
        """Return how many processes torch_xla should start."""
        return env.current().processes


_active = threading.Lock()
_log = logging.getLogger("polyxla.bridge")


def activate(make_engine: Callable[[], Engine]) -> None:
    """Fill the library's table; once in a process, since torch_xla has one client.

    When Python ends, torch_xla lets go of its objects first, then the engine is closed, then the table
    is silenced: what C++ destroys after that finds functions that do nothing.
    """
    if not _active.acquire(blocking=False):
        return
    from torch_xla.core import xla_model

    from polyxla_bridge import native
    from polyxla_bridge.table.handles import Bridge
    from polyxla_bridge.table.table import Table

    # Without Python's lock, unlike torch_xla._prepare_to_exit.
    bridge = Bridge(make_engine, xla_model.wait_device_ops)
    table = Table(bridge)
    native.LOCKED.polyxla_set_api(ctypes.addressof(table.api))

    def leave() -> None:
        # First, because torch_xla waits for its devices with Python's lock held, and executions need
        # that lock: together they would wait for ever.
        try:
            is_finished = bridge.finish(FINISH_TIMEOUT_S)
        except RuntimeError:
            # As torch_xla does it: an exception would not change the exit code here.
            _log.exception("what was still running when the program ended has failed")
            _end(FAILED)
        if not is_finished:
            late = f"the devices had not finished {FINISH_TIMEOUT_S} s after the program's end"
            sys.stderr.write(f"polyxla: {late}; ending without them\n")
            _end(UNFINISHED)
        torch_xla._prepare_to_exit()
        try:
            bridge.close()
        except Exception as error:
            sys.stderr.write(f"polyxla: {as_pjrt_error(error).message}\n")
            # Without Python's own end: the engine's threads may still be at work in C++.
            _end(UNFINISHED)
        table.silence()
        # Python's last collections would destroy, in any order, what C++ has made for clients that are gone.
        gc.freeze()

    _wait_without_the_lock()
    # torch_xla's own hook would run after ours, and needs what ours takes away.
    atexit.unregister(torch_xla._prepare_to_exit)
    atexit.register(leave)


def _wait_without_the_lock() -> None:
    """Let compiled functions (torch.compile's ``openxla``) wait for their device without Python's lock.

    torch_xla holds that lock while it waits for the step before, and the step before needs it to start.
    """
    from torch_xla.core import xla_model

    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    run = native_part._run_cached_graph

    @functools.wraps(run)
    def run_cached_graph(*args: Any) -> Any:
        xla_model.wait_device_ops(xla_model.xla_real_devices([torch_xla.device()]))
        return run(*args)

    native_part._run_cached_graph = run_cached_graph


def _end(code: int) -> None:
    # Python writes out what was printed only after its exit functions, and this is called by one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
