"""Keeping replicas alike: checks that they train the same parameters, and the means of their gradients.

Without them, training would go wrong silently. Heavy: imported in the replica.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch

from polyxla.console import say_once
from polyxla.errors import UsageError
from polyxla.replica.collectives import Collectives
from polyxla.replica.module_move import optimizer_parameters

BUCKET_BYTES = 25 << 20
"""Tensors of at most this size together share a collective. Source: ``bucket_cap_mb`` of torch's DDP."""


def find_mismatch(replica: Collectives, module: torch.nn.Module) -> str:
    """Return the name of a parameter or buffer that differs between replicas; empty if all agree.

    A collective. It reads tensors back from the device and compares 32-bit checksums, not values.

    Raises:
        UsageError: the replicas' modules do not have the same parameters and buffers.
    """
    if replica.world_size == 1:
        return ""
    named = chain(module.named_parameters(), module.named_buffers())
    mine = {name: _checksum(tensor) for name, tensor in named}
    # Checksums suffice, and spare a large model's parameters the way between hosts.
    first, *others = replica.all_gather(mine)
    if any(other.keys() != first.keys() for other in others):
        partial = sorted(set(first).union(*others) - set(first).intersection(*others))
        raise UsageError(
            f"replicas made different modules: only some replicas have {', '.join(partial[:3])}",
            where=f"{type(module).__name__} in the replica with ordinal {replica.ordinal}",
            fix="Build the same module in every replica.",
        )
    return next((name for name in first if any(other[name] != first[name] for other in others)), "")


def broadcast(replica: Collectives, tensors: Iterable[torch.Tensor]) -> None:
    """Copy ordinal 0's values into the `tensors` of every replica, on the device. A collective."""
    with torch.no_grad():
        for tensor in tensors:
            # A broadcast as a sum whose other terms are zero: every runtime has all_reduce.
            part = tensor if replica.is_first else torch.zeros_like(tensor)
            total = replica.all_reduce(part.to(torch.uint8) if part.dtype == torch.bool else part)
            tensor.copy_(total.to(tensor.dtype))
    replica.sync()


def average_gradients(
    parameters: Iterable[torch.nn.Parameter],
    average: Callable[[Sequence[torch.Tensor]], object],
    sync: Callable[[], object],
) -> int:
    """Replace the gradients by their means over the replicas. A collective.

    Replicas may use different parameters, as in a mixture of experts. All of them average the same list: a
    parameter that some replicas did not use counts as zero there, as in torch's DDP. One that no replica used
    keeps None, so that the optimizer skips it. Only a replica without some gradient has to read whether
    others have it.

    Args:
        parameters: the same in every replica.
        average: replaces tensors by their means over the replicas; a collective.
        sync: submits pending work, so that a program with collectives ends where those of the others do.

    Returns:
        How many of the parameters that can be trained have no gradient in any replica.
    """
    # A gradient counts even if training was switched off after the backward pass.
    trained = [tensor for tensor in parameters if tensor.requires_grad or tensor.grad is not None]
    if not trained:
        return 0
    missing = [number for number, parameter in enumerate(trained) if parameter.grad is None]
    for number in missing:
        trained[number].grad = torch.zeros_like(trained[number])
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    device, dtype = gradients[0].device, gradients[0].dtype
    # Made on the device: the usual step, in which no gradient is missing, uploads nothing and reads nothing.
    users = torch.ones(len(trained), dtype=dtype, device=device)
    if missing:
        used = torch.ones(len(trained), dtype=dtype)
        used[missing] = 0
        users = used.to(device)
    average([*gradients, users])
    if not missing:
        return 0
    sync()
    shares = users.cpu()
    unused = [number for number in missing if not shares[number]]
    # None, not zero: an optimizer with momentum or weight decay would move a parameter at a zero gradient.
    for number in unused:
        trained[number].grad = None
    return len(unused)


def average_in_place(
    tensors: Iterable[torch.Tensor], add_up: Callable[[torch.Tensor], object], count: int
) -> None:
    """Replace tensors by their means over the replicas, many of one dtype in one collective.

    Args:
        tensors: of the same dtypes and sizes in every replica, in the same order.
        add_up: replaces one tensor, of one dimension, by its sum over the replicas; a collective.
        count: number of replicas that add up.
    """
    # Sorted by dtype, stably: every replica must form the same groups in the same order.
    groups: list[list[torch.Tensor]] = []
    room = -1
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.dtype)):
        room -= tensor.nbytes
        if room < 0 or groups[-1][0].dtype is not tensor.dtype:
            groups.append([])
            room = BUCKET_BYTES - tensor.nbytes
        groups[-1].append(tensor)
    for group in groups:
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        add_up(flat)
        flat /= count
        means = flat.split([tensor.numel() for tensor in group])
        shaped = [mean.view_as(tensor) for mean, tensor in zip(means, group, strict=True)]
        torch._foreach_copy_(group, shaped)


def _checksum(tensor: torch.Tensor) -> int:
    # Bytes are compared, because values may be NaN, and some dtypes do not support comparison.
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0


def check_optimizer(replica: Collectives, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of parameters that are on another device.

    Raises:
        UsageError: it holds one.
    """
    parameters = optimizer_parameters(optimizer)
    here = sum(parameter.device == replica.device for parameter in parameters)
    if here < len(parameters):
        raise UsageError(
            f"{here} of the {len(parameters)} parameters of {type(optimizer).__name__} are on "
            f"{replica.device}: the optimizer would not update the parameters that are trained",
            where="replica.step",
            fix="Make the optimizer after the module is on the device, or pass both to replica.setup.",
        )


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer none of whose parameters has a gradient in any replica.

    Raises:
        UsageError: it is one.
    """
    parameters = optimizer_parameters(optimizer)
    if all(parameter.grad is None for parameter in parameters):
        raise UsageError(
            f"none of the {len(parameters)} parameters of {type(optimizer).__name__} has a gradient",
            where="replica.step",
            fix="Call loss.backward() first, with an optimizer made from the parameters of the module that "
            "computed the loss; replica.setup(module, optimizer) keeps both together.",
        )


def check_same(replica: Collectives, optimizer: torch.optim.Optimizer) -> None:
    """Warn when replicas are about to train different parameters. A collective; reads the device."""
    if replica.world_size == 1:
        return
    mine = [_checksum(parameter) for parameter in optimizer_parameters(optimizer)]
    if any(other != mine for other in replica.all_gather(mine)):
        say_once(
            "replicas begin with different parameters, and averaged gradients will not make them equal: "
            "move the module to the device with replica.setup(module), or seed before you make it"
        )
