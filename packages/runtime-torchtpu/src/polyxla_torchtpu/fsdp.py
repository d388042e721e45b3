"""FSDP2 on TorchTPU: `fully_shard` takes a module whose parameters are on the CPU, also on a real TPU.

This module is imported while torch's package of FSDP2 is, so it imports nothing else of this package.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def teach(module: Any) -> None:
    """Let `fully_shard` move parameters: it sets their data, which torch refuses from the CPU to TorchTPU.

    Args:
        module: that in which torch does so, ``torch.distributed.fsdp._fully_shard._fsdp_init``.
    """
    move = module._move_states_to_device

    @functools.wraps(move)
    def move_states(params: Sequence[Any], buffers: Sequence[Any], device: torch.device) -> None:
        for tensor in (*params, *buffers) if device.type == "tpu" else ():
            # torch itself swaps those that consist of others.
            if tensor.device.type == "cpu" and not is_traceable_wrapper_subclass(tensor):
                _move(tensor, device)
        move(params, buffers, device)

    module._move_states_to_device = move_states


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    moved = tensor.detach().to(device).requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved.detach(), tensor.requires_grad)
    # Otherwise the tensor would lose its attributes.
    moved.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, moved)
