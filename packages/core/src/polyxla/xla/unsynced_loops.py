"""Reporting loops without ``torch_xla.sync()``: torch_xla keeps all that they record. Heavy."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch_xla

from polyxla import callsite
from polyxla.console import say_once

STEPS, SECONDS = 10, 5.0
"""A loop is reported once it has made so many steps for longer than this, and submitted none of them."""
READS = 10
"""A loop is reported once it has made so many collectives and compiled so many programs without a sync."""
_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


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
        devices = {one.device.type for group in optimizer.param_groups for one in group["params"]}
        if "xla" in devices and not _native._get_use_eager_mode():
            say_once(
                f"{callsite.user_line()} makes optimizer steps, and none has run for {SECONDS:g} s: without "
                "torch_xla.sync() all steps become one program. Call it after each step, or let "
                "replica.step(optimizer) do both."
            )


class UnsyncedCollectives:
    """Counts a replica's collectives since the last sync, and the programs that were compiled meanwhile.

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
