"""Guards against training that goes wrong in silence: what replicas and optimizers must have in common.

Heavy: imported in the replica, when a module is set up or an optimizer makes its first step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import chain

import torch

from polyxla.console import say_once
from polyxla.errors import UsageError
from polyxla.replica.collectives import Collectives
from polyxla.replica.module_move import held_by


def differing(replica: Collectives, module: torch.nn.Module) -> str:
    """Name a parameter or buffer that another replica has otherwise than ordinal 0; empty for none.

    A collective. Reads what is on a device; compares 32-bit checksums, not values.

    Raises:
        UsageError: the replicas' modules do not have the same parameters and buffers.
    """
    if replica.world_size == 1:
        return ""
    mine = {name: _checksum(tensor) for name, tensor in _named(module)}
    first, *others = replica.all_gather(mine)
    if any(other.keys() != first.keys() for other in others):
        raise UsageError(
            f"replicas made different modules: {sorted(first.keys() ^ mine.keys())[:3]} and others differ",
            where=f"{type(module).__name__} in the replica with ordinal {replica.ordinal}",
            fix="Build the same module in every replica.",
        )
    return next((name for name in first if any(other[name] != first[name] for other in others)), "")


def take_from_first(replica: Collectives, module: torch.nn.Module) -> None:
    """Give every replica ordinal 0's parameters and buffers. A collective."""
    with torch.no_grad():
        for _, tensor in _named(module):
            # A sum whose other terms are zero: every runtime has one.
            part = tensor if replica.is_first else torch.zeros_like(tensor)
            total = replica.all_reduce(part.to(torch.uint8) if part.dtype == torch.bool else part)
            tensor.copy_(total.to(tensor.dtype))
    replica.sync()


def _named(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _checksum(tensor: torch.Tensor) -> int:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0


def check_optimizer(replica: Collectives, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would update nothing.

    Raises:
        UsageError: its parameters are on another device, or none of them has a gradient.
    """
    held = held_by(optimizer)
    here = sum(one.device == replica.device for one in held)
    if here < len(held):
        raise UsageError(
            f"{here} of the {len(held)} parameters of {type(optimizer).__name__} are on {replica.device}: "
            "what it updates is not what is trained",
            where="replica.step",
            fix="Make the optimizer after the module is on the device, or pass both to replica.setup.",
        )
    if all(one.grad is None for one in held):
        raise UsageError(
            f"none of the {len(held)} parameters of {type(optimizer).__name__} has a gradient",
            where="replica.step",
            fix="Call loss.backward() before, with an optimizer made from the parameters of the module that "
            "computed the loss; replica.setup(module, optimizer) keeps both together.",
        )


def check_same(replica: Collectives, optimizer: torch.optim.Optimizer) -> None:
    """Say when replicas are about to train different parameters. A collective; reads the device."""
    if replica.world_size == 1:
        return
    mine = [_checksum(one) for one in held_by(optimizer)]
    if any(other != mine for other in replica.all_gather(mine)):
        say_once(
            "replicas begin with different parameters, and averaged gradients will not make them equal: "
            "bring the module to the device with replica.setup(module), or seed before you make it"
        )
