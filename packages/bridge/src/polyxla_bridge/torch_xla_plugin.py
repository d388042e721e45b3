"""The torch_xla plugin, which fills the library's function table.

torch_xla imports this module whenever it is imported itself. So nothing starts before torch_xla asks for the
library, and until then the process may be forked.
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

from polyxla_bridge import LIBRARY, env
from polyxla_bridge.errors import as_pjrt_error

if TYPE_CHECKING:
    from polyxla_bridge.engine.engine import Engine

FINISH_TIMEOUT_S = 60.0
"""Longest wait for the devices to finish when the program ends, in seconds."""
FAILED = 1
"""Exit code of a process whose last step failed after the program had ended."""
UNFINISHED = 4
"""Exit code of a process whose devices did not finish, or could not be released."""


class EnginePlugin(DevicePlugin):
    """A torch_xla plugin for the engine that `make_engine` returns."""

    def make_engine(self) -> Engine:
        """Start the engine; called once, when torch_xla creates its client."""
        raise NotImplementedError

    def library_path(self) -> str:
        """Fill the function table and return the path of the library.

        Raises:
            RuntimeError: the program is partitioned, and the process runs no such programs.
        """
        if refusal := self.refusal_of_spmd():
            _refuse_spmd(refusal)
        activate(self.make_engine)
        return str(LIBRARY)

    def refusal_of_spmd(self) -> str:
        """Return why this process runs no partitioned programs (SPMD), in a sentence; empty if it does."""
        return ""

    def configure_single_process(self) -> None:
        """Change nothing: the launcher has set the environment."""


CACHE_COUNTERS = ("polyxla.ProgramCacheHit", "polyxla.ProgramCacheMiss")
"""torch_xla counters of the compilation cache's hits and misses. They do not exist if there is no cache."""


def count_lookup(is_hit: bool) -> None:
    """Count a hit or a miss of the compilation cache."""
    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    native_part._xla_increment_counter(CACHE_COUNTERS[0 if is_hit else 1], 1)


class CpuPlugin(EnginePlugin):
    """Replicas on this machine's CPU, through jaxlib."""

    def make_engine(self) -> Engine:
        """Start jaxlib's clients for this process's replicas."""
        from polyxla_bridge.engine.jax_engine import JaxEngine

        return JaxEngine(env.current(), count_lookup)

    def physical_chip_count(self) -> int:
        """Return the number of processes that torch_xla starts."""
        return env.current().processes


def _refuse_spmd(why: str) -> None:
    """Refuse partitioned programs, now and later: torch_xla would abort the process at the first one."""
    from torch_xla import runtime

    def use_spmd(auto: bool | None = False) -> None:
        raise RuntimeError(f"SPMD programs (torch_xla.runtime.use_spmd) do not run here: {why}")

    runtime.use_spmd = use_spmd
    if runtime.is_spmd():
        use_spmd()


_LATE_SPMD = (
    "torch_xla.runtime.use_spmd() was called after the first tensor was moved to a device: torch_xla would "
    "crash at the next one; call it at the beginning of the program"
)
_active = threading.Lock()
_log = logging.getLogger("polyxla.bridge")


def activate(make_engine: Callable[[], Engine]) -> None:
    """Fill the library's function table, and register the exit function; a second call does nothing.

    At exit, torch_xla first releases its objects, then the engine is closed, then the table is disabled:
    C++ objects that are destroyed later call functions that do nothing.

    Args:
        make_engine: called when torch_xla creates its client.
    """
    if not _active.acquire(blocking=False):
        return
    from torch_xla.core import xla_model

    from polyxla_bridge import native
    from polyxla_bridge.table.handles import Bridge
    from polyxla_bridge.table.table import Table

    # wait_device_ops releases the GIL while it waits; torch_xla._prepare_to_exit does not.
    bridge = Bridge(make_engine, xla_model.wait_device_ops)
    table = Table(bridge)
    native.LOCKED.polyxla_set_api(ctypes.addressof(table.api))

    def leave() -> None:
        # First, because torch_xla._prepare_to_exit waits for the devices with the GIL held, and executions
        # need the GIL: that would be a deadlock.
        try:
            is_finished = bridge.finish(FINISH_TIMEOUT_S)
        except RuntimeError:
            # Like torch_xla: an exception in an exit function does not change the exit code.
            _log.exception("a step that was still running when the program ended has failed")
            _end(FAILED)
        if not is_finished:
            late = f"the devices had not finished {FINISH_TIMEOUT_S:g} s after the end of the program"
            sys.stderr.write(f"polyxla: {late}; the process ends without waiting any longer\n")
            _end(UNFINISHED)
        torch_xla._prepare_to_exit()
        try:
            bridge.close()
        except Exception as error:
            sys.stderr.write(f"polyxla: {as_pjrt_error(error).message}\n")
            # Without finalising Python, because the engine's threads may still run C++ code.
            _end(UNFINISHED)
        table.silence()
        # Otherwise the interpreter's last garbage collections would destroy, in any order, C++ objects of
        # clients that no longer exist.
        gc.freeze()

    native.LOCKED.polyxla_wait_without_gil()
    _refuse_late_spmd()
    # `leave` calls torch_xla's exit function itself: run later, it would find the engine closed.
    atexit.unregister(torch_xla._prepare_to_exit)
    atexit.register(leave)


def _refuse_late_spmd() -> None:
    """Refuse ``use_spmd()`` where torch_xla 2.9.0 would end the process (signal 11) at the next tensor.

    torch_xla chooses its devices once, when the first is used: one for all, or one for each.
    """
    import torch

    native_part: Any = torch_xla._XLAC  # type: ignore[attr-defined]
    force = native_part._xla_force_spmd_device

    @functools.wraps(force)
    def force_in_time() -> None:
        # If no device is used yet, the choice is made here.
        with env.as_under_spmd():
            described = native_part._get_xla_tensor_debug_info(torch.empty(0, device="xla:0"))
        if "Device: SPMD:0" not in described:
            raise RuntimeError(_LATE_SPMD)
        force()

    native_part._xla_force_spmd_device = force_in_time


def _end(code: int) -> None:
    # Python flushes its streams only after the exit functions, one of which calls this.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
