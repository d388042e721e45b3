"""The state of a divided module and its optimizer, in one piece and back in shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from polyxla.plugin import map_tensors, optimizer_parameters
from polyxla_training.checkpoint import CheckpointError

if TYPE_CHECKING:
    from polyxla_training.checkpoint.shard_reader import ShardedCheckpoint


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
        # A collective, so replicas that do not keep the result take part too.
        found = tensor.full_tensor().detach()
        return found.cpu() if keep else None

    return map_tensors(whole, state)


def divide_into(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    module_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
    is_strict: bool,
    shards: ShardedCheckpoint | None = None,
) -> None:
    """Load tensors into a divided module and its optimizer: each replica keeps its shards.

    Args:
        module: the module on the device.
        optimizer: holds its parameters.
        module_state: as ``module.state_dict()`` of a module that is not divided.
        optimizer_state: as the optimizer's ``state_dict()`` there.
        is_strict: whether names may not be missing.
        shards: reads those tensors that it has left unread in the states; None if there are none.

    Raises:
        ValueError: the optimizer's state does not fit.
        CheckpointError: a hook has computed with tensors that are not read yet.
        DamagedCheckpointError: a shard is missing or damaged.
    """
    with torch.no_grad():
        # The module's own tensors tell how each is divided; only names that it has are read.
        own, division = module.state_dict(), _DividedState(shards)
        module_shards = {
            name: division.add(own[name], value) for name, value in module_state.items() if name in own
        }
        division.read()
        module.load_state_dict(module_shards, strict=is_strict)
        # Freed before the optimizer's state is read, so that the device never holds both twice.
        del module_shards
        parameters = optimizer_parameters(optimizer)
        states = {
            number: {
                key: division.add(_if_like(parameters[number], value), value) for key, value in values.items()
            }
            for number, values in optimizer_state["state"].items()
            if number < len(parameters)
        }
        others = {key: value for key, value in optimizer_state.items() if key != "state"}
        # The rest, such as step counts and learning rates, is whole in every replica.
        others = map_tensors(lambda tensor: division.add(None, tensor), others)
        division.read()
        optimizer.load_state_dict({**others, "state": states})


class _DividedState:
    """The tensors of one state, divided: this replica's shards of them.

    Args:
        shards: as for `divide_into`.
    """

    def __init__(self, shards: ShardedCheckpoint | None) -> None:
        self._shards = shards
        self._unread: dict[str, torch.Tensor] = {}

    def add(self, like: Any, value: Any) -> Any:
        """Return `value` divided as `like` is; if it is unread, `read` fills it.

        Raises:
            CheckpointError: a hook has computed it from an unread tensor.
        """
        name = None if self._shards is None else self._shards.name_of(value)
        if name is None:
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise CheckpointError(
                    "a tensor has been computed from one of a checkpoint in shards, which is not read yet",
                    where="on_load_checkpoint",
                    fix="Rename, remove or replace tensors there, and compute in on_fit_start.",
                )
            return _as(like, value)
        empty = torch.empty_like(like) if isinstance(like, DTensor) else _empty_on_host(value)
        # Tied tensors have one name, and stay one tensor.
        return self._unread.setdefault(name, empty)

    def read(self) -> None:
        """Fill the tensors that were unread when they were added."""
        if self._shards is not None:
            self._shards.read(self._unread)
        self._unread = {}


def _empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _if_like(parameter: torch.Tensor, value: Any) -> torch.Tensor | None:
    """Return the parameter if an optimizer's value has an element for each of its elements."""
    is_like = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
    return parameter if is_like else None


def _as(like: Any, value: Any) -> Any:
    """Return `value` divided as `like` is."""
    if not isinstance(like, DTensor):
        return value
    # torch's own function, so that the shards are those that `fully_shard` and `parallelize_module` make.
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
