"""Reporting what makes plain torch_xla programs train wrongly without a word. Heavy."""

from __future__ import annotations

import functools
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


def watch() -> None:
    """Check the programs of this process from now on."""
    reduce_gradients = xm.reduce_gradients
    # Weak, so that an optimizer that the program drops is freed. Replicas may be threads, with one each.
    checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    # xm.optimizer_step calls it by this name, too.
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
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    device = next((one.device for one in parameters if one.device.type == "xla"), None)
    if device is None:
        return
    mine = [[_checksum(one), one.grad is not None] for one in parameters]
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
    # One replica says it for all, which have found the same.
    if values.any() and xr.global_ordinal() == 0:
        say_once(
            f"{callsite.user_line()}: replicas begin with different parameters, such as "
            f"{_named(optimizer, values)}, and averaged gradients will not make them equal: seed before you "
            "make the module (torch.manual_seed), or call xm.broadcast_master_param(module)"
        )


def _named(optimizer: torch.optim.Optimizer, found: torch.Tensor) -> str:
    number = int(found.nonzero()[0])
    parameter = [one for group in optimizer.param_groups for one in group["params"]][number]
    return f"parameter {number} of {type(optimizer).__name__}, of shape {tuple(parameter.shape)}"


def _checksum(tensor: torch.Tensor) -> int:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0
