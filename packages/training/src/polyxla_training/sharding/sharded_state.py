"""The state of a divided module and its optimizer, in one piece and back in shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from polyxla.pytree import map_tensors
from polyxla.replica.module_move import optimizer_parameters


def gathered(state: Any, *, keep: bool) -> Any:
    """Return the pytree with each divided tensor whole, on the host. A collective.

    The device holds one whole tensor at a time, the host all of them.

    Args:
        state: as in every other replica.
        keep: whether this replica wants them. If not, they are None in what it returns.
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, DTensor):
            return tensor
        found = tensor.full_tensor().detach()
        return found.cpu() if keep else None

    return map_tensors(whole, state)


def divide_into(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    module_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
    is_strict: bool,
) -> None:
    """Load whole tensors into a divided module and its optimizer: each replica keeps its shards.

    Args:
        module: the module on the device.
        optimizer: holds its parameters.
        module_state: as ``module.state_dict()`` of a module that is not divided.
        optimizer_state: as the optimizer's ``state_dict()`` there.
        is_strict: whether names may not be missing.

    Raises:
        ValueError: the optimizer's state does not fit.
    """
    with torch.no_grad():
        own = module.state_dict()
        module.load_state_dict(
            {name: _as(own.get(name), value) for name, value in module_state.items()}, strict=is_strict
        )
        parameters = optimizer_parameters(optimizer)
        states = {
            number: {
                key: _as(parameters[number], value) if _has_shape(value, parameters[number]) else value
                for key, value in values.items()
            }
            for number, values in optimizer_state["state"].items()
            if number < len(parameters)
        }
        optimizer.load_state_dict({**optimizer_state, "state": states})


def _has_shape(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _as(like: Any, value: Any) -> Any:
    """Return `value` divided as `like` is."""
    if not isinstance(like, DTensor):
        return value
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(value.shape, like.device_mesh, like.placements)
    part = value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    return DTensor.from_local(
        part.contiguous().to(like.device, like.dtype),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
