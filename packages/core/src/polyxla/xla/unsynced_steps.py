"""Reporting a loop without ``torch_xla.sync()``: its steps become one program, which nothing runs. Heavy."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch_xla

from polyxla import callsite
from polyxla.console import say_once

STEPS, SECONDS = 10, 5.0
"""A loop is reported once it has made so many steps for longer than this, and submitted none of them."""
_native: Any = torch_xla._XLAC  # type: ignore[attr-defined]


class UnsyncedSteps:
    """A hook of torch's optimizers: counts the steps since the last one that was submitted to the device."""

    def __init__(self) -> None:
        self._syncs, self._steps, self._since = -1, 0, 0.0

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count a step; called in its thread after it."""
        if torch.compiler.is_compiling():
            return
        # torch_xla counts every sync, also those of its loader and of xm.optimizer_step.
        syncs = _native._xla_counter_value("MarkStep") or 0
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
