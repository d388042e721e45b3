"""The first use of a device by a process: where it is, and whether a launch must come first.

Heavy: it imports torch_xla.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch_xla
import torch_xla.runtime as xr
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_xla.experimental import plugins

from polyxla import callsite, env
from polyxla.console import ended_by_errors
from polyxla.errors import UsageError
from polyxla.xla import (
    main_module,
    program_checks,
)
from polyxla.xla.program_checks import UnsyncedSteps

_DEVICE_FUNCTIONS = (
    *("_xla_get_all_", "_xla_get_default_device", "_xla_get_device", "_xla_get_num_processes"),
    *("_xla_get_process_index", "_xla_get_replication_", "_xla_num_", "_xla_real_", "_xla_set_default_"),
)
"""Prefixes of the functions of torch_xla's C++ module through which Python code reaches a device. Creating a
tensor on ``"xla"``, or moving one there, reaches it inside C++, which asks a plugin for its library."""
_EXACT = {"XLA_DENSE_GATHER_FACTOR": "0", "XLA_DENSE_SCATTER_FACTOR": "0"}
"""Variables of torch_xla with which its programs for a TPU are right.

By default, torch_xla 2.9 gathers and scatters on a TPU with masks, which are 0 wherever nothing is scattered:
``scatter_reduce`` with ``prod``, ``amin`` or ``amax`` returns wrong numbers, and an index shorter than its
input is refused. With 0, torch_xla writes XLA's own gather and scatter, as for every other device.
Source: XlaDenseScatter in torch_xla/csrc/xla_lower_util.cpp, IsSparseGather in torch_xla/csrc/data_ops.cpp.
"""
_UNSEEN = "a line that created a tensor on 'xla', or moved one there, inside C++"

_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


class DeviceInUseError(UsageError, RuntimeError):
    """A launch in a process that already uses a device; torch_xla raises RuntimeError there."""


@dataclass(frozen=True)
class _Runtime:
    count: Callable[[], int | None]
    check: Callable[[], None]
    then: Callable[[], None]


@dataclass
class _ProcessState:
    runtimes: list[_Runtime] = field(default_factory=list)
    originals: list[tuple[Any, str, Any]] = field(default_factory=list)
    line: str | None = None


_own = _ProcessState()


def watch(
    count: Callable[[], int | None],
    check: Callable[[], None] = lambda: None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Watch for the first use of a device: refuse it where replicas were asked for, or record its line.

    Until then, ``xr.world_size()`` and ``xr.global_device_count()`` use none. Several runtimes may call this.

    Args:
        count: returns how many replicas a launch by this process would start, which those two then return (or
            1, in a script without a launch); None in a replica, or where the runtime has no part in launches.
        check: called before a device is used; raises UsageError if there is none.
        then: called once a device is used.
    """
    # Several runtimes may be installed; torch_xla imports the plugins of all.
    _own.runtimes.append(_Runtime(count, check, then))
    if len(_own.runtimes) > 1:
        return
    for name in dir(_native):
        if name.startswith(_DEVICE_FUNCTIONS):
            _replace(_native, name, _watched)
    for name in ("world_size", "global_device_count"):
        _replace(xr, name, _counted)
    register_optimizer_step_post_hook(UnsyncedSteps())
    program_checks.watch_training()
    # These are never removed: torch_xla asks each plugin only once.
    for plugin in plugins._plugin_registry.values():
        _watch_plugin(plugin)
    register = plugins.register_plugin

    @functools.wraps(register)
    def register_plugin(name: str, plugin: plugins.DevicePlugin) -> None:
        _watch_plugin(plugin)
        register(name, plugin)

    plugins.register_plugin = register_plugin  # type: ignore[assignment]


def is_in_use() -> bool:
    """Return whether this process uses a device."""
    return bool(_native._xla_runtime_is_initialized())


def refuse(launcher: str) -> None:
    """Refuse to launch from a process that already uses a device; a TPU's chips would refuse later.

    Raises:
        DeviceInUseError: the process uses a device; the error names the line that used it first.
    """
    if is_in_use():
        line = _own.line or _UNSEEN
        what = f"{launcher} was called in a process that already uses a device, initialized at {line}"
        raise DeviceInUseError(what, where=launcher, fix="Use devices only in the function that is launched.")


def _replace(module: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(module, name)
    _own.originals.append((module, name, original))
    setattr(module, name, wrap(original))


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before_use()
        result = function(*args, **kwargs)
        if not is_in_use() or not _own.originals:
            return result
        for module, name, original in _own.originals:
            setattr(module, name, original)
        _own.originals.clear()
        for runtime in _own.runtimes:
            runtime.then()
        # Called again, because the callbacks may have changed the answer, such as the number of replicas.
        return function(*args, **kwargs)

    return watched


def _counted(function: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(function)
    def counted() -> int:
        # torch_xla would start its client, and no launch could follow.
        if not is_in_use() and not xr.is_spmd():
            if main_module.importing:
                return main_module.importing[0]
            # A launch reports what is wrong with its plan.
            with contextlib.suppress(UsageError):
                for runtime in _own.runtimes:
                    if count := runtime.count():
                        # A program that launches nothing is alone, however many devices it has.
                        is_asked = function.__name__ != "world_size" or _asked_by()
                        return count if is_asked or main_module.may_launch() else 1
        return function()

    return counted


def _asked_by() -> str | None:
    """Return how the user asked for a number of replicas; None if it is the number that the machine has."""
    asked = env.setting(env.snapshot(), env.POLYXLA_DEVICES, "auto")
    return None if asked.value == "auto" else asked.origin


def _watch_plugin(plugin: plugins.DevicePlugin) -> None:
    library_path = plugin.library_path

    @functools.wraps(library_path)
    def watched() -> Any:
        before_use()
        return library_path()

    plugin.library_path = watched  # type: ignore[method-assign]


def before_use() -> None:
    """Record the user's line, unless a device is in use already. Called before the device is used.

    Also choose torch_xla's exact programs, by `_EXACT`.

    Ends the program if there is no device, or if replicas were asked for and this process is not one of them.
    An exception that programs catch would not do: torch_xla aborts the process when it starts its client for
    the second time.
    """
    if is_in_use():
        return
    # The user's own values of these variables count.
    own = env.snapshot()
    env.update_environ({name: value for name, value in _EXACT.items() if name not in own})
    _own.line = callsite.user_line()
    with ended_by_errors():
        _check_use()


def _check_use() -> None:
    for runtime in _own.runtimes:
        runtime.check()
    # An SPMD program drives all devices itself, and launches nothing.
    origin = None if xr.is_spmd() else _asked_by()
    for runtime in _own.runtimes if origin else ():
        if (count := runtime.count() or 1) > 1:
            raise UsageError(
                f"{count} replicas were asked for, but {_own.line or 'this process'} uses a device without "
                "launching them",
                where=origin,
                fix="Use devices only in a function that torch_xla.launch or polyxla.launch starts; or run "
                "the whole program in each replica (polyxla run --each), or in only one (--devices 1).",
            )
