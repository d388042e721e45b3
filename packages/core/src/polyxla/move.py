"""Moving a module between host and device without breaking it.

On XLA a move makes new tensors, so parameters that were one become several (pytorch/xla#2719): the
copies then train apart in silence. Here the ties are noted before the move and made again after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from polyxla.notices import say


def move_module(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move `module` in place, keep its tied parameters and buffers tied, call its own tying hook.

    A module with an ``on_post_move_to_device`` method has it called after the move. A different
    number of parameters afterwards is said, since training would go wrong without a word.
    """
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
    return module


def _ties(module: torch.nn.Module) -> Iterator[list[tuple[torch.nn.Module, str]]]:
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner in module.modules():
        # The dicts themselves, because named_parameters() lists a shared parameter once only.
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((owner, name))
    return (shared for shared in places.values() if len(shared) > 1)
