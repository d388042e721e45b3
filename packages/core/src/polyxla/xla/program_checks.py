"""Reporting plain torch_xla programs that train wrongly, or compute nothing, without an error. Heavy."""

from __future__ import annotations

import functools
import time
import weakref
import zlib
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from polyxla import callsite
from polyxla.console import say_once
from polyxla.errors import UsageError

_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


STEPS, SECONDS = 10, 5.0
"""A loop is reported once it has made so many steps for longer than this, and submitted none of them."""
READS = 10
"""A loop is reported once it has made so many collectives and compiled so many programs without a sync."""


def watch_training() -> None:
    """Check the programs of this process from now on."""
    reduce_gradients = xm.reduce_gradients
    # Weak, so that an optimizer that the program drops is freed. Replicas may be threads, with one each.
    checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    # xm.optimizer_step calls it by this name as well.
    @functools.wraps(reduce_gradients)
    def checked_reduce_gradients(
        optimizer: torch.optim.Optimizer, groups: list[list[int]] | None = None, pin_layout: bool = True
    ) -> None:
        # torch_xla.compile(full_graph=True) allows no other program than its own.
        if not groups and optimizer not in checked and _native._get_allow_execution():
            checked.add(optimizer)
            if xr.world_size() > 1:
                _compare(optimizer)
        reduce_gradients(optimizer, groups, pin_layout)

    xm.reduce_gradients = checked_reduce_gradients


def _compare(optimizer: torch.optim.Optimizer) -> None:
    """Compare the parameters, and which of them have a gradient, with those of the other replicas.

    A collective, in a program of its own: the step's stays whole.

    Raises:
        UsageError: the replicas have gradients of different parameters.
    """
    parameters = _parameters(optimizer)
    device = next((each.device for each in parameters if each.device.type == "xla"), None)
    if device is None:
        return
    # A checksum of each parameter is exchanged: comparing the values would send all parameters between the
    # replicas.
    mine = [[_checksum(parameter), parameter.grad is not None] for parameter in parameters]
    # Without pinned layouts, which would make the gathering run all collectives before it.
    sent: Any = torch.tensor(mine, dtype=torch.int64).to(device)
    every = xm.all_gather(sent[None], pin_layout=False).cpu()
    values, gradients = (every != every[0]).any(dim=0).unbind(1)
    if gradients.any():
        raise UsageError(
            f"replicas have gradients of different parameters, such as {_named(optimizer, gradients)}: "
            "xm.reduce_gradients would add up gradients of different ones",
            where=callsite.user_line(),
            fix="Call replica.step(optimizer) of polyxla.launch, which reduces all, or let each loss depend "
            "on all parameters.",
        )
    # All replicas have found the same, so one of them reports it.
    if values.any() and xr.global_ordinal() == 0:
        say_once(
            f"{callsite.user_line()}: replicas begin with different parameters, such as "
            f"{_named(optimizer, values)}, and averaged gradients will not make them equal: seed before you "
            "make the module (torch.manual_seed), or call xm.broadcast_master_param(module)"
        )


def _named(optimizer: torch.optim.Optimizer, found: torch.Tensor) -> str:
    number = int(found.nonzero()[0])
    parameter = _parameters(optimizer)[number]
    return f"parameter {number} of {type(optimizer).__name__}, of shape {tuple(parameter.shape)}"


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _checksum(tensor: torch.Tensor) -> int:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0


class UnsyncedSteps:
    """A hook of torch's optimizers: counts the steps since the last one that was submitted to the device.

    Without a sync, the steps become one program, which nothing runs.
    """

    def __init__(self) -> None:
        self._syncs, self._steps, self._since = -1, 0, 0.0

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count a step; called in its thread after it."""
        if torch.compiler.is_compiling():
            return
        # torch_xla counts every sync, also those of its loader and of xm.optimizer_step.
        syncs = _count("MarkStep")
        if syncs != self._syncs:
            self._syncs, self._steps, self._since = syncs, 0, time.monotonic()
        self._steps += 1
        if self._steps < STEPS or time.monotonic() - self._since < SECONDS:
            return
        devices = {parameter.device.type for parameter in _parameters(optimizer)}
        if "xla" in devices and not _native._get_use_eager_mode():
            say_once(
                f"{callsite.user_line()} makes optimizer steps, and none has run for {SECONDS:g} s: without "
                "torch_xla.sync() all steps become one program. Call it after each step, or let "
                "replica.step(optimizer) do both."
            )


class UnsyncedCollectives:
    """Counts a replica's collectives since the last sync, and the programs that were compiled in that time.

    A read runs what it needs, and that is every collective since the last sync: each runs after the one
    before it. So each read runs all of them again, in another program.
    """

    def __init__(self) -> None:
        self._syncs, self._calls, self._compiles = -1, 0, 0

    def called(self) -> None:
        """Count a collective."""
        if torch.compiler.is_compiling():
            return
        syncs, compiles = _count("MarkStep"), _count("UncachedCompile")
        if syncs != self._syncs:
            self._syncs, self._calls, self._compiles = syncs, 0, compiles
        self._calls += 1
        if min(self._calls, compiles - self._compiles) >= READS:
            say_once(
                f"{callsite.user_line()} reads collectives in a loop without torch_xla.sync(): each read "
                "runs all earlier ones again, in a new program. Call torch_xla.sync() after each read."
            )


def _count(name: str) -> int:
    return _native._xla_counter_value(name) or 0
