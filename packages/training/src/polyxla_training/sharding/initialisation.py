"""Parameters on the meta device receive their first values, on the host, a block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyxla import UsageError


def check_can_initialise(module: torch.nn.Module) -> None:
    """Refuse a module with tensors on the meta device that it cannot give values.

    Raises:
        UsageError: a part with such tensors has no ``reset_parameters``.
    """
    stuck = [
        f"{name or 'the module itself'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if _own_meta(part) and not callable(getattr(part, "reset_parameters", None))
    ]
    if stuck:
        raise UsageError(
            f"parts with tensors on the meta device have no reset_parameters: {', '.join(stuck[:3])}",
            where=type(module).__name__,
            fix="Write reset_parameters(self) in them, which gives their own parameters and buffers values, "
            "as torch's layers have.",
        )


def initialise(parts: Sequence[torch.nn.Module], seed: int) -> None:
    """Replace the meta tensors of `parts` by tensors on the host with first values; tied ones stay tied.

    Args:
        parts: modules, each of which stands for its own tensors, not for those of its parts.
        seed: makes the same values in every replica; torch's generator is as before afterwards.
    """
    parts = [part for part in parts if _own_meta(part)]
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for part in parts:
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((tensors, name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in parts:
            part.to_empty(device="cpu", recurse=False)
            part.reset_parameters()  # type: ignore[operator]
    for (first, first_name), *others in places.values():
        for tensors, name in others:
            tensors[name] = first[first_name]


def _own_meta(part: torch.nn.Module) -> bool:
    own = (*part._parameters.values(), *part._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)
