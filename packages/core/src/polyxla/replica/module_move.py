"""Moving a module between host and device without breaking it.

On XLA a move makes new tensors. Parameters that were one become several (pytorch/xla#2719), and the copies
train apart in silence; an optimizer that was made before goes on updating the old ones, in silence too.
Here the ties are noted before the move and made again after it, and optimizers are given the new parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from polyxla.console import say
from polyxla.errors import UsageError
from polyxla.pytree import map_tensors


def move_module(
    module: torch.nn.Module, device: torch.device, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> torch.nn.Module:
    """Move `module` in place, keep its tied parameters and buffers tied, call its own tying hook.

    A module with an ``on_post_move_to_device`` method has it called after the move. A different
    number of parameters afterwards is said, since training would go wrong without a word.

    Args:
        module: what to move.
        device: where to.
        optimizers: those that hold its parameters: they hold the moved ones afterwards, with their state.

    Raises:
        UsageError: an optimizer holds a parameter that is not the module's; nothing was moved.
    """
    optimizers = list(optimizers)
    check_owner(module, optimizers)
    places = list(_parameters(module))
    _move_with_ties(module, device)
    moved = {id(old): getattr(owner, name) for owner, name, old in places}
    for optimizer in optimizers:
        _hand_over(optimizer, moved, device)
    return module


def check_owner(module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that hold what is not the module's.

    Raises:
        UsageError: one holds a parameter of another module, or of this one before it was moved.
    """
    owned = {id(parameter) for _, _, parameter in _parameters(module)}
    for optimizer in optimizers:
        held = held_by(optimizer)
        known = sum(id(parameter) in owned for parameter in held)
        if known < len(held):
            raise UsageError(
                f"{known} of the {len(held)} parameters of {type(optimizer).__name__} are those of "
                f"{type(module).__name__}: the others would never be trained",
                where="an optimizer made before the module was moved or changed",
                fix="Make the optimizer from the parameters of the module that is trained.",
            )


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return every parameter that `optimizer` updates, of all its groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def _parameters(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for owner in module.modules():
        # The dict itself, because named_parameters() lists a shared parameter once only.
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter


def _hand_over(
    optimizer: torch.optim.Optimizer, moved: Mapping[int, torch.nn.Parameter], device: torch.device
) -> None:
    for group in optimizer.param_groups:
        group["params"] = [moved.get(id(one), one) for one in group["params"]]
    state = {moved.get(id(one), one): _state_on(device, kept) for one, kept in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)


def _state_on(device: torch.device, kept: dict[str, Any]) -> dict[str, Any]:
    # torch's optimizers count their steps on the host.
    return {
        name: value if name == "step" else map_tensors(lambda tensor: tensor.to(device), value)
        for name, value in kept.items()
    }


def _move_with_ties(module: torch.nn.Module, device: torch.device) -> None:
    before = sum(1 for _ in module.parameters())
    ties = list(_ties(module))
    module.to(device)
    for (first_owner, first_name), *others in ties:
        shared = getattr(first_owner, first_name)
        for owner, name in others:
            setattr(owner, name, shared)
    hook = getattr(module, "on_post_move_to_device", None)
    if hook is not None:
        hook()
    after = sum(1 for _ in module.parameters())
    if after != before:
        say(
            f"the module has {after} parameters after the move to {device}, {before} before it: "
            "tie them again in on_post_move_to_device, or they train apart"
        )


def _ties(module: torch.nn.Module) -> Iterator[list[tuple[torch.nn.Module, str]]]:
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner in module.modules():
        # The dicts themselves, because named_parameters() lists a shared parameter once only.
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((owner, name))
    return (shared for shared in places.values() if len(shared) > 1)
