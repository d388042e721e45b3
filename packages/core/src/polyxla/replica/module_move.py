"""Moving a module between host and device, with its tied parameters and its optimizers.

On XLA a move makes new tensors. Tied parameters become separate copies that diverge silently
(pytorch/xla#2719), and an optimizer made before the move silently keeps updating the old tensors. Here ties
are recorded before the move and restored after it, and optimizers receive the new parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from polyxla.console import say
from polyxla.errors import UsageError
from polyxla.pytree import map_tensors


def move_module(
    module: torch.nn.Module, device: torch.device, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> torch.nn.Module:
    """Move `module` in place and keep its tied parameters and buffers tied.

    The module's ``on_post_move_to_device`` method, if it has one, is called after the move. If the number of
    parameters has changed, a warning is printed.

    Args:
        module: the module to move.
        device: the destination.
        optimizers: optimizers of its parameters; afterwards they hold the moved parameters and their state.

    Raises:
        UsageError: an optimizer holds a parameter that the module does not have; nothing was moved.
    """
    optimizers = list(optimizers)
    check_owner(module, optimizers)
    # After the move, the old parameters are no longer in the module, so record them first.
    before = list(parameters_of(module))
    _move_with_ties(module, device)
    moved = {id(old): getattr(owner, name) for owner, name, old in before}
    for optimizer in optimizers:
        hand_over(optimizer, moved, device)
    return module


def check_initialized(module: torch.nn.Module) -> None:
    """Refuse a module whose lazy layers have seen no input: they would be moved with no elements.

    Raises:
        UsageError: it has such a layer.
    """
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"{', '.join(lazy[:3])} {'have' if len(lazy) > 1 else 'has'} no shape before the first batch",
            where=f"{type(module).__name__}, which has lazy layers",
            fix="Pass an example through the module on the CPU before it is trained: module(example).",
        )


def check_owner(module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that hold parameters of another module.

    Raises:
        UsageError: an optimizer holds a parameter of another module, or of this one before it was moved.
    """
    owned = {id(parameter) for _, _, parameter in parameters_of(module)}
    for optimizer in optimizers:
        parameters = optimizer_parameters(optimizer)
        known = sum(id(parameter) in owned for parameter in parameters)
        if known < len(parameters):
            raise UsageError(
                f"only {known} of the {len(parameters)} parameters of {type(optimizer).__name__} belong to "
                f"{type(module).__name__}; it would never train the others",
                where="an optimizer made before the module was moved or changed",
                fix="Make the optimizer from the parameters of the module that is trained.",
            )


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups of `optimizer`.

    Raises:
        UsageError: it is not an optimizer.
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        # Lightning's Fabric and Accelerate return the optimizers, too; two layers can be unpacked as well.
        raise UsageError(
            f"{type(optimizer).__name__} is not an optimizer",
            where="replica.setup or replica.step",
            fix="Write model = replica.setup(model, optimizer), which returns the module alone and changes "
            "the optimizer in place. Loaders go to replica.loader.",
        )
    return [parameter for group in groups for parameter in group["params"]]


def parameters_of(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Yield the owner, the name there and the parameter, a shared one for each of its owners."""
    for owner in module.modules():
        # The dict itself, because named_parameters() lists a shared parameter only once.
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter


def hand_over(
    optimizer: torch.optim.Optimizer, moved: Mapping[int, torch.nn.Parameter], device: torch.device
) -> None:
    """Replace the optimizer's parameters using `moved`, a map from old ids, and move its state."""
    for group in optimizer.param_groups:
        group["params"] = [moved.get(id(old), old) for old in group["params"]]
    state = {moved.get(id(old), old): _state_on(device, values) for old, values in optimizer.state.items()}
    # In place: schedulers and hooks hold the same dict.
    optimizer.state.clear()
    optimizer.state.update(state)


def _state_on(device: torch.device, state: dict[str, Any]) -> dict[str, Any]:
    # torch's optimizers keep their step count on the host.
    return {
        name: value if name == "step" else map_tensors(lambda tensor: tensor.to(device), value)
        for name, value in state.items()
    }


def _move_with_ties(module: torch.nn.Module, device: torch.device) -> None:
    before = sum(1 for _ in module.parameters())
    ties = list(_ties(module))
    module.to(device)
    for (first_owner, first_name), *others in ties:
        shared = getattr(first_owner, first_name)
        for owner, name in others:
            setattr(owner, name, shared)
    # Lightning's name for the hook in which a module ties its parameters again.
    hook = getattr(module, "on_post_move_to_device", None)
    if hook is not None:
        hook()
    after = sum(1 for _ in module.parameters())
    if after != before:
        say(
            f"the module has {after} parameters after the move to {device}, {before} before it: "
            "tie them again in on_post_move_to_device, or the copies will diverge"
        )


def _ties(module: torch.nn.Module) -> Iterator[list[tuple[torch.nn.Module, str]]]:
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner in module.modules():
        # The dicts themselves, because named_parameters() lists a shared parameter only once.
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((owner, name))
    return (shared for shared in places.values() if len(shared) > 1)
